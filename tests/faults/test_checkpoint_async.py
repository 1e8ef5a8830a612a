"""Checkpoints written behind the training: asked for twice, training on meanwhile, killed while writing, disk full."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from gyrostat.core.errors import CheckpointError
from gyrostat.core.events import EventKind
from gyrostat.core.job import CheckpointPolicy, RecoveryMode
from gyrostat.core.progress import Progress
from gyrostat.engine.checkpoint import (
    CheckpointSchedule,
    CheckpointStore,
    Disk,
    JobSnapshot,
    Writer,
    Written,
    load,
)
from gyrostat.engine.checkpoint.faultydisk import FaultyDisk, PowerCut
from gyrostat.engine.state.digest import digest
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.processes.start import WorkerForkServer
from tests.conftest import Launch

SnapshotAt = Callable[[int], JobSnapshot]

# Whose turn it is.


def taken(
    every: int, *, asked: Iterable[int] = (), written: Iterable[int] = (), steps: int = 12
) -> list[int]:
    """The boundaries at which checkpoints are taken."""
    schedule = CheckpointSchedule(every=every)
    asked, written = set(asked), set(written)
    return [
        step
        for step in range(1, steps + 1)
        if schedule.boundary(step, asked=step in asked, written=step in written)
    ]


def test_a_free_writer_takes_all() -> None:
    assert taken(0, asked=[3, 4, 5], written=range(13)) == [3, 4, 5]
    assert taken(4, asked=[5], written=range(13)) == [4, 5, 8, 12]


def test_what_is_asked_for_while_one_is_written_becomes_one() -> None:
    assert taken(0, asked=[2, 3, 5, 6], written=[8]) == [2, 8]
    assert taken(0, asked=[2, 3], written=[4, 6]) == [2, 4]
    assert taken(0, asked=[2, 3], written=[]) == [2]


def test_turns_that_come_while_one_is_written_become_one() -> None:
    assert taken(1, written=[6]) == [1, 6]
    assert taken(4, written=[9]) == [4, 9]  # that of step 8, late
    assert taken(4, written=[5, 10, 11]) == [4, 8, 12]


def test_the_same_boundary_is_not_taken_twice() -> None:
    schedule = CheckpointSchedule(every=5, last_step=10)  # resumed there
    assert not schedule.boundary(10, asked=True, written=False)
    assert not schedule.boundary(11, asked=False, written=False)
    assert schedule.boundary(15, asked=False, written=False)


# The writer.


class HeldDisk(Disk):
    """Syncs nothing until it is let go."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def sync(self, descriptor: int) -> None:
        self.reached.set()
        assert self.go.wait(60)
        super().sync(descriptor)


def bits(snapshot: JobSnapshot) -> str:
    return digest(shared=snapshot.shared, contexts=list(snapshot.contexts))


def test_what_is_written_is_a_copy(tmp_path: Path) -> None:
    strided = torch.arange(24.0).view(2, 3, 4).permute(0, 2, 1)
    complex_ = torch.view_as_complex(torch.arange(8.0).view(4, 2))
    shared: dict[str, Any] = {
        "weight": torch.arange(6.0).view(2, 3),
        "tied": [strided, strided],
        "conjugate": complex_.conj(),
        "half": torch.arange(5, dtype=torch.bfloat16),
        "none": torch.empty(0, 3, dtype=torch.int64),
        "history": [1, 2, 3],
        "long": list(range(1000)),
    }
    contexts = [{"local": torch.full((3,), rank)} for rank in range(2)]
    disk, done = HeldDisk(), threading.Event()
    writer = Writer(CheckpointStore(tmp_path, disk=disk), done=done.set)
    expected = bits(load(CheckpointStore(tmp_path / "at once").save(_snapshot(shared, contexts))))
    writer.begin(_snapshot(shared, contexts), since=0.0)
    assert disk.reached.wait(60)
    for tensor in (shared["weight"], strided, complex_, shared["half"], contexts[0]["local"]):
        tensor.zero_()
    shared["history"].append(4)
    shared["long"].clear()
    assert not done.is_set()
    disk.go.set()
    written = writer.collect()
    assert isinstance(written, Written)
    assert done.is_set()
    assert 0 < written.blocked <= written.seconds
    assert bits(load(written.path)) == expected
    assert writer.collect() is None


def _snapshot(shared: object, contexts: list[dict[str, torch.Tensor]], step: int = 1) -> JobSnapshot:
    return JobSnapshot(job={}, fingerprint={}, progress=Progress(step=step), shared=shared, contexts=contexts)


