"""A late copy is the state of the boundary, in whichever thread it is made, or the checkpoint is discarded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyrostat.core.errors import CheckpointError
from gyrostat.core.progress import Progress
from gyrostat.engine.checkpoint import (
    CheckpointStore,
    Discarded,
    JobSnapshot,
    Writer,
    Written,
    latecopy,
    load,
)
from gyrostat.engine.checkpoint.capture import only_updates_change
from gyrostat.engine.checkpoint.faultydisk import FaultyDisk
from gyrostat.engine.checkpoint.hostcopy import HostCopy
from gyrostat.engine.checkpoint.latecopy import CopyInvalidated, LateCopy, choose
from gyrostat.engine.checkpoint.writer import THREAD
from gyrostat.engine.state import flatcopy
from gyrostat.engine.state.digest import digest
from gyrostat.engine.state.flatcopy import FlatRow, RowSlice, rows_of, size_of, views_of
from gyrostat.engine.state.statetree import flatten

WAIT = 60

# Which may wait.


def test_the_state_of_optimizers_may_wait() -> None:
    model = torch.nn.Linear(3, 2)
    adam = torch.optim.Adam(model.parameters())
    lbfgs = torch.optim.LBFGS(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    adam.step()
    lbfgs.step(lambda: 0.0)  # type: ignore[no-untyped-call]
    lbfgs.state[model.weight]["old_dirs"] = [torch.ones(11), torch.ones(13)]
    tracked = {"model": model, "adam": adam, "lbfgs": lbfgs, "not one": {"state": {0: torch.ones(1)}}}
    found = list(only_updates_change(tracked))
    ours = [value for state in adam.state.values() for value in state.values()]
    assert {id(tensor) for tensor in ours} < {id(tensor) for tensor in found}
    assert {11, 13} < {tensor.numel() for tensor in found}


def chosen(state: dict[str, Any], steady: list[torch.Tensor]) -> list[str]:
    flat = flatten(state)
    rows = rows_of(torch.empty(size_of(flat.skeleton), dtype=torch.uint8), flat)
    return [row.name for row in choose(rows, steady, {flat.tensors[number][0] for number in flat.tied})]


def test_memory_that_others_may_change_does_not_wait() -> None:
    parameter, momentum, whole = torch.zeros(4), torch.zeros(4), torch.zeros(8)
    with torch.inference_mode():
        uncounted = torch.zeros(4)
    state = {
        "momentum": momentum,
        "the parameter itself": parameter.detach(),
        "parameter": parameter,
        "a part": whole[:4],
        "another part": whole[4:],
        "uncounted": uncounted,
        "with gaps": torch.zeros(8)[::2],
        "small": torch.zeros(3),
        "none": torch.zeros(0),
    }
    steady = [
        tensor for name, tensor in state.items() if name not in ("parameter", "another part")
    ]  # as an optimizer may hold them
    assert chosen(state, steady) == ["momentum"]
    assert chosen(state, [whole]) == []
    assert chosen({"a part": whole[:4], "another": whole[4:]}, []) == []
    parts = {"a part": whole[:4], "another": whole[4:]}
    assert chosen(parts, list(parts.values())) == ["a part", "another"]


def test_what_stands_in_two_places_does_not_wait() -> None:
    """Whichever comes first: of two that are the same memory a snapshot knows only one."""
    parameter = torch.zeros(4)
    same = parameter.data
    assert chosen({"optimizer": same, "model": parameter}, [same]) == []
    assert chosen({"model": parameter, "optimizer": same}, [same]) == []


# Copying.


class Late:
    """A few tensors on their way into a block that is all ones."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        flat = flatten(list(tensors))
        self._block = torch.full((size_of(flat.skeleton),), 255, dtype=torch.uint8)
        self.copies = views_of(self._block, flat.skeleton)
        self.rows = rows_of(self._block, flat)
        self.copy = LateCopy(self.rows)
        self.expected = digest(x=tensors)

    @property
    def untouched(self) -> bool:
        return bool((self._block == 255).all())

    @property
    def exact(self) -> bool:
        self.copy.require_exact()
        return digest(x=self.copies) == self.expected


def tensors() -> list[torch.Tensor]:
    return [
        torch.arange(3000.0),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        torch.view_as_complex(torch.arange(600.0).view(300, 2)).conj(),
        torch.tensor(7.0),
    ]


@pytest.fixture(autouse=True, scope="module")
def small_is_large() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flatcopy, "_SLICE_BYTES", 1000)
        patch.setattr(flatcopy, "_BATCH_BYTES", 1000)
        patch.setattr(latecopy, "_LARGE", 16)
        yield


