"""`step.survey`: values of all virtual workers before the backward of a step, exact on every placement and after a death."""

from __future__ import annotations

import pytest

from tests.conftest import Launch
from tests.faults.injector import fail_at

SCRIPT = """
    import sys

    import torch

    import gyrostat

    job = gyrostat.init(seed=4)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return torch.full((4,), float(index)) + torch.randn(4)

    loader = job.dataloader(Noisy(), batch_size=2, shuffle=True)
    job.track(model=model, optimizer=optimizer)
    for epoch in job.epochs(2):
        for step in job.steps(loader, accumulate=int(sys.argv[1])):
            for x in step.survey():
                found = model(x)  # draws, and changes batch-norm's buffers: both undone
                total, mean = job.sum((x > 20).sum()), job.mean(found.mean())
                everyone = job.gather(found.mean())
                assert not torch.is_grad_enabled()
            assert torch.is_grad_enabled()
            assert everyone.value.shape == (4, step.micro_batches)
            assert total.value.dtype == torch.int64
            for x in step:
                found = model(x)
                if step.micro_batches == 1:  # what the survey drew, the pass draws again
                    assert torch.equal(found.mean().detach(), everyone.value[step.virtual_rank, 0])
                step.backward((found - mean.value).square().sum() / (1 + total.value))
            optimizer.step()
            optimizer.zero_grad()
"""


def test_is_the_same_on_every_placement_and_as_plain_ddp(launch: Launch) -> None:
    for accumulate in "12":
        wanted = launch(SCRIPT, virtual_workers=4, workers=1, args=[accumulate])
        resized = launch(SCRIPT, virtual_workers=4, workers=2, schedule=[(2, 1), (4, 3)], args=[accumulate])
        assert resized.digest == wanted.digest
        assert launch(SCRIPT, virtual_workers=4, reference=True, args=[accumulate]).digest == wanted.digest


@pytest.mark.parametrize(("where", "worker"), [("exchange", 1), ("reduced", 0), ("backward", 1)])
def test_a_worker_dies_in_it_or_after_it(where: str, worker: int, launch: Launch) -> None:
    wanted = launch(SCRIPT, virtual_workers=4, workers=1, args=["2"])
    killed = fail_at(step=3, where=where, worker=worker).run(
        launch, SCRIPT, virtual_workers=4, workers=2, args=["2"]
    )
    assert (killed.digest, killed.losses) == (wanted.digest, wanted.losses)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("step.backward(model(x).sum())", "step.backward in a survey"),
        ("break", "was left before all virtual workers had run"),
    ],
)
def test_misuse(body: str, message: str, launch: Launch) -> None:
    script = SCRIPT.split("for x in step.survey():")[0] + f"for x in step.survey():\n                {body}\n"
    outcome = launch(script, virtual_workers=4, args=["1"], check=False)
    assert outcome.failure is not None
    assert message in str(outcome.failure)
    assert outcome.exit_code == 2
