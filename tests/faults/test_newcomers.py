"""A newcomer that is killed before the fence holds changes nothing; later it is a worker like any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.core.events import EventKind
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