def test_nothing_is_copied_at_the_boundary() -> None:
    late = Late(tensors())
    assert late.untouched
    late.copy.complete()
    assert late.exact
    assert late.copy.waited == 0


def test_an_update_does_not_wait_for_a_thread_that_has_not_begun() -> None:
    late = Late(tensors())
    late.copy.settle()
    for tensor in late.tensors:
        tensor.zero_()
    late.copy.complete()
    assert late.exact
    assert late.copy.waited > 0


def test_an_update_waits_for_what_the_thread_is_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late([torch.arange(3000.0)])
    taken, go, settled = threading.Event(), threading.Event(), threading.Event()
    others: list[RowSlice] = []
    copy = RowSlice.copy

    def held(piece: RowSlice) -> None:
        if threading.current_thread().name == THREAD:
            taken.set()
            assert go.wait(WAIT)
        else:
            others.append(piece)
        copy(piece)
        if len(others) == 11:
            assert not settled.is_set()
            go.set()  # all other pieces are copied

    monkeypatch.setattr(RowSlice, "copy", held)
    thread = threading.Thread(target=late.copy.complete, name=THREAD)
    thread.start()
    assert taken.wait(WAIT)
    late.copy.settle()
    settled.set()
    late.tensors[0].zero_()
    thread.join()
    assert late.exact
    assert len(others) == 11


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5000), max_size=6),
    copiers=st.integers(1, 4),
    settles=st.booleans(),
)
def test_any_number_of_threads_may_copy(sizes: list[int], copiers: int, settles: bool) -> None:
    late = Late([torch.arange(size, dtype=torch.uint8) for size in sizes])
    threads = [threading.Thread(target=late.copy.complete) for _ in range(copiers)]
    for thread in threads:
        thread.start()
    if settles:
        late.copy.settle()
        for tensor in late.tensors:
            tensor.fill_(7)
    for thread in threads:
        thread.join()
    assert late.exact


# Changed meanwhile.


def change_in_place(tensor: torch.Tensor) -> None:
    tensor.zero_()


def change_an_element(tensor: torch.Tensor) -> None:
    tensor[-1] = 3


def change_a_view(tensor: torch.Tensor) -> None:
    tensor.detach().view(-1)[:2].add_(1)


def change_with_others(tensor: torch.Tensor) -> None:
    torch._foreach_mul_([tensor], 2.0)


def change_past_torch(tensor: torch.Tensor) -> None:
    tensor.data.zero_()


def change_as_an_array(tensor: torch.Tensor) -> None:
    tensor.numpy()[:] += 1


