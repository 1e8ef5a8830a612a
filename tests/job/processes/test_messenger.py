"""A worker whose agent ends: the next agent receives the messages that the previous one did not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyrostat.core.job import GradientBackend, ReductionChoice, ReductionOrder
from gyrostat.core.phase import AgentPresence
from gyrostat.job.processes.agent_connection import AgentConnection
from gyrostat.job.processes.channel import Channel
from gyrostat.job.processes.messenger import Messenger
from gyrostat.job.processes.protocol import (
    Cancel,
    FromWorker,
    GenerationPrepared,
    Hello,
    Logged,
    Ready,
    Rejoin,
    Started,
    ToWorker,
    WorkerId,
)

WORKER = WorkerId(2, 5)
TIMEOUT_S = 120.0
CHOICE = ReductionChoice(order=ReductionOrder.DDP, carrier=GradientBackend.GLOO, reason="a test")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent.socket"))
        listener.listen()
        listener.settimeout(TIMEOUT_S)
        yield listener


def pair(successor: str | None) -> tuple[AgentConnection, Channel[FromWorker]]:
    ours, theirs = socket.socketpair()
    return AgentConnection(Channel(ours, ToWorker), WORKER, successor), Channel(theirs, FromWorker)


def received(channel: Channel[FromWorker], count: int) -> list[FromWorker]:
    messages: list[FromWorker] = []
    while len(messages) < count:
        more = channel.receive()
        assert more is not None
        messages += more
    return messages


def test_the_next_agent_receives_what_lasts_and_what_was_missed(place: socket.socket) -> None:
    connection, first = pair(place.getsockname())
    messenger = Messenger(connection)
    messenger.started(3, None, [], 4, CHOICE, {"seed": "1"})
    messenger.prepared(2)
    messenger.logged(3, {"loss": 1.0})
    messenger.prepared(4)
    assert len(received(first, 5)) == 5
    first.close()  # the agent is killed
    messenger.logged(7, {"loss": 0.5})
    sent: list[FromWorker] = []

    def next_agent() -> None:
        sock, _ = place.accept()
        second: Channel[FromWorker] = Channel(sock, FromWorker)
        second.send(Cancel(9))
        sent.extend(received(second, 6))
        second.close()

    agent = threading.Thread(target=next_agent)
    agent.start()
    assert next(connection.messages()) == Cancel(9)
    connection.wait_until_sent(TIMEOUT_S)
    messenger.ready({"seed": "1"})
    agent.join()
    hello, rejoin, started, *rest = sent
    assert isinstance(hello, Hello)
    assert rejoin == Rejoin(WORKER)
    assert isinstance(started, Started)
    # Only the last message of each lasting type is sent again.
    assert rest == [GenerationPrepared(4), Logged(7, {"loss": 0.5}), Ready({"seed": "1"})]
    connection.close()


def test_a_worker_is_orphaned_until_an_agent_is_back(place: socket.socket) -> None:
    changes: list[AgentPresence] = []
    orphaned = threading.Event()

    def on_agent(now: AgentPresence) -> None:
        changes.append(now)
        if now is AgentPresence.ORPHANED:
            orphaned.set()

    ours, theirs = socket.socketpair()
    where = Path(place.getsockname())
    away = where.rename(where.with_name("away"))
    connection = AgentConnection(
        Channel(ours, ToWorker), WORKER, str(where), agent_timeout_s=0.0, on_agent=on_agent
    )
    messages = connection.messages()
    listener = threading.Thread(target=lambda: next(messages))
    theirs.close()  # the agent is killed
    listener.start()
    assert orphaned.wait(TIMEOUT_S)
    away.rename(where)
    sock, _ = place.accept()
    second: Channel[FromWorker] = Channel(sock, FromWorker)
    second.send(Cancel(9))
    listener.join()
    assert changes[0] is AgentPresence.AWAY
    assert set(changes[1:-1]) == {AgentPresence.ORPHANED}
    assert changes[-1] is AgentPresence.PRESENT
    second.close()
    connection.close()


def test_without_a_successor_nothing_is_delivered() -> None:
    connection, first = pair(None)
    before = connection.delivers
    first.close()
    connection.send(GenerationPrepared(2))
    assert (before, connection.delivers) == (True, False)
    assert list(connection.messages()) == []
    connection.wait_until_sent(TIMEOUT_S)  # returns at once: there is no agent to wait for
    connection.close()
