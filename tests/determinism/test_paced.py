"""A paced device waits instead of computing, and all else is real: bits do not depend on placement, time goes by its rate."""

from __future__ import annotations

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.core.job import ReductionOrder
from tests.conftest import Launch

SCRIPT = """
    import sys

    import torch

    import gyrostat

    job = gyrostat.init(seed=5)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12), torch.nn.Dropout(0.2), torch.nn.Linear(12, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(72, 6), torch.randint(3, (72,)))
    loader = job.dataloader(data, batch_size=3, shuffle=True)
    job.track(model=model, optimizer=optimizer)
    for epoch in job.epochs(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
        for step in job.steps(loader):
            for x, y in step:
                step.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    assert model[1].num_batches_tracked == 0, "a forward was computed"
"""
FAST = (100_000.0,)

GAN = """
    import torch

    import gyrostat

    job = gyrostat.init(seed=3)
    G = torch.nn.Linear(2, 4)
    D = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    of_g, of_d = torch.optim.SGD(G.parameters(), lr=0.1), torch.optim.SGD(D.parameters(), lr=0.1)
    loader = job.dataloader(torch.utils.data.TensorDataset(torch.randn(24, 4)), batch_size=2, shuffle=True)
    job.track(G=G, D=D, of_g=of_g, of_d=of_d)
    for step in job.steps(loader):
        for (x,) in step:
            fake = G(torch.randn(len(x), 2)).detach()
            step.backward(D(fake).mean() - D(x).mean())
        of_d.step()
        of_d.zero_grad()
        for (x,) in step:
            step.backward(-D(G(torch.randn(len(x), 2))).mean())
        of_g.step()
        of_g.zero_grad()
        of_d.zero_grad()
"""


@pytest.mark.parametrize("script", [SCRIPT, GAN], ids=["classifier", "GAN"])
@pytest.mark.parametrize("reduction", [ReductionOrder.DDP, ReductionOrder.TREE])
def test_bits_do_not_depend_on_placement(launch: Launch, script: str, reduction: ReductionOrder) -> None:
    alone = launch(script, virtual_workers=4, reduction=reduction, paced=FAST)
    for placement in ([2, 2], [1, 3], [1, 1, 1, 1]):
        other = launch(script, placement=placement, reduction=reduction, paced=FAST)
        assert other.digest == alone.digest
        assert (other.samples, other.losses) == (alone.samples, alone.losses)


def test_bits_do_not_depend_on_resizes_nor_on_time(launch: Launch) -> None:
    fixed = launch(SCRIPT, virtual_workers=4, workers=2, paced=FAST)
    slow = launch(SCRIPT, virtual_workers=4, workers=2, paced=(3_000.0, 2_000.0))
    elastic = launch(
        SCRIPT, virtual_workers=4, workers=1, paced=FAST, schedule=((1, 3), (2, 4), (4, 2), (5, 1))
    )
    assert fixed.digest == slow.digest == elastic.digest


def test_gradients_tell_samples_apart(launch: Launch) -> None:
    """Were some virtual worker given other samples, or samples in another order, the digest would say so."""
    one = launch(SCRIPT, virtual_workers=4, paced=FAST)
    unshuffled = SCRIPT.replace("shuffle=True", "shuffle=False")
    assert launch(unshuffled, virtual_workers=4, paced=FAST).digest != one.digest


def test_it_takes_its_time_and_no_processor(launch: Launch) -> None:
    """72 samples at 60 per second: never less than 1.2 s, and next to nothing of it on the processor."""
    script = SCRIPT + "    import time; job.log(cpu=time.process_time())\n"
    outcome = launch(script, virtual_workers=4, paced=(60.0,))
    assert outcome.samples == 72
    assert outcome.seconds >= 72 / 60.0
    assert outcome.logs[-1].metrics["cpu"] < 0.6


def test_workers_have_rates_of_their_own(launch: Launch) -> None:
    """The slow one decides: 36 of its samples at 60 per second."""
    outcome = launch(SCRIPT, virtual_workers=4, workers=2, paced=(100_000.0, 60.0))
    assert outcome.seconds >= 36 / 60.0


def test_a_forward_that_looks_at_values_is_refused(launch: Launch) -> None:
    script = SCRIPT.replace(
        "    model = torch.nn.Sequential(",
        """
    class Peeks(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum().item() > 0 else x

    model = torch.nn.Sequential(Peeks(6, 6),""",
    )
    outcome = launch(script, virtual_workers=2, paced=FAST, check=False)
    assert outcome.exit_code == 2
    assert "does not run on torch's meta device" in str(outcome.failure)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_that_cannot_be(launch: Launch, rate: float) -> None:
    with pytest.raises(UsageError, match="more than 0 samples per second"):
        launch(SCRIPT, paced=(rate,))