CHANGES = [
    change_in_place,
    change_an_element,
    change_a_view,
    change_with_others,
    change_past_torch,
    change_as_an_array,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("copied_before", [False, True])
def test_a_change_is_noticed(change: Callable[[torch.Tensor], None], copied_before: bool) -> None:
    late = Late([torch.arange(10.0), torch.arange(1.0, 9.0)])
    if copied_before:
        late.copy.complete()  # then it does no harm, but who can tell?
    change(late.tensors[1])
    late.copy.settle()
    with pytest.raises(CopyInvalidated) as invalidated:
        late.copy.require_exact()
    assert invalidated.value.tensor == late.rows[1].name


def test_a_change_is_noticed_where_no_update_comes() -> None:
    late = Late([torch.arange(10.0)])
    late.tensors[0].add_(1)
    late.copy.complete()
    with pytest.raises(CopyInvalidated):
        late.copy.require_exact()


@pytest.mark.parametrize("tensor", tensors(), ids=lambda tensor: str(tuple(tensor.shape)))
def test_samples_are_of_all_of_a_tensor(tensor: torch.Tensor) -> None:
    late = Late([tensor.clone()])
    last = (
        late.tensors[0].data.view(-1)
        if tensor.is_contiguous()
        else late.tensors[0].data.permute(0, 2, 3, 1).view(-1)
    )
    last[len(last) // 2 :] += 1
    late.copy.settle()
    with pytest.raises(CopyInvalidated):
        late.copy.require_exact()


def test_another_memory_is_no_change() -> None:
    late = Late([torch.arange(1000.0)])
    late.tensors[0].data = torch.zeros(5)
    late.tensors.clear()
    late.copy.settle()
    assert late.exact


def test_an_error_of_copying_is_raised_in_the_thread_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(piece: RowSlice) -> None:
        raise MemoryError("no room")

    late = Late([torch.arange(10.0)])
    monkeypatch.setattr(RowSlice, "copy", fail)
    late.copy.settle()
    with pytest.raises(MemoryError, match="no room"):
        late.copy.require_exact()


# The writer.


class HeldThread:
    """The writer's thread copies nothing until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        complete = LateCopy.complete

        def held(late: LateCopy) -> None:
            if threading.current_thread().name == THREAD:
                assert self.go.wait(WAIT)
            complete(late)

        monkeypatch.setattr(LateCopy, "complete", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldThread]:
    thread = HeldThread(monkeypatch)
    yield thread
    thread.go.set()


class Training:
    """A parameter and its momentum."""

    def __init__(self, directory: Path, store: CheckpointStore | None = None) -> None:
        self.parameter, self.momentum = torch.arange(5.0), torch.arange(2000.0)
        self.done, self.invalidated = threading.Event(), threading.Event()
        store = store or CheckpointStore(directory)
        self.writer = Writer(store, done=self.done.set, invalidated=self.invalidated.set)

    def take(self, step: int) -> str:
        """Begin a checkpoint; the digest that it should have."""
        shared = {"parameter": self.parameter, "momentum": self.momentum}
        snapshot = JobSnapshot(
            job={}, fingerprint={}, progress=Progress(step=step), shared=shared, contexts=[{}]
        )
        self.writer.begin(snapshot, since=0.0, steady=[self.momentum])
        return digest(**shared)

    def update(self) -> None:
        self.writer.settle()
        self.momentum.mul_(0.5)
        self.parameter.sub_(1)


def test_training_goes_on_while_one_is_written(tmp_path: Path, held: HeldThread) -> None:
    training = Training(tmp_path)
    for step in (1, 2, 3):
        held.go.clear()
        expected = training.take(step)
        training.parameter.zero_()  # has been copied
        training.update()
        held.go.set()
        training.update()
        written = training.writer.collect()
        assert isinstance(written, Written)
        assert digest(**load(written.path).shared) == expected
    assert not training.invalidated.is_set()


def test_an_invalidated_checkpoint_is_not_put_in_place(tmp_path: Path, held: HeldThread) -> None:
    training = Training(tmp_path)
    training.take(1)
    training.momentum.zero_()
    held.go.set()
    training.update()
    assert training.writer.collect() == Discarded(step=1, changed="momentum")
    assert training.invalidated.is_set()
    assert training.done.is_set()
    assert list(tmp_path.iterdir()) == []


def test_after_that_everything_is_copied_at_once(tmp_path: Path, held: HeldThread) -> None:
    training = Training(tmp_path)
    for step in (1, 2):
        held.go.clear()
        expected = training.take(step)
        training.momentum.zero_()
        held.go.set()
        outcome = training.writer.collect()
        training.momentum.add_(step)
    assert isinstance(outcome, Written)
    assert digest(**load(outcome.path).shared) == expected


def test_what_an_update_waits_is_counted(
    tmp_path: Path, held: HeldThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settle(late: LateCopy) -> None:
        late.waited += 1e9
        held.go.set()

    monkeypatch.setattr(LateCopy, "settle", settle)
    training = Training(tmp_path)
    training.take(1)
    written = training.writer.collect()
    assert isinstance(written, Written)
    assert written.blocked >= 1e9


def test_collecting_does_not_wait_for_an_update(tmp_path: Path) -> None:
    training = Training(tmp_path)
    expected = training.take(1)
    written = training.writer.collect()
    assert isinstance(written, Written)
    assert digest(**load(written.path).shared) == expected
    training.update()


def test_a_full_disk_raises_as_without_a_late_copy(tmp_path: Path, held: HeldThread) -> None:
    training = Training(tmp_path, CheckpointStore(tmp_path, disk=FaultyDisk(full_at=3)))
    training.take(1)
    training.update()
    held.go.set()
    with pytest.raises(CheckpointError, match="No space left"):
        training.writer.collect()
    assert list(tmp_path.iterdir()) == []


def test_rows_know_their_names() -> None:
    flat = flatten({"a": torch.ones(3), "b": [torch.ones(0), torch.ones(2)]})
    rows = rows_of(torch.zeros(size_of(flat.skeleton), dtype=torch.uint8), flat)
    assert [(row.name, row.room.numel()) for row in rows] == [("a", 12), ("b.1", 8)]
    assert isinstance(rows[0], FlatRow)


def test_memory_can_be_made_ready_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path)
    prepared: list[torch.Tensor] = []
    prepare = HostCopy.prepare

    def noting(copy: HostCopy, size: int) -> None:
        prepare(copy, size)
        prepared.append(copy._shared)

    monkeypatch.setattr(HostCopy, "prepare", noting)
    training.writer.prepare({"parameter": training.parameter, "momentum": training.momentum})
    expected = training.take(1)
    written = training.writer.collect()
    assert isinstance(written, Written)
    assert digest(**load(written.path).shared) == expected
    (block,) = prepared
    assert torch.equal(block[:20].view(torch.float32), training.parameter)  # it was copied there