def test_memory_is_used_again_and_grows(tmp_path: Path) -> None:
    writer = Writer(CheckpointStore(tmp_path))
    for step, size in ((1, 1000), (2, 10), (3, 2000)):
        tensor = torch.full((size,), float(step))
        writer.begin(_snapshot({"x": tensor}, [{}], step), since=0.0)
        written = writer.collect()
        assert isinstance(written, Written)
        assert torch.equal(load(written.path).shared["x"], tensor)


@pytest.mark.parametrize("full_at", [1, 3, 5, 9])
def test_a_full_disk_is_reported_when_collected(
    tmp_path: Path, snapshot_at: SnapshotAt, full_at: int
) -> None:
    CheckpointStore(tmp_path).save(snapshot_at(10))
    writer = Writer(CheckpointStore(tmp_path, disk=FaultyDisk(full_at=full_at, torn=True)))
    writer.begin(snapshot_at(20), since=0.0)
    with pytest.raises(
        CheckpointError, match=r"step-00000020 could not be written: No space left.*free some"
    ):
        writer.collect()
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000010"]
    assert writer.collect() is None


def test_nothing_that_ends_the_thread_is_lost(tmp_path: Path, snapshot_at: SnapshotAt) -> None:
    done = threading.Event()
    writer = Writer(CheckpointStore(tmp_path, disk=FaultyDisk(cut_at=4)), done=done.set)
    writer.begin(snapshot_at(10), since=0.0)
    with pytest.raises(PowerCut):
        writer.collect()
    assert done.is_set()


# Real jobs. Worker 0's disk can be held, or be full, from one step to another.

SCRIPT = """
import errno, os, signal, sys, threading
import numpy as np, torch, gyrostat
from torch.utils.data import TensorDataset
from gyrostat.engine.checkpoint.disk import Disk
from gyrostat.engine.checkpoint.writer import THREAD

def steps(name):
    given = [arg.partition("=")[2] for arg in sys.argv[1:] if arg.startswith(name + "=")]
    return [int(step) for step in given[0].split(",")] if given else []

reached, go = threading.Event(), threading.Event()
go.set()
full = False
sync, write = Disk.sync, Disk.write

def held_sync(disk, descriptor):
    reached.set()
    assert go.wait(60)
    sync(disk, descriptor)

def full_write(disk, descriptor, data):
    if full:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(disk, descriptor, data)

Disk.sync, Disk.write = held_sync, full_write

def wait_for_writer():
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join()

job = gyrostat.init(seed=3)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters())
job.track(model=model, optimizer=optimizer)
job.state["history"] = []
job.state["array"] = np.zeros(3)
loader = job.dataloader(TensorDataset(torch.arange(96.0).view(24, 4) / 96), batch_size=2, shuffle=True)
for epoch in job.epochs(3):
    for step in job.steps(loader):
        now = job.step
        if now in steps("hold"):
            reached.clear()
            go.clear()
        if now in steps("full"):
            full = True
        if now in steps("release"):
            go.set()
        if go.is_set():
            wait_for_writer()
        for (x,) in step:
            seen = step.local.setdefault("seen", torch.zeros(()))
            seen += x.sum()
            step.backward(model(x).square().mean() * (1 + seen / 1000))
        if now in steps("release-late"):
            go.set()
        if now in steps("kill") and job.is_main:
            assert reached.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        job.state["history"].append(now)
        job.state["array"] += now
        if now in steps("save"):
            job.save()
"""
# `job.save()` in the body of step s asks for the boundary s + 1. With three virtual workers there are 12 steps.


@pytest.fixture
def policy(tmp_path: Path) -> CheckpointPolicy:
    return CheckpointPolicy(directory=str(tmp_path / "checkpoints"), keep=99)


