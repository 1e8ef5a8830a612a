"""What only a directory can do to a store: reboots, other clocks, a lock that is held, damage."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

import gyrostat.job.nodes.lease.file as file_module
from gyrostat.core.clock import VirtualClock
from gyrostat.core.errors import Deposed, StoreRefused, StoreUnreachable, StoreUnusable
from gyrostat.job.nodes.lease import Lease, LeaseView
from gyrostat.job.nodes.lease.base import clock
from gyrostat.job.nodes.lease.file import FileStore


def win(store: FileStore, holder: str = "a", ttl: float = 10.0) -> Lease:
    lease = store.acquire(holder, ttl)
    assert isinstance(lease, Lease)
    return lease


def test_it_expires_when_the_time_has_come_and_not_before(tmp_path: Path) -> None:
    time = VirtualClock(100.0)
    one, other = (FileStore(tmp_path, clock=time.now) for _ in range(2))
    lease = win(one)
    assert lease == Lease("a", 1, 110.0)
    time.advance(109.999)
    assert other.current() == LeaseView(Lease("a", 1), 1)
    assert isinstance(other.acquire("b", 10), LeaseView)
    one.put("generation", b"1", 1)
    time.advance(110.0)
    assert other.current() == LeaseView(None, 1)
    with pytest.raises(Deposed, match="there is no leader"):
        one.put("generation", b"2", 1)
    with pytest.raises(Deposed):
        one.renew(lease)
    assert win(other, "b") == Lease("b", 2, 120.0)


def test_after_a_reboot_the_old_lease_ends_within_its_time(tmp_path: Path) -> None:
    before = VirtualClock(1_000_000.0)
    win(FileStore(tmp_path, clock=before.now, boot="first"))
    after = VirtualClock(20.0)
    store = FileStore(tmp_path, clock=after.now, boot="second")
    assert isinstance(store.acquire("b", 10), LeaseView)
    after.advance(29.9)
    assert isinstance(store.acquire("b", 10), LeaseView)
    after.advance(30.0)
    assert win(store, "b") == Lease("b", 2, 40.0)


def test_a_clock_that_went_back_delays_by_no_more_than_the_lease_lasts(tmp_path: Path) -> None:
    now = 1000.0
    store = FileStore(tmp_path, clock=lambda: now, boot="one")
    win(store)
    now = 400.0
    assert isinstance(store.acquire("b", 10), LeaseView)
    now = 409.9
    assert isinstance(store.acquire("b", 10), LeaseView)
    now = 410.0
    assert win(store, "b").token == 2


def test_a_renewal_seen_by_others_starts_their_wait_anew(tmp_path: Path) -> None:
    time = VirtualClock(100.0)
    holder = FileStore(tmp_path, clock=time.now, boot="one")
    elsewhere = FileStore(tmp_path, clock=time.now, boot="another")
    lease = win(holder)
    for now in (105.0, 112.0, 119.0):
        assert elsewhere.current().lease == Lease("a", 1)
        time.advance(now)
        lease = holder.renew(lease)
    assert elsewhere.current().lease == Lease("a", 1)
    time.advance(130.0)
    assert elsewhere.current() == LeaseView(None, 1)


def test_the_clock_is_not_the_one_that_people_set() -> None:
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    assert abs(clock() - uptime) < 5


def test_tokens_grow_over_releases_and_reopening(tmp_path: Path) -> None:
    tokens = []
    for _ in range(3):
        store = FileStore(tmp_path)
        lease = win(store)
        tokens.append(lease.token)
        store.release(lease)
    assert tokens == [1, 2, 3]


def test_a_lock_that_is_not_released_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "LOCK_TIMEOUT_S", 0.05)
    store = FileStore(tmp_path)
    lease = win(store)
    descriptor = os.open(tmp_path / "lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(StoreUnreachable, match="is one of the job's agents stopped"):
        store.renew(lease)
    assert store.current().lease == Lease("a", 1)
    os.close(descriptor)
    assert store.renew(lease).token == 1


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format":1}', b'{"token":"x"}'])
def test_a_damaged_lease_is_reported_and_not_overwritten(tmp_path: Path, damage: bytes) -> None:
    store = FileStore(tmp_path)
    win(store)
    (tmp_path / "lease.json").write_bytes(damage)
    with pytest.raises(StoreRefused, match=r"lease\.json is not a lease file of this version"):
        store.acquire("b", 10)
    with pytest.raises(StoreUnusable, match="is not a lease file of this version"):
        FileStore(tmp_path)
    assert (tmp_path / "lease.json").read_bytes() == damage


def test_a_removed_directory_is_an_error(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    lease = win(store)
    for name in ("lease.json", "lock"):
        (tmp_path / "store" / name).unlink()
    (tmp_path / "store" / "data").rmdir()
    (tmp_path / "store").rmdir()
    with pytest.raises(StoreUnreachable, match="the lease store cannot be written"):
        store.renew(lease)


def test_nothing_is_left_beside_and_nobody_else_may_read(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    lease = win(store)
    store.put("shards/train", b"1", lease.token)
    files = sorted(path for path in (tmp_path / "store").rglob("*") if path.is_file())
    assert [path.name for path in files] == ["shards%2Ftrain", "lease.json", "lock"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
