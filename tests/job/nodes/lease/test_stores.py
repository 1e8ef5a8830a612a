"""What every store promises, asked of both: a directory, and a real etcd."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gyrostat.core.errors import Deposed, Misuse, ValueTooLarge
from gyrostat.job.nodes.lease import Lease, LeaseStore, LeaseView
from gyrostat.job.nodes.lease.base import LARGEST_VALUE, clock
from tests.job.nodes.lease.conftest import OpenStore

TTL = 60.0


def win(store: LeaseStore, holder: str = "a") -> Lease:
    lease = store.acquire(holder, TTL)
    assert isinstance(lease, Lease)
    return lease


def test_one_gets_it_and_the_others_learn_who(open_another: OpenStore) -> None:
    first, second = open_another(), open_another()
    assert first.current().lease is None
    before = clock()
    lease = win(first, "10.0.0.1:4100")
    assert lease.expires is not None
    assert before + TTL <= lease.expires <= clock() + TTL + 1
    seen = second.acquire("10.0.0.2:4100", TTL)
    assert isinstance(seen, LeaseView)
    assert seen.lease == Lease("10.0.0.1:4100", lease.token)
    assert second.current().lease == seen.lease
    assert LeaseView(None, lease.token).order > LeaseView(lease, lease.token).order


def test_of_many_at_once_one_wins(open_another: OpenStore) -> None:
    stores = [open_another() for _ in range(8)]
    start = threading.Barrier(len(stores))

    def campaign(number: int) -> Lease | LeaseView:
        start.wait()
        return stores[number].acquire(str(number), TTL)

    with ThreadPoolExecutor(len(stores)) as pool:
        outcomes = list(pool.map(campaign, range(len(stores))))
    (won,) = [outcome for outcome in outcomes if isinstance(outcome, Lease)]
    seen = {outcome.lease for outcome in outcomes if isinstance(outcome, LeaseView)}
    assert seen == {Lease(won.holder, won.token)}


def test_not_even_its_holder_gets_it_twice(open_another: OpenStore) -> None:
    store = open_another()
    lease = win(store)
    assert isinstance(store.acquire("a", TTL), LeaseView)
    assert store.renew(lease).token == lease.token


def test_a_renewal_lasts_longer_and_keeps_the_token(open_another: OpenStore) -> None:
    store = open_another()
    lease = win(store)
    renewed = store.renew(lease)
    assert (renewed.holder, renewed.token) == (lease.holder, lease.token)
    assert renewed.expires is not None
    assert lease.expires is not None
    assert renewed.expires > lease.expires


def test_released_it_is_free_at_once_and_the_next_token_is_larger(open_another: OpenStore) -> None:
    first, second = open_another(), open_another()
    tokens = []
    for store in (first, second, first):
        lease = win(store)
        tokens.append(lease.token)
        store.release(lease)
        assert second.current().lease is None
        with pytest.raises(Deposed):
            store.renew(lease)
    assert tokens == sorted(set(tokens))


def test_releasing_what_is_over_leaves_the_successor_alone(open_another: OpenStore) -> None:
    first, second = open_another(), open_another()
    old = win(first)
    first.release(old)
    new = win(second, "b")
    first.release(old)
    assert second.renew(new).token == new.token


def test_values_are_read_by_all_and_written_by_the_leader(open_another: OpenStore) -> None:
    first, second = open_another(), open_another()
    assert first.get("generation") is None
    lease = win(first)
    first.put("generation", b"1", lease.token)
    first.put("generation", b"2", lease.token)
    first.put("shards/train", bytes(range(256)), lease.token)
    first.put("empty", b"", lease.token)
    assert second.get("generation") == b"2"
    assert second.get("shards/train") == bytes(range(256))
    assert second.get("empty") == b""


def test_a_deposed_leader_cannot_write(open_another: OpenStore) -> None:
    first, second = open_another(), open_another()
    old = win(first)
    first.put("generation", b"1", old.token)
    first.release(old)
    with pytest.raises(Deposed, match="there is no leader"):
        first.put("generation", b"2", old.token)
    new = win(second, "b")
    with pytest.raises(Deposed, match=f"b leads now, with token {new.token}"):
        first.put("generation", b"2", old.token)
    with pytest.raises(Deposed):
        first.put("another", b"2", old.token)
    with pytest.raises(Deposed):
        second.put("generation", b"2", new.token + 1)
    assert second.get("generation") == b"1"
    assert second.get("another") is None
    second.put("generation", b"3", new.token)
    assert first.get("generation") == b"3"


def test_a_successor_writes_over_what_it_has_not_read(open_another: OpenStore) -> None:
    first, second = open_another(), open_another()
    old = win(first)
    first.put("generation", b"1", old.token)
    first.release(old)
    second.put("generation", b"2", win(second).token)
    assert first.get("generation") == b"2"


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a b", "ä", "x" * 201])
def test_keys_that_not_every_store_can_hold_are_refused(open_another: OpenStore, key: str) -> None:
    store = open_another()
    token = win(store).token
    with pytest.raises(Misuse, match="a key in a lease store is"):
        store.put(key, b"", token)
    with pytest.raises(Misuse):
        store.get(key)


def test_a_value_that_no_store_can_hold_is_refused_for_good(open_another: OpenStore) -> None:
    store = open_another()
    lease = win(store)
    store.put("record", b"x" * LARGEST_VALUE, lease.token)
    with pytest.raises(ValueTooLarge, match="'record' has 1048577 bytes"):
        store.put("record", b"y" * (LARGEST_VALUE + 1), lease.token)
    assert store.get("record") == b"x" * LARGEST_VALUE


def test_a_watch_reports_the_leader_and_every_later_one(open_another: OpenStore) -> None:
    watched, other = open_another(), open_another()
    views: list[LeaseView] = []
    news = threading.Condition()

    def saw(view: LeaseView) -> None:
        with news:
            views.append(view)
            news.notify()

    def notified(count: int) -> LeaseView:
        with news:
            assert news.wait_for(lambda: len(views) >= count, timeout=120)
            return views[count - 1]

    watch = watched.watch(saw)
    assert notified(1).lease is None
    lease = win(other, "a")
    assert notified(2).lease == Lease("a", lease.token)
    other.release(lease)
    assert notified(3).lease is None
    again = win(other, "b")
    assert notified(4).lease == Lease("b", again.token)
    assert [view.order for view in views] == sorted({view.order for view in views})
    watch.close()
    other.release(again)
    assert len(views) == 4
