"""However data comes, it comes with the bits of torch's DataLoader on N ranks; also when a job goes on elsewhere in mid-epoch.

The reference is torch's own DataLoader in N processes, with `num_workers` data workers each. The short matrix gives every
way of `batch_sources.py` one N and one placement; the full one (`pytest -m full`) every N, placement and `num_workers`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.core.job import CheckpointPolicy
from gyrostat.job.control.outcome import Outcome
from tests.conftest import Launch
from tests.determinism.batch_sources import CASES
from tests.determinism.test_digests import placements

FEEDS = Path(__file__).parent / "batch_sources.py"
SHARED_STATE = ("two_passes", "remembering")
"""A dataset that remembers lives in the rank's own process without data workers: there the script must not do that."""
NEEDS_DATA_WORKERS = (*SHARED_STATE, "initialised")
WITHOUT = (
    "generator",
    "random_sampler",
    "sampler_and_generator",
    "sampler_with_a_generator_of_its_own",
    "batch_sampler_per_rank",
    "unbatched",
    "stream",
    "stream_per_rank",
    "resumable",
    "own_dataset_shuffled",
)
PERSISTENT = ("left_early", "initialised", "sampler_and_generator", "stream")


def options(**given: int) -> list[str]:
    return [f"{name}={value}" for name, value in given.items()]


def assert_same(launch: Launch, args: list[str], n: int, wanted: list[list[int]]) -> Outcome:
    reference = launch(FEEDS, virtual_workers=n, reference=True, args=args)
    assert reference.steps >= 2
    for placement in wanted:
        outcome = launch(FEEDS, placement=placement, args=args)
        assert outcome.losses == reference.losses, f"losses on {placement}"
        assert outcome.digest == reference.digest, f"state on {placement}"
    return reference


@pytest.mark.parametrize("name", CASES)
def test_every_way_with_data_workers(launch: Launch, name: str) -> None:
    assert_same(launch, [name, *options(num_workers=2)], 3, [[1, 2]])


@pytest.mark.parametrize("name", WITHOUT)
def test_every_way_without(launch: Launch, name: str) -> None:
    assert_same(launch, [name, *options(num_workers=0)], 2, [[2]])


@pytest.mark.parametrize("name", PERSISTENT)
def test_persistent_data_workers(launch: Launch, name: str) -> None:
    args = [name, *options(num_workers=2, persistent_workers=1, prefetch_factor=1)]
    assert_same(launch, args, 2, [[2]])


@pytest.mark.parametrize(("n", "num_workers"), [(2, 1), (4, 3), (8, 2)])
def test_numbers_of_workers(launch: Launch, n: int, num_workers: int) -> None:
    assert_same(launch, ["plain", *options(num_workers=num_workers)], n, [[n], [n // 2, n - n // 2]])


OWN = """
import torch

import gyrostat


class Own(torch.utils.data.Dataset):
    def __init__(self, rank):
        self.first = 100 * rank

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.first + index


job = gyrostat.init()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
job.track(model=model, optimizer=optimizer)
for step in job.steps(job.dataloader(Own, batch_size=2)):
    for x in step:
        with open(f"seen-{step.virtual_rank}", "a") as file:
            print(*x.tolist(), file=file)
        step.backward(model(x[:, None].float()).mean())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("reference", [True, False])
def test_a_dataset_made_per_rank_is_seen_as_a_whole(launch: Launch, tmp_path: Path, reference: bool) -> None:
    """Sample by sample what `DataLoader(Own(rank), batch_size=2)` gives each rank, in the job and in its DDP form."""
    launch(OWN, virtual_workers=2, workers=2, reference=reference)
    seen = [list(map(int, (tmp_path / f"seen-{rank}").read_text().split())) for rank in (0, 1)]
    assert seen == [[0, 1, 2, 3, 4, 5], [100, 101, 102, 103, 104, 105]]


def resumed_everywhere(
    launch: Launch, directory: Path, args: list[str], stops: tuple[tuple[int, list[int]], ...]
) -> None:
    """Stopped after some steps, with batches in flight, and gone on with on another placement."""
    n = sum(stops[0][1])
    reference = launch(FEEDS, virtual_workers=n, reference=True, args=args)
    policy = CheckpointPolicy(directory=str(directory))
    losses: list[float | None] = []
    for stop, placement in stops:
        part = launch(FEEDS, placement=placement, args=args, checkpoint=policy, stop_after=stop)
        assert part.steps == min(stop, reference.steps)
        losses += part.losses
    assert tuple(losses) == reference.losses
    assert part.digest == reference.digest


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("plain", {"num_workers": 3}),
        ("remembering", {"num_workers": 2}),
        ("two_passes", {"num_workers": 1}),
        ("several_loaders", {"num_workers": 2}),
        ("sampler_and_generator", {"num_workers": 2}),
        ("sampler_and_generator", {"num_workers": 0}),
        ("sampler_that_draws_always", {"num_workers": 2}),
        ("batch_sampler_per_rank", {"num_workers": 0}),
        ("stream", {"num_workers": 2}),
        ("resumable", {"num_workers": 0}),
        ("resumable", {"num_workers": 2}),
        ("initialised", {"num_workers": 2, "persistent_workers": 1}),
        ("stream", {"num_workers": 2, "persistent_workers": 1}),
        ("own_dataset_shuffled", {"num_workers": 2}),
    ],
)
def test_resumed_in_mid_epoch(launch: Launch, tmp_path: Path, name: str, given: dict[str, int]) -> None:
    stops = ((1, [2, 1]), (4, [3]), (99, [1, 2]))
    resumed_everywhere(launch, tmp_path / "checkpoints", [name, *options(**given)], stops)


@pytest.mark.full
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_full_matrix(launch: Launch, name: str, n: int, num_workers: int) -> None:
    if num_workers == 0 and name in NEEDS_DATA_WORKERS:
        pytest.skip("needs data workers")
    assert_same(launch, [name, *options(num_workers=num_workers)], n, placements(n))


@pytest.mark.full
@pytest.mark.parametrize(
    "given", [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 3, "persistent_workers": 1}]
)
@pytest.mark.parametrize("name", CASES)
def test_full_matrix_resumed(launch: Launch, tmp_path: Path, name: str, given: dict[str, int]) -> None:
    if given["num_workers"] == 0 and name in (*NEEDS_DATA_WORKERS, "stream", "stream_per_rank"):
        pytest.skip("needs data workers: without them its state cannot be kept apart, or is not known")
    stops = ((1, [4]), (2, [1, 3]), (4, [2, 2]), (99, [1, 1, 1, 1]))
    resumed_everywhere(launch, tmp_path / "checkpoints", [name, *options(**given)], stops)
