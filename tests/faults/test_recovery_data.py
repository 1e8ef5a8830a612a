"""Where a lost virtual worker stood in its data: in the middle of a loop, at its end, and when the next one begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.core.events import EventKind
from tests.conftest import Launch

SCRIPT = """
    import os
    import pathlib
    import signal
    import sys

    import torch

    import gyrostat

    kind, when, mark = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])


    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, number):
            return number / 24 + torch.randn(4)


    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            for number in range(24):
                yield number / 24 + torch.randn(4)


    job = gyrostat.init(seed=4)
    options = {
        "data workers": lambda: dict(dataset=Noisy(), shuffle=True, num_workers=2),
        "persistent": lambda: dict(dataset=Noisy(), shuffle=True, num_workers=1, persistent_workers=True),
        "sampler": lambda: dict(
            dataset=Noisy(), sampler=lambda rank: torch.utils.data.RandomSampler(range(24), num_samples=6)
        ),
        "iterable": lambda: dict(dataset=Stream()),
    }[kind]()
    loader = job.dataloader(batch_size=2, **options)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)
    for epoch in job.epochs(2):
        for step in job.steps(loader):
            for x in step:
                if step.virtual_rank == 3 and job.step == when and not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                step.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if os.environ["RANK"] == "1" and -job.step == when and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
"""
LAST, FIRST_OF_THE_NEXT = -2, 3
"""Three steps an epoch: after the update of the last one, and in the first micro-batches of the next."""


@pytest.mark.parametrize("kind", ["data workers", "persistent", "sampler", "iterable"])
def test_killed_where_a_loop_ends(launch: Launch, tmp_path: Path, kind: str) -> None:
    mark = tmp_path / "died"
    mark.touch()
    undisturbed = launch(SCRIPT, virtual_workers=4, workers=2, args=[kind, "99", str(mark)])
    assert undisturbed.steps == 6
    for when in (LAST, FIRST_OF_THE_NEXT):
        mark.unlink()
        outcome = launch(SCRIPT, virtual_workers=4, workers=2, args=[kind, str(when), str(mark)])
        (failure,) = [event for event in outcome.events if event.kind is EventKind.FAILURE]
        assert failure.recovered_from == "peers"
        assert outcome.digest == undisturbed.digest
        assert outcome.losses == undisturbed.losses
        assert outcome.samples == undisturbed.samples
