"""The shared-memory transport: messages, broadcasts, shared regions, and the loss of a worker."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import torch

from gyrostat.core.errors import PeerLost
from gyrostat.core.progress import Progress
from gyrostat.engine.environment import SHARED_MEMORY
from gyrostat.engine.transport import peer_listener
from gyrostat.engine.transport.group import WorkerGroup
from gyrostat.engine.transport.peer_link import MAX_MESSAGE_BYTES
from gyrostat.engine.transport.peer_listener import PeerAddress, PeerListener
from gyrostat.engine.transport.pending import GenerationFloor
from gyrostat.engine.transport.shared_region import SharedRegion

T = TypeVar("T")


def together(
    size: int, path: Path, work: Callable[[WorkerGroup], T], floor: GenerationFloor | None = None
) -> list[T]:
    """Every worker in a thread of its own."""

    def run(rank: int) -> T:
        group = WorkerGroup(rank=rank, size=size, generation=1, store=str(path), timeout_s=60, floor=floor)
        try:
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


@pytest.mark.parametrize("length", [0, 1, 5000, MAX_MESSAGE_BYTES - 100, MAX_MESSAGE_BYTES + 1, 300_000])
def test_every_worker_receives_all_payloads(length: int, tmp_path: Path) -> None:
    def work(group: WorkerGroup) -> list[bytes]:
        assert group.shared_memory is not None
        received = []
        for turn in range(3):
            sent = bytes([group.rank + 1, turn]) * (length // 2) if group.rank else b"short"
            received += group.exchange("test", Progress(step=turn), sent)
        return received

    first, *others = together(3, tmp_path / "store", work)
    assert all(other == first for other in others)
    assert first[0] == b"short"
    assert first[4] == bytes([2, 1]) * (length // 2)


@pytest.mark.parametrize("elements", [0, 3, 50_000])
def test_a_broadcast(elements: int, tmp_path: Path) -> None:
    def work(group: WorkerGroup) -> torch.Tensor:
        tensor = torch.full((elements,), float(group.rank))
        return group.broadcast(tensor, 1).wait()

    for tensor in together(3, tmp_path / "store", work):
        assert torch.equal(tensor, torch.ones(elements))


def test_regions_are_mapped_and_unmapped_when_their_owner_frees_them(tmp_path: Path) -> None:
    def work(group: WorkerGroup) -> list[float]:
        transport = group.shared_memory
        assert transport is not None
        other = 1 - group.rank
        seen, serials = [], list[int]()
        for turn in range(3):
            region = SharedRegion(4000)
            region.memory.view(torch.float32).fill_(10.0 * turn + group.rank)
            serial = int(transport.exchange([region], str(region.serial).encode())[other])
            seen.append(float(transport.peer_memory(other, serial).view(torch.float32)[7]))
            for earlier in serials:
                with pytest.raises(KeyError):
                    transport.peer_memory(other, earlier)
            serials.append(serial)
            transport.exchange((), b"read")
        return seen

    assert together(2, tmp_path / "store", work) == [[1.0, 11.0, 21.0], [0.0, 10.0, 20.0]]


def test_a_worker_that_goes_away_is_noticed_at_once(tmp_path: Path) -> None:
    def work(group: WorkerGroup) -> str:
        group.exchange("test", Progress())
        if group.rank == 1:
            return "gone"
        with pytest.raises(PeerLost) as lost:
            group.exchange("test", Progress(step=1))
        assert group.shared_memory is not None
        with pytest.raises(PeerLost):
            group.shared_memory.exchange((), b"")
        return str(lost.value)

    errors = together(2, tmp_path / "store", work)
    assert "lost another worker of this machine" in errors[0]


def test_messages_sent_before_a_worker_went_away_arrive(tmp_path: Path) -> None:
    """Even if that worker had not read all of its own."""

    def work(group: WorkerGroup) -> list[bytes]:
        if group.rank == 0:
            assert group.shared_memory is not None
            group.shared_memory.buffers[1].send(b"never read")
            group.shared_memory.control[1].send(b"read")
            group.exchange("test", Progress())
            return []
        finish = group.begin_exchange("test", Progress(), b"")
        assert group.shared_memory is not None
        received = [group.shared_memory.control[0].receive()]
        finish()
        return received

    assert together(2, tmp_path / "store", work)[1] == [b"read"]


def test_a_wait_ends_when_the_generation_is_superseded(tmp_path: Path) -> None:
    floor = GenerationFloor()

    def work(group: WorkerGroup) -> str:
        if group.rank == 1:
            assert group.shared_memory is not None
            floor.generation = 2
            with contextlib.suppress(PeerLost):
                group.shared_memory.control[0].receive()  # connected and silent until the other has gone
            return ""
        with pytest.raises(PeerLost) as lost:
            group.exchange("test", Progress())
        return str(lost.value)

    assert "has ended" in together(2, tmp_path / "store", work, floor)[0]


def test_on_several_machines_gloo_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = itertools.count()
    monkeypatch.setattr(peer_listener, "_machine_id", lambda: f"machine {next(names)}")

    def work(group: WorkerGroup) -> list[bytes]:
        assert group.shared_memory is None
        return group.exchange("test", Progress(), str(group.rank).encode())

    assert together(2, tmp_path / "store", work) == [[b"0", b"1"], [b"0", b"1"]]


def test_it_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_MEMORY, "0")
    assert together(2, tmp_path / "store", lambda group: group.shared_memory) == [None, None]


def test_a_process_without_the_secret_is_turned_away() -> None:
    """Nor does it keep the workers from connecting."""
    listener, other = PeerListener(2), PeerListener(2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(listener.address.socket)
        stranger.send(msgspec.msgpack.encode((1, 0, b"a guess")))
        with ThreadPoolExecutor(2) as threads:
            addresses = [listener.address, other.address]
            first = threads.submit(listener.connect, 0, addresses, lambda: None, 60.0)
            second = threads.submit(other.connect, 1, addresses, lambda: None, 60.0)
            found = [first.result(), second.result()]
        assert stranger.recv(10) == b""
    listener.close()
    other.close()
    for each in found:
        assert each is not None
        each.close()


def test_an_address_survives_encoding() -> None:
    address = PeerAddress("a machine", b"\0abc", b"\0" * 16, 1024)
    assert PeerAddress.decode(address.encode()) == address


def test_nothing_is_sent_after_an_interrupted_exchange(tmp_path: Path) -> None:
    """A peer would take it for the message that it did not get."""

    def work(group: WorkerGroup) -> list[str]:
        transport = group.shared_memory
        assert transport is not None
        if group.rank == 1:
            return [transport.regions[0].receive().decode()]
        floor.generation = 2
        for message in (b"first", b"second"):
            with pytest.raises(PeerLost):
                transport.exchange((), message)
        return []

    floor = GenerationFloor()
    assert together(2, tmp_path / "store", work, floor)[1] == ["first"]


def test_gradients_are_sent_where_few_files_may_be_open(tmp_path: Path) -> None:
    def work(group: WorkerGroup) -> list[bool]:
        assert group.shared_memory is not None
        group.shared_memory.max_files = 1024
        return [group.shared_memory.can_share(ranks) for ranks in (2, 100, 5000)]

    assert together(2, tmp_path / "store", work) == [[True, True, False]] * 2


def test_gloo_is_used_where_memory_cannot_be_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise PermissionError(name)

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert together(2, tmp_path / "store", lambda group: group.shared_memory) == [None, None]


def test_a_fork_keeps_no_link_and_no_region_open(tmp_path: Path) -> None:
    """A data worker that outlives its worker must not keep that one's connections alive."""

    def work(group: WorkerGroup) -> str:
        group.exchange("test", Progress())
        if group.rank == 1:
            assert group.shared_memory is not None
            return "gone"
        with pytest.raises(PeerLost) as lost:
            group.exchange("test", Progress(step=1))
        return str(lost.value)

    ready, go = os.pipe()
    region = SharedRegion(100)

    def both(rank: int) -> str:
        group = WorkerGroup(rank=rank, size=2, generation=1, store=str(tmp_path / "store"), timeout_s=60)
        barrier.wait()
        if rank == 1:
            children.append(_fork(ready, go, region))
        barrier.wait()
        try:
            return work(group)
        finally:
            group.close()

    barrier = threading.Barrier(2)
    children: list[int] = []
    with ThreadPoolExecutor(2) as threads:
        errors = list(threads.map(both, range(2)))
    os.close(go)
    os.close(ready)
    assert "lost another worker of this machine" in errors[0]
    assert os.waitpid(children[0], 0)[1] == 0


def _fork(ready: int, go: int, region: SharedRegion) -> int:
    """A process that lives until `go` is closed; its exit code is 0 if the region's file is closed in it."""
    pid = os.fork()
    if pid == 0:
        os.close(go)
        try:
            os.fstat(region.file)
            code = 1
        except OSError:
            code = 0
        os.read(ready, 1)
        os._exit(code)
    return pid
