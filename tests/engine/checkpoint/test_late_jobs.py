"""Real jobs whose checkpoints are copied late: each is the exact state of its boundary, whatever the script does meanwhile."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gyrostat.core.job import CheckpointPolicy, RecoveryMode
from gyrostat.engine.checkpoint import load
from gyrostat.engine.state.digest import digest
from gyrostat.job.control.observer import NullObserver
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.processes.output import OutputStream
from tests.conftest import Launch

# The writer's thread copies nothing before the next update, or the end, lets it: all that late copying can do wrong it does
# wrong then. `digests.json` holds what the script saw at every boundary.
SCRIPT = """
import copy, json, os, signal, sys, threading
import torch, gyrostat
from torch.utils.data import TensorDataset
from gyrostat.engine.checkpoint import latecopy
from gyrostat.engine.checkpoint.hostcopy import HostCopy
from gyrostat.engine.checkpoint.latecopy import LateCopy
from gyrostat.engine.checkpoint.writer import THREAD
from gyrostat.engine.state.digest import digest
from gyrostat.engine.state.flatcopy import RowSlice

def given(name, default=""):
    return next((arg.partition("=")[2] for arg in sys.argv[1:] if arg.startswith(name + "=")), default)

def steps(name):
    return [int(step) for step in given(name).split(",") if step]

latecopy._LARGE = 1
go = threading.Event()
settling, late = False, 0
complete, settle, copy_piece = LateCopy.complete, LateCopy.settle, RowSlice.copy

def held_complete(self):
    if threading.current_thread().name == THREAD:
        assert go.wait(60)
    complete(self)

def settle_and_let_go(self):
    global settling
    settling = True
    settle(self)
    settling = False
    go.set()

def counted_copy(self):
    global late
    late += settling
    copy_piece(self)

LateCopy.complete, LateCopy.settle, RowSlice.copy = held_complete, settle_and_let_go, counted_copy

prepare = HostCopy.prepare

def printing_prepare(self, size):
    prepare(self, size)
    print("memory for", size)

HostCopy.prepare = printing_prepare

def wait_for_writer():
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join()

torch.manual_seed(5)
job = gyrostat.init(seed=3)
kind = given("optimizer", "adamw")
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
other = None
if kind == "sgd":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
elif kind == "several":
    optimizer = torch.optim.AdamW(model[0].parameters())
    other = torch.optim.SGD(model[2].parameters(), lr=0.01, momentum=0.9)
else:
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=kind == "amsgrad")
tracked = {"model": model, "optimizer": optimizer} | ({} if other is None else {"other": other})
job.track(**tracked)
weight = model[0].weight
digests = {}
loader = job.dataloader(TensorDataset(torch.arange(96.0).view(24, 4) / 96), batch_size=2, shuffle=True)

def note():
    digests[job.step + 1] = digest(**tracked)
    if job.is_main:
        with open("digests.json", "w") as file:
            json.dump(digests, file)

def meddle(how):
    if how == "zero":
        optimizer.state[weight]["exp_avg"].zero_()
    elif how == "load":
        changed = copy.deepcopy(optimizer.state_dict())
        changed["state"][0]["exp_avg"] += 1
        optimizer.load_state_dict(changed)
    elif how == "clear":
        optimizer.state.clear()
    elif how == "swap":
        optimizer.state[weight]["exp_avg"].data = torch.ones_like(weight)

accumulate = int(given("accumulate", "1"))
for epoch in job.epochs(3):
    for step in job.steps(loader, accumulate=accumulate):
        now = job.step
        if now in steps("meddle"):
            meddle(given("how"))
        if now in steps("exit"):
            sys.exit(0)
        if now in steps("raise"):
            go.set()
            raise RuntimeError("on purpose")
        for (x,) in step:
            step.backward(model(x).square().mean())
        if now in steps("kill") and job.is_main:
            assert any(thread.name == THREAD for thread in threading.enumerate())
            os.kill(os.getpid(), signal.SIGKILL)
        if now not in steps("no-update"):
            (other if other is not None and now % 2 else optimizer).step()
        model.zero_grad()
        if go.is_set():
            wait_for_writer()
            go.clear()
        note()
        if now in steps("save"):
            job.save()
print("copied before updates:", late)
"""
# `job.save()` in the body of step s asks for the boundary s + 1. With three virtual workers there are 12 steps.


class OutputRecorder(NullObserver):
    """What workers print."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def printed(self, worker: int, stream: OutputStream, line: str) -> None:
        self.lines.append(line)

    def about(self, what: str) -> list[str]:
        return [line for line in self.lines if what in line]