@pytest.fixture(scope="module")
def undisturbed(fork_server: WorkerForkServer, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = Launch(fork_server, tmp_path_factory.mktemp("undisturbed"))(SCRIPT, placement=[3])
    assert outcome.steps == 12
    return outcome


def written(outcome: Outcome) -> list[int]:
    return [record.step for record in outcome.checkpoints]


def steps_there(policy: CheckpointPolicy) -> list[int]:
    return sorted(int(path.name[5:]) for path in Path(policy.directory).glob("step-*"))


def forget_after(policy: CheckpointPolicy, step: int) -> None:
    for path in Path(policy.directory).glob("step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)


@pytest.mark.parametrize("placement", [[3], [2, 1]])
def test_asked_for_again_and_again_while_one_is_written(
    launch: Launch, policy: CheckpointPolicy, undisturbed: Outcome, placement: list[int]
) -> None:
    args = ["hold=0", "save=1,3,4,5", "release=7"]
    outcome = launch(SCRIPT, placement=placement, args=args, checkpoint=policy)
    assert written(outcome) == steps_there(policy) == [2, 8, 12]
    assert outcome.digest == undisturbed.digest
    for step, other in ((8, [1, 2]), (2, [3])):  # both were written while training went on
        forget_after(policy, step)
        resumed = launch(SCRIPT, placement=other, checkpoint=policy)
        assert resumed.first_step == step
        assert resumed.digest == undisturbed.digest
        assert resumed.losses == undisturbed.losses[step:]


def test_its_turn_again_and_again_while_one_is_written(launch: Launch, policy: CheckpointPolicy) -> None:
    every = CheckpointPolicy(directory=policy.directory, every=1, keep=99)
    outcome = launch(SCRIPT, placement=[2, 1], args=["hold=0", "release=7"], checkpoint=every)
    assert written(outcome) == steps_there(policy) == [1, 8, 9, 10, 11, 12]


def test_a_job_that_stops_waits_for_what_is_being_written(
    launch: Launch, policy: CheckpointPolicy, undisturbed: Outcome
) -> None:
    args = [
        "hold=0",
        "save=1",
        "release-late=4",
    ]  # when the pass has settled, so nobody knows at the boundary
    outcome = launch(SCRIPT, placement=[1, 2], args=args, checkpoint=policy, stop_after=5)
    assert outcome.stopped
    assert written(outcome) == steps_there(policy) == [2, 5]
    resumed = launch(SCRIPT, placement=[3], checkpoint=policy)
    assert (resumed.first_step, resumed.digest) == (5, undisturbed.digest)


def test_the_end_of_a_script_waits_for_what_is_being_written(
    launch: Launch, policy: CheckpointPolicy
) -> None:
    args = ["hold=0", "save=1", "release-late=11"]
    outcome = launch(SCRIPT, placement=[1, 2], args=args, checkpoint=policy)
    assert written(outcome) == steps_there(policy) == [2, 12]
    early, last = outcome.checkpoints
    assert early.blocked < early.seconds
    assert last.blocked == last.seconds


@pytest.mark.parametrize("placement", [[3], [2, 1]])
def test_killed_while_one_is_written(
    launch: Launch, policy: CheckpointPolicy, undisturbed: Outcome, placement: list[int]
) -> None:
    args = ["save=1,4", "hold=3", "kill=7"]
    outcome = launch(
        SCRIPT,
        placement=placement,
        args=args,
        checkpoint=policy,
        recovery=RecoveryMode.CHECKPOINT,
        check=False,
    )
    assert outcome.failure is not None
    assert outcome.failure.worker == 0
    assert steps_there(policy) == [2]
    assert len(list(Path(policy.directory).glob(".writing-step-00000005-*"))) == 1
    resumed = launch(SCRIPT, placement=[1, 1, 1], checkpoint=policy)
    assert (resumed.first_step, resumed.digest) == (2, undisturbed.digest)
    assert sorted(path.name for path in Path(policy.directory).iterdir()) == [
        "step-00000002",
        "step-00000012",
    ]


@pytest.mark.parametrize(
    ("args", "reports"),
    [
        (["save=1,4", "full=5"], 1),  # at the first boundary after it happened; training goes on
        (["save=1,10", "full=11"], 1),  # … or at the end
        (["save=1", "full=11"], 0),
    ],
)
def test_a_full_disk_is_reported_and_ends_a_job_that_has_nothing_else_to_do(
    launch: Launch, policy: CheckpointPolicy, undisturbed: Outcome, args: list[str], reports: int
) -> None:
    outcome = launch(
        SCRIPT, placement=[2, 1], args=[*args, "hold=4,10", "release=5,11"], checkpoint=policy, check=False
    )
    no_room = "could not be written: No space left on device; earlier ones are as they were"
    failed = [event.reason for event in outcome.events if event.kind is EventKind.CHECKPOINT_FAILED]
    assert [no_room in reason for reason in failed] == [True] * reports
    assert outcome.failure is not None  # the last one, which nothing comes after
    assert outcome.failure.worker == 0
    assert outcome.failure.summary.startswith("raised CheckpointError: ")
    assert no_room in outcome.failure.summary
    assert outcome.steps == 12
    assert outcome.losses == undisturbed.losses
    assert written(outcome) == steps_there(policy) == [2]
    resumed = launch(SCRIPT, placement=[3], checkpoint=policy)
    assert (resumed.first_step, resumed.digest) == (2, undisturbed.digest)
