"""Data workers that are killed, raise, hang or lose their worker."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest

from gyrostat.core.job import CheckpointPolicy
from tests.conftest import Launch

# Whoever comes first at sample 13 with a file left to delete dies there, in mid-batch, after it has drawn.
SCRIPT = """
import os, random, signal, sys, time
from pathlib import Path
import numpy as np, torch, gyrostat
from torch.utils.data import Dataset, get_worker_info

class Dangerous(Dataset):
    count = 0
    def __len__(self):
        return 26
    def __getitem__(self, index):
        self.count += 1
        x = torch.randn(4) + np.random.normal() + random.gauss(0, 1) + 0.1 * self.count
        if index == 13:
            for doom in sorted(Path(sys.argv[1]).iterdir()):
                doom.unlink()
                meet(doom.name)
        return x

def meet(doom):
    if doom.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if doom.startswith("raise"):
        raise KeyError("sample 13 is spoilt")
    if doom.startswith("exit"):
        os._exit(7)
    if doom.startswith("hang"):
        while True:
            signal.pause()
    if doom.startswith("lose"):
        worker = os.environ["WORKER"]
        Path("children").write_text(Path(f"/proc/{worker}/task/{worker}/children").read_text())
        os.kill(int(worker), signal.SIGKILL)
        signal.pause()

job = gyrostat.init(seed=5)
os.environ["WORKER"] = str(os.getpid())
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
job.track(model=model, optimizer=optimizer)
loader = job.dataloader(Dangerous(), batch_size=2, shuffle=True, num_workers=2, timeout=float(sys.argv[2]))
for epoch in job.epochs(2):
    for step in job.steps(loader):
        for x in step:
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def dooms(tmp_path: Path) -> Path:
    directory = tmp_path / "dooms"
    directory.mkdir()
    return directory


def test_killed_in_mid_batch_and_replaced(launch: Launch, dooms: Path) -> None:
    quiet = launch(SCRIPT, placement=[3], args=[str(dooms), "0"])
    for count, placement in ((1, [3]), (2, [1, 2])):
        for number in range(count):
            (dooms / f"kill{number}").touch()
        killed = launch(SCRIPT, placement=placement, args=[str(dooms), "0"])
        assert not list(dooms.iterdir())
        assert killed.losses == quiet.losses
        assert killed.digest == quiet.digest


def test_killed_and_then_resumed(launch: Launch, dooms: Path, tmp_path: Path) -> None:
    """What was redone counts once, also in a checkpoint."""
    quiet = launch(SCRIPT, placement=[3], args=[str(dooms), "0"])
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"))
    (dooms / "kill").touch()
    launch(SCRIPT, placement=[3], args=[str(dooms), "0"], checkpoint=policy, stop_after=quiet.steps // 2 + 1)
    last = launch(SCRIPT, placement=[1, 1, 1], args=[str(dooms), "0"], checkpoint=policy)
    assert last.digest == quiet.digest


def test_three_deaths_at_one_batch_are_reported(launch: Launch, dooms: Path) -> None:
    for number in range(6):  # a death may also cost the answer before it: three at one batch are at most five
        (dooms / f"exit{number}").touch()
    outcome = launch(SCRIPT, placement=[2], args=[str(dooms), "0"], check=False)
    assert outcome.failure is not None
    assert "exited unexpectedly with code 7; so did 2 others before it" in str(outcome.failure.traceback)
    assert len(list(dooms.iterdir())) <= 3


def test_what_a_data_worker_raises_reaches_the_user(launch: Launch, dooms: Path) -> None:
    (dooms / "raise").touch()
    outcome = launch(SCRIPT, placement=[2], args=[str(dooms), "0"], check=False)
    assert outcome.failure is not None
    traceback = str(outcome.failure.traceback)
    assert "Caught KeyError in DataLoader worker process" in traceback
    assert 'raise KeyError("sample 13 is spoilt")' in traceback
    assert "in __getitem__" in traceback


def test_timeout(launch: Launch, dooms: Path) -> None:
    (dooms / "hang").touch()
    outcome = launch(SCRIPT, placement=[2], args=[str(dooms), "0.5"], check=False)
    assert outcome.failure is not None
    assert "DataLoader timed out after 0.5 seconds" in str(outcome.failure.traceback)


def test_data_workers_do_not_outlive_their_worker(launch: Launch, dooms: Path) -> None:
    """A worker is killed while its data workers are busy."""
    (dooms / "lose").touch()
    outcome = launch(SCRIPT, placement=[2], args=[str(dooms), "0"], check=False)
    assert outcome.exit_codes == (-signal.SIGKILL,)
    children = [int(pid) for pid in (launch.directory / "children").read_text().split()]
    assert len(children) == 2
    assert all(_ends(pid) for pid in children)


def _ends(pid: int) -> bool:
    """By itself, not by us."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(process, select.POLLIN)
    try:
        return bool(poll.poll(120_000))
    finally:
        os.close(process)
