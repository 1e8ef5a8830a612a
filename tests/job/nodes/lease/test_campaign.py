"""Campaigns in threads and in real processes, on both stores: killed, stopped, handed over."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gyrostat.core.errors import StoreUnreachable
from gyrostat.job.nodes.lease import Campaign, LeaseStore, Timing, open_store
from gyrostat.job.nodes.lease.base import clock
from tests.job.nodes.lease.agent import AgentProcess
from tests.job.nodes.lease.conftest import OpenStore
from tests.job.nodes.lease.etcd_server import EtcdServer

TIMEOUT_S = 120.0
SHORT = {"file": 4.0, "etcd": 5.0}
"""Tests wait for them to expire; a busy machine has to renew them in time."""


class CampaignRecorder:
    """A campaign whose callbacks are kept in order."""

    def __init__(self, store: LeaseStore, name: str, ttl: float = 60.0) -> None:
        self._calls: queue.SimpleQueue[tuple[str, int | str]] = queue.SimpleQueue()
        self.troubles: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.campaign = Campaign(
            store,
            name,
            on_lead=lambda token: self._calls.put(("lead", token)),
            on_follow=lambda holder: self._calls.put(("follow", holder)),
            on_lost=lambda why: self._calls.put(("lost", why)),
            on_trouble=self.troubles.put,
            timing=Timing(ttl=ttl),
        )
        self.campaign.start()

    def next(self) -> tuple[str, int | str]:
        return self._calls.get(timeout=TIMEOUT_S)

    def quiet(self) -> bool:
        return self._calls.empty()


@pytest.fixture
def ttl(address: str) -> float:
    return SHORT[address.partition(":")[0]]


@pytest.fixture
def spawn(address: str) -> Iterator[Callable[[str, float], AgentProcess]]:
    agents: list[AgentProcess] = []

    def start(name: str, ttl: float) -> AgentProcess:
        agents.append(AgentProcess(address, name, ttl))
        return agents[-1]

    yield start
    for agent in agents:
        agent.end()


def test_leaving_hands_over_at_once(open_another: OpenStore) -> None:
    first = CampaignRecorder(open_another(), "a")
    kind, token = first.next()
    assert kind == "lead"
    assert first.campaign.token_now() == token
    second = CampaignRecorder(open_another(), "b")
    assert second.next() == ("follow", "a")
    assert second.campaign.token_now() is None
    first.campaign.close()  # A lease of a minute, and no test waits that long.
    assert first.next() == ("lost", "it leaves")
    assert first.campaign.token_now() is None
    kind, later = second.next()
    assert kind == "lead"
    assert later > token  # type: ignore[operator]
    second.campaign.close()
    assert second.next() == ("lost", "it leaves")
    assert first.quiet()
    assert open_another().current().lease is None


def test_a_callback_that_raises_ends_the_campaign_and_frees_the_lease(open_another: OpenStore) -> None:
    led = threading.Event()

    def fail(token: int) -> None:
        led.set()
        raise ZeroDivisionError(f"leading by {token}")

    lost: list[str] = []
    campaign = Campaign(open_another(), "a", on_lead=fail, on_follow=lambda holder: None, on_lost=lost.append)
    campaign.start()
    assert led.wait(TIMEOUT_S)
    successor = CampaignRecorder(open_another(), "b")
    while (call := successor.next())[0] != "lead":
        assert call == ("follow", "a")
    with pytest.raises(ZeroDivisionError, match="leading by"):
        campaign.close()
    assert lost == ["it leaves"]
    successor.campaign.close()


def test_a_killed_leader_is_followed_by_another_with_a_larger_token(
    spawn: Callable[[str, float], AgentProcess], ttl: float
) -> None:
    leader = spawn("a", ttl)
    token = int(leader.says().removeprefix("lead "))
    others = [spawn("b", ttl), spawn("c", ttl)]
    assert [other.says() for other in others] == ["follow a", "follow a"]
    leader.signal(signal.SIGKILL)
    verdicts = [other.says() for other in others]
    (led,) = [number for number, said in enumerate(verdicts) if said.startswith("lead ")]
    assert int(verdicts[led].removeprefix("lead ")) > token
    assert verdicts[1 - led] == f"follow {others[led].name}"


def test_a_stopped_leader_that_wakes_up_finds_its_writes_refused(
    spawn: Callable[[str, float], AgentProcess], ttl: float, open_another: OpenStore
) -> None:
    leader = spawn("a", ttl)
    assert leader.says().startswith("lead ")
    leader.tell("put generation 1")
    assert leader.says() == "written"
    successor = spawn("b", ttl)
    assert successor.says() == "follow a"
    leader.signal(signal.SIGSTOP)
    assert successor.says().startswith("lead ")
    successor.tell("put generation 2")
    assert successor.says() == "written"
    leader.tell("put generation 1-again")
    leader.signal(signal.SIGCONT)
    said = {leader.says() for _ in range(3)}
    assert {"refused", "follow b"} < said
    assert [line for line in said if line.startswith("lost ")]
    assert open_another().get("generation") == b"2"


def test_etcd_killed_and_started_again_keeps_what_was_written(own_etcd: EtcdServer) -> None:
    stores = [open_store(own_etcd.address("jobs/1")) for _ in range(2)]
    leader = CampaignRecorder(stores[0], "a", ttl=5.0)
    _, token = leader.next()
    assert isinstance(token, int)
    follower = CampaignRecorder(stores[1], "b", ttl=5.0)
    assert follower.next() == ("follow", "a")
    stores[0].put("generation", b"7", token)
    own_etcd.kill()
    kind, why = leader.next()
    assert kind == "lost"
    assert "it could not renew its lease in time: no answer from etcd" in str(why)
    assert "no answer from etcd" in follower.troubles.get(timeout=TIMEOUT_S)
    assert follower.quiet()
    own_etcd.start()
    calls = {"a": leader.next(), "b": follower.next()}
    (led,) = [name for name, (kind, _) in calls.items() if kind == "lead"]
    other = "b" if led == "a" else "a"
    assert calls[led][1] > token  # type: ignore[operator]
    assert calls[other] == ("follow", led)
    assert stores[1].get("generation") == b"7"
    for agent, store in ((leader, stores[0]), (follower, stores[1])):
        agent.campaign.close()
        store.close()


def test_a_short_restart_of_etcd_deposes_nobody(own_etcd: EtcdServer) -> None:
    stores = [open_store(own_etcd.address("jobs/1")) for _ in range(2)]
    leader = CampaignRecorder(stores[0], "a", ttl=30.0)
    _, token = leader.next()
    assert isinstance(token, int)
    follower = CampaignRecorder(stores[1], "b", ttl=30.0)
    assert follower.next() == ("follow", "a")
    own_etcd.kill()
    own_etcd.start()
    _put_when_it_answers(stores[0], token)
    assert leader.campaign.token_now() == token
    leader.campaign.close()
    assert leader.next() == ("lost", "it leaves")
    kind, later = follower.next()
    assert kind == "lead"
    assert later > token  # type: ignore[operator]
    follower.campaign.close()
    for store in stores:
        store.close()


def test_a_leader_stops_in_time_while_etcd_hangs_and_holds_its_request(own_etcd: EtcdServer) -> None:
    store = open_store(own_etcd.address("jobs/1"))
    leader = CampaignRecorder(store, "a", ttl=5.0)
    assert leader.next()[0] == "lead"
    own_etcd.pause()
    kind, why = leader.next()
    assert kind == "lost"
    assert "in time" in str(why)
    own_etcd.resume()
    assert leader.next()[0] == "lead"
    leader.campaign.close()
    store.close()


@pytest.mark.parametrize("kind", ["etcd", "file"])
def test_a_store_that_has_lost_its_data_is_reported(own_etcd: EtcdServer, tmp_path: Path, kind: str) -> None:
    """Leading anew would mean tokens that begin again."""
    events: queue.SimpleQueue[str] = queue.SimpleQueue()
    address = own_etcd.address("test") if kind == "etcd" else f"file://{tmp_path}/store"
    with (
        contextlib.closing(open_store(address)) as store,
        Campaign(
            store,
            "a",
            on_lead=lambda token: events.put("leads"),
            on_follow=lambda holder: None,
            on_lost=lambda why: events.put("leads no more"),
            on_store_lost=events.put,
            timing=Timing(ttl=2.0),
        ),
    ):
        assert events.get(timeout=TIMEOUT_S) == "leads"
        if kind == "etcd":
            own_etcd.lose_data()
            own_etcd.start()
        else:
            (tmp_path / "store" / "lease.json").unlink()
        assert events.get(timeout=TIMEOUT_S) == "leads no more"
        assert "was at" in events.get(timeout=TIMEOUT_S)


def _put_when_it_answers(store: LeaseStore, token: int) -> None:
    """etcd says that it is ready a moment before it serves."""
    deadline = clock() + TIMEOUT_S
    while True:
        try:
            return store.put("generation", b"8", token)
        except StoreUnreachable:
            if clock() >= deadline:
                raise
