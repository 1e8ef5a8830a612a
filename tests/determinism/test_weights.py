"""Virtual workers with batch sizes of their own: averaged by weight, every sample exactly once, the same on every placement."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gyrostat.core.errors import Misuse
from gyrostat.core.job import ReductionOrder
from gyrostat.data.order import UnevenOrder
from tests.conftest import Launch

SCRIPT = """
import json, sys, torch, gyrostat
from torch.utils.data import Dataset
SIZES, DTYPE, FILE = json.loads(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3]
class Data(Dataset):
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    def __len__(self): return 50
    def __getitem__(self, index):
        with open(FILE, "a") as seen: seen.write(f"{index}\\n")
        return self.x[index].to(DTYPE), index
job = gyrostat.init(seed=5)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to(DTYPE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.track(model=model, optimizer=optimizer)
loader = job.dataloader(Data(), batch_size=SIZES, shuffle=True)
for epoch in job.epochs(2):
    for step in job.steps(loader):
        for x, _ in step:
            loss = model(x).square().mean()
            mean = job.mean(loss)
            step.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        job.log(loss=mean.item())
if job.is_main:
    torch.save([p.detach().double() for p in model.parameters()], FILE + ".pt")
"""


def one_big_batch(sizes: list[int]) -> tuple[list[torch.Tensor], list[float]]:
    """The same training in float64, each step as one batch of all samples."""
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    # Steps of 12; the last two share 14, since 2 samples are too few for 4 virtual workers.
    cuts = (12, 24, 36, 43)
    assert sum(sizes) == 12
    for epoch in range(2):
        order = torch.randperm(50, generator=torch.Generator().manual_seed(5 + epoch))
        for batch in torch.tensor_split(order, cuts):
            loss = model(x[batch]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return [p.detach() for p in model.parameters()], losses


@pytest.mark.parametrize("reduction", list(ReductionOrder))
@pytest.mark.parametrize(("dtype", "within"), [("float64", 1e-13), ("float32", 1e-5)])
def test_equals_one_big_batch(
    launch: Launch, tmp_path: Path, reduction: ReductionOrder, dtype: str, within: float
) -> None:
    sizes = [1, 4, 2, 5]
    exact, losses = one_big_batch(sizes)
    digests = set()
    for number, placement in enumerate(([4], [1, 3], [1, 1, 1, 1])):
        file = tmp_path / f"{number}"
        outcome = launch(
            SCRIPT, placement=placement, args=[json.dumps(sizes), dtype, str(file)], reduction=reduction
        )
        digests.add(outcome.digest)
        got = torch.load(f"{file}.pt", weights_only=True)
        assert all(torch.allclose(a, b, rtol=0, atol=within) for a, b in zip(got, exact, strict=True))
        assert [record.metrics["loss"] for record in outcome.logs] == pytest.approx(losses, abs=within * 10)
        seen = Counter(int(line) for line in file.read_text().split())
        assert seen == dict.fromkeys(range(50), 2)  # exactly once in each of two epochs
        assert outcome.samples == 100
    assert len(digests) == 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 200), st.booleans())
def test_every_sample_exactly_once(sizes: list[int], length: int, shuffle: bool) -> None:
    order = UnevenOrder(length=length, sizes=tuple(sizes), seed=3, epoch=1, shuffle=shuffle)
    seen: list[int] = []
    try:
        batches = order.batches
    except Misuse:
        assert length < len(sizes) or sum(sizes) < 2 * len(sizes)
        return
    for batch in range(batches):
        parts = [order.indices(rank, batch) for rank in range(len(sizes))]
        assert all(1 <= len(part) <= size for part, size in zip(parts, sizes, strict=True))
        assert sum(map(len, parts)) == order.samples(batch)
        weights = [order.weight(rank, batch) for rank in range(len(sizes))]
        if None not in weights:
            assert weights == [len(part) / order.samples(batch) for part in parts]
        else:
            assert len({len(part) for part in parts}) == 1
        seen += [index for part in parts for index in part]
    assert sorted(seen) == list(range(length))


@pytest.mark.parametrize(
    ("sizes", "more", "says"),
    [
        ([1, 2], "", "has 2 entries, but the job has 3"),
        ([1, 0, 2], "", "at least 1"),
        ([1, 1, 2], ", accumulate=2", "accumulate"),
    ],
)
def test_lists_that_make_no_sense(launch: Launch, sizes: list[int], more: str, says: str) -> None:
    script = SCRIPT.replace("job.steps(loader)", f"job.steps(loader{more})")
    outcome = launch(script, virtual_workers=3, args=[json.dumps(sizes), "float32", "seen"], check=False)
    assert outcome.failure is not None
    assert says in str(outcome.failure.traceback)
    assert outcome.exit_code == 2
