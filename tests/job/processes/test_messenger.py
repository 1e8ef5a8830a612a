"""A worker's voice when its agent goes away: what was not heard is said again to the next one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyrostat.core.job import GradientBackend, ReductionChoice, ReductionOrder
from gyrostat.job.processes.messenger import Messenger
from gyrostat.job.processes.protocol import (
    Cancel,
    Channel,
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

SEAT = WorkerId(2, 5)
PATIENCE_S = 120.0
CHOICE = ReductionChoice(order=ReductionOrder.DDP, carrier=GradientBackend.GLOO, reason="a test")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent.socket"))
        listener.listen()
        listener.settimeout(PATIENCE_S)
        yield listener


def pair(agent: str | None) -> tuple[Messenger, Channel[ToWorker], Channel[FromWorker]]:
    ours, theirs = socket.socketpair()
    mine = Channel[ToWorker](ours, ToWorker)
    return Messenger(mine, SEAT, agent), mine, Channel(theirs, FromWorker)


def heard(channel: Channel[FromWorker], count: int) -> list[FromWorker]:
    messages: list[FromWorker] = []
    while len(messages) < count:
        more = channel.receive()
        assert more is not None
        messages += more
    return messages


def test_the_next_agent_hears_what_counts_and_what_was_missed(place: socket.socket) -> None:
    messenger, _, first = pair(place.getsockname())
    messenger.started(3, None, [], 4, CHOICE, {"seed": "1"})
    messenger.prepared(2)
    messenger.logged(3, {"loss": 1.0})
    messenger.prepared(4)
    assert len(heard(first, 5)) == 5
    first.close()  # the agent is killed
    messenger.logged(7, {"loss": 0.5})
    told: list[FromWorker] = []

    def next_agent() -> None:
        sock, _ = place.accept()
        second: Channel[FromWorker] = Channel(sock, FromWorker)
        second.send(Cancel(9))
        told.extend(heard(second, 6))
        second.close()

    agent = threading.Thread(target=next_agent)
    agent.start()
    assert next(messenger.messages()) == Cancel(9)
    messenger.settle(PATIENCE_S)
    messenger.ready({"seed": "1"})
    agent.join()
    hello, rejoin, started, *rest = told
    assert isinstance(hello, Hello)
    assert rejoin == Rejoin(SEAT)
    assert isinstance(started, Started)
    # Of what lasts only the last of each kind counts.
    assert rest == [GenerationPrepared(4), Logged(7, {"loss": 0.5}), Ready({"seed": "1"})]
    messenger._channel.close()


def test_a_worker_is_orphaned_until_an_agent_is_back(place: socket.socket) -> None:
    changes: list[bool] = []
    orphaned = threading.Event()

    def on_orphaned(now: bool) -> None:
        changes.append(now)
        if now:
            orphaned.set()

    ours, theirs = socket.socketpair()
    mine = Channel[ToWorker](ours, ToWorker)
    where = Path(place.getsockname())
    away = where.rename(where.with_name("away"))
    messenger = Messenger(mine, SEAT, str(where), agent_timeout_s=0.0, on_orphaned=on_orphaned)
    messages = messenger.messages()
    listener = threading.Thread(target=lambda: next(messages))
    theirs.close()  # the agent is killed
    listener.start()
    assert orphaned.wait(PATIENCE_S)
    away.rename(where)
    sock, _ = place.accept()
    second: Channel[FromWorker] = Channel(sock, FromWorker)
    second.send(Cancel(9))
    listener.join()
    assert set(changes[:-1]) == {True}
    assert changes[-1] is False
    second.close()
    messenger._channel.close()


def test_without_a_place_to_look_for_another_it_falls_silent() -> None:
    messenger, mine, first = pair(None)
    before = messenger.heard
    first.close()
    messenger.prepared(2)
    assert (before, messenger.heard) == (True, False)
    assert list(messenger.messages()) == []
    messenger.settle(PATIENCE_S)  # returns at once: there is nobody to wait for
    mine.close()
