"""A script may end itself anywhere by `sys.exit`: what it had not done is done by the next run, with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.core.job import CheckpointPolicy
from tests.conftest import Launch

SCRIPT = """
    import sys

    import torch

    import gyrostat

    EXIT, BREAK = int(sys.argv[1]), int(sys.argv[2])
    job = gyrostat.init(seed=3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    loader = job.dataloader(torch.utils.data.TensorDataset(torch.randn(48, 4)), batch_size=4, shuffle=True)
    job.track(model=model, optimizer=optimizer, schedule=schedule)

    def train():
        for epoch in job.epochs(3):
            for step in job.steps(loader):
                for (x,) in step:
                    step.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if job.step == EXIT:
                    sys.exit(0)
                if job.step == BREAK:
                    break
            if job.step == -EXIT:
                raise SystemExit
            schedule.step()
            if job.step == BREAK + 1:
                break

    sys.exit(train())
"""


@pytest.mark.parametrize("where", ["5", "-4"], ids=["in a step", "after an epoch"])
def test_exit_inside_the_loops_is_not_the_end(launch: Launch, tmp_path: Path, where: str) -> None:
    undisturbed = launch(SCRIPT, virtual_workers=3, args=["99", "99"])
    assert undisturbed.steps == 12
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"), every=2)
    first = launch(SCRIPT, virtual_workers=3, workers=2, args=[where, "99"], checkpoint=policy)
    assert 0 < first.steps < 12
    rest = launch(SCRIPT, virtual_workers=3, workers=3, args=["99", "99"], checkpoint=policy)
    assert 0 < rest.first_step <= first.steps
    assert rest.digest == undisturbed.digest


def test_exit_after_the_loops_is_the_end(launch: Launch, tmp_path: Path) -> None:
    """Also where they were left by `break`, and `sys.exit` only hands on what the script's function returned."""
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"))
    first = launch(SCRIPT, virtual_workers=3, workers=2, args=["99", "9"], checkpoint=policy)
    assert first.steps == 10
    again = launch(SCRIPT, virtual_workers=3, args=["99", "9"], checkpoint=policy)
    assert again.first_step == 10
    assert again.steps == 10
    assert again.digest == first.digest
