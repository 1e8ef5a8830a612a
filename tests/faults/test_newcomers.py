"""A newcomer that is killed before the fence holds changes nothing; later it is a worker like any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.core.events import EventKind
from gyrostat.core.job import CheckpointPolicy
from tests.conftest import Launch

SCRIPT = """
import os
import signal
import sys
import time
from pathlib import Path

import torch

import gyrostat
from gyrostat.engine.script import session
from gyrostat.engine.reconfigure.catch_up import StateReceiver
from gyrostat.engine.reconfigure.membership import Membership
from gyrostat.engine.reconfigure.state_wire import StateWire

place, mark = sys.argv[1], Path(sys.argv[2])
places = {
    "connecting": (StateWire, "__init__"),
    "loading": (StateReceiver, "_load"),
    "replaying": (StateReceiver, "_replay"),
    "caught up": (Membership, "caught_up"),
    "after the fence": (StateReceiver, "confirm"),
}


def doomed():
    return session._Process.assignment.joins and not mark.exists()


def die():
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)


if doomed():
    if place == "starting":
        die()
    if place in places:
        owner, name = places[place]
        original = getattr(owner, name)

        def until(*args, **options):
            if doomed():
                die()
            return original(*args, **options)

        setattr(owner, name, until)

job = gyrostat.init(seed=3)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
job.track(model=model, optimizer=optimizer)
data = job.dataloader([torch.full((4,), float(i)) for i in range(96)], batch_size=2, shuffle=True, num_workers=1)
if doomed() and place == "building":
    die()
for step in job.steps(data):
    if place == "replaying" and job.step == 4 and not mark.exists():  # newcomers get an update before the fence
        while session.membership().phase not in ("prepared", "fence set"):
            time.sleep(0.005)
    for x in step:
        step.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""

BEFORE = ("starting", "building", "connecting", "loading", "replaying", "caught up")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("newcomers") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("place", BEFORE)
def test_killed_before_the_fence(launch: Launch, script: Path, tmp_path: Path, place: str) -> None:
    """The scheduled change is tried again, with another one."""
    mark = tmp_path / "died"
    undisturbed = launch(script, virtual_workers=4, workers=2, args=["nowhere", str(mark)])
    outcome = launch(script, virtual_workers=4, workers=2, args=[place, str(mark)], schedule=((6, 4), (9, 1)))
    assert mark.exists()
    assert outcome.digest == undisturbed.digest
    assert outcome.losses == undisturbed.losses
    resizes = [event.to_workers for event in outcome.events if event.kind is EventKind.RESIZE]
    assert resizes == [4, 1]


BEFORE_THE_LOOP = """
import torch

import gyrostat

job = gyrostat.init(seed=3)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
data = job.dataloader([torch.full((4,), float(i)) for i in range(24)], batch_size=2, shuffle=True)


def score(x):
    return float(model(x).square().sum() + torch.rand(()))


job.track(model=model)
before = sum(job.evaluate(data, score))
job.track(optimizer=optimizer)
job.log(before=before)
job.save()
for call in range(3):
    for step in job.steps(data, limit=4):
        for x in step:
            step.backward(model(x).square().mean() * before)
        optimizer.step()
        optimizer.zero_grad()
        if job.step % 3 == 0:
            job.log(inside=sum(job.evaluate(data, score)))
    after = sum(job.evaluate(data, score))
    job.log(after=after)
    before += after
"""


def test_what_a_script_does_before_it_has_joined(launch: Launch, tmp_path: Path) -> None:
    """Evaluations before the first loop and between loops, `job.track` after one, `job.log` and `job.save`."""
    undisturbed, outcome = (
        launch(
            BEFORE_THE_LOOP,
            virtual_workers=2,
            checkpoint=CheckpointPolicy(directory=str(tmp_path / f"checkpoints-{len(schedule)}")),
            schedule=schedule,
        )
        for schedule in ((), ((6, 2),))
    )
    assert outcome.workers == 2
    assert (outcome.losses, outcome.logs) == (undisturbed.losses, undisturbed.logs)
    assert outcome.digest == undisturbed.digest
    steps = [[checkpoint.step for checkpoint in run.checkpoints] for run in (outcome, undisturbed)]
    assert steps[0] == steps[1]


DOES_NOT_ARRIVE = """
import signal

import torch

import gyrostat
from gyrostat.engine.reconfigure import arrival_timeout
from gyrostat.engine.script import session

arrival_timeout.ARRIVAL_TIMEOUT_S = 0.2
job = gyrostat.init(seed=3)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
job.track(model=model, optimizer=optimizer)
for call in range(2):
    for step in job.steps(job.dataloader([torch.full((4,), float(i)) for i in range(24)], batch_size=2)):
        for x in step:
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if session._Process.assignment.joins:
        signal.pause()  # between two loops
"""


def test_a_newcomer_that_does_not_arrive_is_given_up(launch: Launch, tmp_path: Path) -> None:
    """All wait for it at the fence. The message names where it is, and who waits for it."""
    undisturbed = launch(DOES_NOT_ARRIVE, virtual_workers=2)
    logs = tmp_path / "logs"
    outcome = launch(DOES_NOT_ARRIVE, virtual_workers=2, schedule=((8, 2),), log_dir=logs)
    assert (outcome.digest, outcome.workers) == (undisturbed.digest, 1)
    printed = "".join(log.read_text() for log in logs.iterdir())
    assert "this new worker did not arrive in its loop within 0.2 s: it is at " in printed
    assert (
        ".py:22, and worker 0, which sent it the job's state, waits for it at the fence of step 8" in printed
    )


EVERY_ONE = """
import os
import signal

import torch

import gyrostat

if os.environ["RANK"] != "0":  # every new worker
    os.kill(os.getpid(), signal.SIGKILL)
job = gyrostat.init(seed=3)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
job.track(model=model, optimizer=optimizer)
for step in job.steps(job.dataloader([torch.full((4,), float(i)) for i in range(24)], batch_size=2)):
    for x in step:
        step.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""


def test_if_every_newcomer_is_killed_the_change_is_given_up(launch: Launch) -> None:
    """Workers wait for it at its step; after three tries they train on, and end with the same bits."""
    undisturbed = launch(EVERY_ONE, virtual_workers=2)
    outcome = launch(EVERY_ONE, virtual_workers=2, schedule=((2, 2),))
    assert (outcome.digest, outcome.workers) == (undisturbed.digest, 1)
    given_up, *_ = [event for event in outcome.events if event.kind is EventKind.RESIZE]
    assert given_up.reason == (
        "not resized to 2 workers: the new worker 3 was killed by SIGKILL before it joined; it is tried again later, and "
        "training goes on meanwhile"
    )


def test_killed_when_the_fence_has_held(launch: Launch, script: Path, tmp_path: Path) -> None:
    mark = tmp_path / "died"
    undisturbed = launch(script, virtual_workers=4, workers=2, args=["nowhere", str(mark)])
    outcome = launch(
        script,
        virtual_workers=4,
        workers=2,
        args=["after the fence", str(mark)],
        schedule=((6, 3),),
    )
    assert mark.exists()
    assert outcome.digest == undisturbed.digest
    assert [event.recovered_from for event in outcome.events if event.kind is EventKind.FAILURE] == ["peers"]