@pytest.fixture
def policy(tmp_path: Path) -> CheckpointPolicy:
    return CheckpointPolicy(directory=str(tmp_path / "checkpoints"), keep=99)


def written(outcome: Outcome) -> list[int]:
    return [record.step for record in outcome.checkpoints]


def found(policy: CheckpointPolicy) -> dict[int, str]:
    """The digests of what was tracked, by step."""
    return {
        int(path.name[5:]): digest(**load(path).shared["tracked"])
        for path in Path(policy.directory).glob("step-*")
    }


def expected(directory: Path, steps: list[int]) -> dict[int, str]:
    recorded = json.loads((directory / "digests.json").read_text())
    return {step: recorded[str(step)] for step in steps}


# The end of a write is announced with the next pass: with one due at every boundary, every other is taken.
ODD = [*range(1, 13, 2), 12]


@pytest.mark.parametrize(
    ("args", "placement", "steps"),
    [
        (["optimizer=sgd"], [3], ODD),
        (["optimizer=adamw"], [2, 1], ODD),
        (["optimizer=amsgrad"], [3], ODD),
        (["optimizer=several"], [3], ODD),
        (["accumulate=2"], [1, 2], [1, 3, 5, 6]),
        (["no-update=3,6,7"], [2, 1], [1, 3, 6, 10, 12]),
    ],
    ids=["sgd", "adamw", "amsgrad", "several optimizers", "accumulate", "no update in a step"],
)
def test_every_checkpoint_is_that_of_its_boundary(
    launch: Launch, policy: CheckpointPolicy, args: list[str], placement: list[int], steps: list[int]
) -> None:
    every = CheckpointPolicy(directory=policy.directory, every=1, keep=99)
    output = OutputRecorder()
    outcome = launch(SCRIPT, placement=placement, args=args, checkpoint=every, observer=output)
    assert written(outcome) == steps
    assert found(policy) == expected(launch.directory, steps)
    assert max(int(line.split(": ")[1]) for line in output.about("copied before updates")) > 0
    assert output.about("discarded") == []


@pytest.mark.parametrize(("every", "times"), [(0, 0), (1, 0), (5, 1)])
def test_memory_is_made_ready_where_it_will_be_needed(
    launch: Launch, policy: CheckpointPolicy, every: int, times: int
) -> None:
    turns = CheckpointPolicy(directory=policy.directory, every=every, keep=99)
    output = OutputRecorder()
    launch(SCRIPT, placement=[2, 1], checkpoint=turns, observer=output)
    assert len(output.about("memory for")) == times
    steps = sorted(found(policy))
    assert steps == {0: [12], 1: ODD, 5: [5, 10, 12]}[every]
    assert found(policy) == expected(launch.directory, steps)


@pytest.mark.parametrize("how", ["load", "clear", "swap"])
def test_a_script_may_replace_what_is_still_to_be_copied(
    launch: Launch, policy: CheckpointPolicy, how: str
) -> None:
    output = OutputRecorder()
    args = ["save=2", "meddle=3", f"how={how}"]
    outcome = launch(SCRIPT, placement=[2, 1], args=args, checkpoint=policy, observer=output)
    assert written(outcome) == [3, 12]
    assert found(policy) == expected(launch.directory, [3, 12])
    assert output.about("discarded") == []


@pytest.mark.parametrize("placement", [[3], [2, 1]])
def test_an_invalidated_checkpoint_is_taken_again(
    launch: Launch, policy: CheckpointPolicy, placement: list[int]
) -> None:
    """Discarded in step 3, announced with the pass of step 4; that of step 8 is copied at once."""
    output = OutputRecorder()
    args = ["save=2,7", "meddle=3,8", "how=zero"]
    outcome = launch(SCRIPT, placement=placement, args=args, checkpoint=policy, observer=output)
    assert written(outcome) == [5, 8, 12]
    assert found(policy) == expected(launch.directory, [5, 8, 12])
    (line,) = output.about("discarded")
    assert line.startswith(
        "gyrostat: the checkpoint of step 3 is discarded: 'tracked.optimizer.state.0.exp_avg' was changed before the next "
        "optimizer.step(), while it was being copied."
    )
    for step in (8, 5):
        for path in Path(policy.directory).glob("step-*"):
            if int(path.name[5:]) > step:
                shutil.rmtree(path)
        args = ["meddle=3,8", "how=zero"]
        assert launch(SCRIPT, placement=[1, 2], args=args, checkpoint=policy).digest == outcome.digest


