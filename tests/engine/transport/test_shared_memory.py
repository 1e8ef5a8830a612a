"""Workers on one machine: what they say, what they see, and what they do when one of them is gone."""

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
from gyrostat.engine.transport import shared_memory as module
from gyrostat.engine.transport.group import GenerationFloor, WorkerGroup
from gyrostat.engine.transport.shared_memory import MOST_BYTES, SWITCH, PeerAddress, PeerListener, Region

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


@pytest.mark.parametrize("length", [0, 1, 5000, MOST_BYTES - 100, MOST_BYTES + 1, 300_000])
def test_everybody_hears_everybody(length: int, tmp_path: Path) -> None:
    def work(group: WorkerGroup) -> list[bytes]:
        assert group.shared_memory is not None
        heard = []
        for turn in range(3):
            said = bytes([group.rank + 1, turn]) * (length // 2) if group.rank else b"short"
            heard += group.exchange("test", Progress(step=turn), said)
        return heard

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


def test_memory_is_seen_and_forgotten(tmp_path: Path) -> None:
    def work(group: WorkerGroup) -> tuple[list[float], list[int]]:
        near = group.shared_memory
        assert near is not None
        other = 1 - group.rank
        seen, known = [], []
        for turn in range(3):
            region = Region(4000)
            region.memory.view(torch.float32).fill_(10.0 * turn + group.rank)
            serial = int(near.show([region], str(region.serial).encode())[other])
            seen.append(float(near.memory(other, serial).view(torch.float32)[7]))
            known.append(len(near.views[other]._seen))
            near.show((), b"seen")
        return seen, known

    (seen, known), (also, _) = together(2, tmp_path / "store", work)
    assert (seen, also) == ([1.0, 11.0, 21.0], [0.0, 10.0, 20.0])
    assert known == [1, 1, 1]


def test_who_goes_away_is_missed_at_once(tmp_path: Path) -> None:
    def work(group: WorkerGroup) -> str:
        group.exchange("test", Progress())
        if group.rank == 1:
            return "gone"
        with pytest.raises(PeerLost) as lost:
            group.exchange("test", Progress(step=1))
        assert group.shared_memory is not None
        with pytest.raises(PeerLost):
            group.shared_memory.show((), b"anybody?")
        return str(lost.value)

    said = together(2, tmp_path / "store", work)
    assert "lost another worker of this machine" in said[0]


def test_what_was_said_before_is_still_heard(tmp_path: Path) -> None:
    """Even if the one who said it went away with something unheard."""

    def work(group: WorkerGroup) -> list[bytes]:
        if group.rank == 0:
            assert group.shared_memory is not None
            group.shared_memory.buffers[1].send(b"never heard")
            group.shared_memory.control[1].send(b"never heard either")
            group.exchange("test", Progress())
            return []
        finish = group.begin_exchange("test", Progress(), b"")
        assert group.shared_memory is not None
        heard = [group.shared_memory.control[0].receive()]
        finish()
        return heard

    assert together(2, tmp_path / "store", work)[1] == [b"never heard either"]


def test_who_waits_looks_up(tmp_path: Path) -> None:
    floor = GenerationFloor()

    def work(group: WorkerGroup) -> str:
        if group.rank == 1:
            assert group.shared_memory is not None
            floor.generation = 2
            with contextlib.suppress(PeerLost):
                group.shared_memory.control[0].receive()  # silent, but there, until the other has gone
            return ""
        with pytest.raises(PeerLost) as lost:
            group.exchange("test", Progress())
        return str(lost.value)

    assert "has ended" in together(2, tmp_path / "store", work, floor)[0]


def test_on_several_machines_gloo_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = itertools.count()
    monkeypatch.setattr(module, "_this_machine", lambda: f"machine {next(names)}")

    def work(group: WorkerGroup) -> list[bytes]:
        assert group.shared_memory is None
        return group.exchange("test", Progress(), str(group.rank).encode())

    assert together(2, tmp_path / "store", work) == [[b"0", b"1"], [b"0", b"1"]]


def test_it_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert together(2, tmp_path / "store", lambda group: group.shared_memory) == [None, None]


def test_a_stranger_is_not_let_in() -> None:
    """Nor does it keep the others from coming."""
    entrance, other = PeerListener(2), PeerListener(2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(entrance.place.address)
        stranger.send(msgspec.msgpack.encode((1, 0, b"a guess")))
        with ThreadPoolExecutor(2) as threads:
            places = [entrance.place, other.place]
            first = threads.submit(entrance.connect, 0, places, lambda: None, 60.0)
            second = threads.submit(other.connect, 1, places, lambda: None, 60.0)
            found = [first.result(), second.result()]
        assert stranger.recv(10) == b""
    entrance.close()
    other.close()
    for each in found:
        assert each is not None
        each.close()


def test_a_place_survives_being_told() -> None:
    place = PeerAddress("a machine", b"\0abc", b"\0" * 16, 1024)
    assert PeerAddress.decode(place.encode()) == place


def test_who_has_given_up_says_no_more(tmp_path: Path) -> None:
    """Else others would take it for what it has not said."""

    def work(group: WorkerGroup) -> list[str]:
        near = group.shared_memory
        assert near is not None
        if group.rank == 1:
            return [near.views[0].hear().decode()]
        floor.generation = 2
        for message in (b"first", b"second"):
            with pytest.raises(PeerLost):
                near.show((), message)
        return []

    floor = GenerationFloor()
    assert together(2, tmp_path / "store", work, floor)[1] == ["first"]


def test_where_files_are_few_gradients_are_sent(tmp_path: Path) -> None:
    def work(group: WorkerGroup) -> list[bool]:
        assert group.shared_memory is not None
        group.shared_memory.files = 1024
        return [group.shared_memory.can_see(ranks) for ranks in (2, 100, 5000)]

    assert together(2, tmp_path / "store", work) == [[True, True, False]] * 2


def test_without_such_memory_there_are_no_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise PermissionError(name)

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert together(2, tmp_path / "store", lambda group: group.shared_memory) == [None, None]


def test_a_fork_has_no_part_in_it(tmp_path: Path) -> None:
    """A data worker that outlives its worker must not look like it."""

    def work(group: WorkerGroup) -> str:
        group.exchange("test", Progress())
        if group.rank == 1:
            assert group.shared_memory is not None
            return "gone"
        with pytest.raises(PeerLost) as lost:
            group.exchange("test", Progress(step=1))
        return str(lost.value)

    ready, go = os.pipe()
    region = Region(100)

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
        said = list(threads.map(both, range(2)))
    os.close(go)
    os.close(ready)
    assert "lost another worker of this machine" in said[0]
    assert os.waitpid(children[0], 0)[1] == 0


def _fork(ready: int, go: int, region: Region) -> int:
    """A process that lives until it may go, and has nothing open of what is its parent's alone."""
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