def test_an_invalidated_checkpoint_at_the_end(launch: Launch, policy: CheckpointPolicy) -> None:
    """The last one is written directly, and needs no other."""
    output = OutputRecorder()
    args = ["save=10", "meddle=11", "how=zero", "no-update=11"]
    outcome = launch(SCRIPT, placement=[2, 1], args=args, checkpoint=policy, observer=output)
    assert written(outcome) == [12]
    assert found(policy) == expected(launch.directory, [12])
    assert len(output.about("discarded")) == 1


def test_a_script_that_exits_after_invalidating_a_checkpoint(
    launch: Launch, policy: CheckpointPolicy
) -> None:
    output = OutputRecorder()
    args = ["save=1,4", "meddle=5", "how=zero", "exit=5"]
    outcome = launch(SCRIPT, placement=[2, 1], args=args, checkpoint=policy, observer=output)
    assert written(outcome) == [2]
    assert found(policy) == expected(launch.directory, [2])
    assert len(output.about("a resumed run goes on from the newest checkpoint.")) == 1


def test_a_script_that_raises_before_the_update(launch: Launch, policy: CheckpointPolicy) -> None:
    """What the thread had not copied yet it copies while the process ends."""
    args = ["save=1,4", "raise=5"]
    outcome = launch(SCRIPT, placement=[3], args=args, checkpoint=policy, check=False)
    assert outcome.failure is not None
    assert "on purpose" in outcome.failure.summary
    assert found(policy) == expected(launch.directory, [2, 5])


def test_killed_before_it_is_copied(launch: Launch, policy: CheckpointPolicy) -> None:
    args = ["save=1,4", "kill=5"]
    outcome = launch(
        SCRIPT,
        placement=[2, 1],
        args=args,
        checkpoint=policy,
        recovery=RecoveryMode.CHECKPOINT,
        check=False,
    )
    assert outcome.failure is not None
    assert outcome.failure.worker == 0
    assert found(policy) == expected(launch.directory, [2])
    resumed = launch(SCRIPT, placement=[3], checkpoint=policy)
    assert resumed.first_step == 2
    assert resumed.digest == launch(SCRIPT, placement=[3]).digest


def test_the_writer_is_lost_and_another_takes_over(launch: Launch, policy: CheckpointPolicy) -> None:
    """The others recover; the worker that leads them copies late as well."""
    args = ["save=1,4,8", "kill=5"]
    outcome = launch(SCRIPT, placement=[1, 2], args=args, checkpoint=policy)
    assert sorted(found(policy)) == [2, 9, 12]
    assert found(policy) == expected(launch.directory, [2, 9, 12])
    assert outcome.digest == launch(SCRIPT, placement=[3]).digest


LEAVING = """
import json, os, signal, threading
import torch, gyrostat
from torch.utils.data import TensorDataset
from gyrostat.engine.checkpoint import latecopy
from gyrostat.engine.checkpoint.disk import Disk
from gyrostat.engine.checkpoint.writer import THREAD
from gyrostat.engine.state.digest import digest
from gyrostat.engine.checkpoint.manager import CheckpointManager

latecopy._LARGE = 1
leaving = threading.Event()
sync, leave = Disk.sync, CheckpointManager.leave

def held_sync(disk, descriptor):
    if threading.current_thread().name == THREAD:
        assert leaving.wait(60)
    sync(disk, descriptor)

def leave_and_let_go(manager, *args):
    leaving.set()
    leave(manager, *args)

Disk.sync, CheckpointManager.leave = held_sync, leave_and_let_go

job = gyrostat.init(seed=4)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
job.track(model=model, optimizer=optimizer)
loader = job.dataloader(TensorDataset(torch.arange(96.0).view(24, 4) / 96), batch_size=2, shuffle=True)
wrote, digests = job.is_main, {}

def train():
    for epoch in job.epochs(100_000):
        for step in job.steps(loader):
            if job.step == 3:
                optimizer.state[model.weight]["exp_avg"].zero_()
                if wrote:
                    os.kill(os.getpid(), signal.SIGTERM)
            for (x,) in step:
                step.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            digests[job.step + 1] = digest(model=model, optimizer=optimizer)
            if job.step == 2:
                job.save()
            if job.is_main and not wrote:
                return

train()
with open("digests.json", "w") as file:
    json.dump(digests, file)
"""


def test_a_worker_that_leaves_takes_it_again_before(launch: Launch, policy: CheckpointPolicy) -> None:
    """It cannot ask the others any more: the one that was invalidated is still being written when it goes."""
    output = OutputRecorder()
    outcome = launch(LEAVING, placement=[1, 1], checkpoint=policy, observer=output)
    again, last = sorted(found(policy))
    assert 3 < again < last == outcome.steps
    assert found(policy) == expected(launch.directory, [again, last])
    assert len(output.about("the checkpoint of step 3 is discarded")) == 1
