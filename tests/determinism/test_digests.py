"""The one great claim: N virtual workers on any number of workers end with the bits of plain DDP on N processes.

Every run here is real: the reference is torch's own DistributedDataParallel, DataLoader and DistributedSampler on N gloo
processes. The short matrix gives every feature of the zoo one N, one worker and one uneven placement; the full one
(`pytest -m full`) gives every feature every N and every kind of placement.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.determinism.zoo import FEATURES

ZOO = Path(__file__).parent / "zoo.py"
ROOT = Path(__file__).parents[2]
SIZES = (2, 3, 4, 5, 8)
SLOW = ("compiled", "compiled_in_place")
EXAMPLES = {
    "mlp": ["--epochs", "1", "--limit", "5", "--small"],
    "resnet": ["--epochs", "1", "--limit", "3", "--small"],
    "gpt": ["--epochs", "1", "--limit", "3", "--small"],
    "recommender": ["--epochs", "1", "--limit", "5", "--small"],
    "gan": ["--epochs", "1", "--limit", "3", "--small"],
}


def placements(n: int) -> list[list[int]]:
    """One worker, one per virtual worker, and uneven ones."""
    found = [[n], [1] * n]
    if n >= 3:
        found += [[n - 1, 1], [1, n - 1]]
    if n >= 4:
        found += [[2, n - 3, 1]]
    return found


def assert_same(launch: Launch, script: Path, args: list[str], n: int, wanted: list[list[int]]) -> None:
    reference = launch(script, virtual_workers=n, reference=True, args=args)
    assert reference.steps > 0
    for placement in wanted:
        outcome = launch(script, placement=placement, args=args)
        assert outcome.losses == reference.losses, f"losses on {placement}"
        assert outcome.digest == reference.digest, f"state on {placement}"


@pytest.mark.parametrize("n", SIZES)
def test_every_number_of_virtual_workers(launch: Launch, n: int) -> None:
    assert_same(launch, ZOO, ["batch_norm_and_dropout"], n, placements(n))


@pytest.mark.parametrize("name", [name for name in FEATURES if name not in SLOW])
def test_every_feature(launch: Launch, name: str) -> None:
    n = 3 + list(FEATURES).index(name) % 3
    assert_same(launch, ZOO, [name], n, [[n], [1, n - 1]])


def test_compiled_model(launch: Launch) -> None:
    assert_same(launch, ZOO, ["compiled"], 3, [[3]])


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example(launch: Launch, name: str) -> None:
    assert_same(launch, ROOT / "examples" / f"{name}.py", EXAMPLES[name], 3, [[3], [1, 2]])


@pytest.mark.full
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", FEATURES)
def test_full_matrix(launch: Launch, name: str, n: int) -> None:
    assert_same(launch, ZOO, [name], n, placements(n))


@pytest.mark.full
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", EXAMPLES)
def test_full_matrix_of_examples(launch: Launch, name: str, n: int) -> None:
    assert_same(launch, ROOT / "examples" / f"{name}.py", EXAMPLES[name], n, placements(n))


def test_strides_that_change_after_track(launch: Launch) -> None:
    """Every placement agrees, and with what training in that memory format from the start would give, up to rounding."""
    args = ["channels_last_after_track"]
    outcomes = [launch(ZOO, placement=placement, args=args) for placement in ([3], [1, 2], [1, 1, 1])]
    assert len({outcome.digest for outcome in outcomes}) == 1
    late = "    job.track(model=model, optimizer=optimizer)\n"
    switch = "    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]\n"
    text = ZOO.read_text()
    assert late + switch in text
    early = launch(text.replace(late + switch, switch + late), placement=[3], args=args)
    assert early.losses == pytest.approx(outcomes[0].losses, rel=1e-5)


def test_another_seed_gives_other_bits(launch: Launch) -> None:
    """So that equal digests mean something."""
    text = ZOO.read_text()
    other = text.replace("gyrostat.init(seed=11)", "gyrostat.init(seed=12)")
    assert other != text
    args = ["batch_norm_and_dropout"]
    assert (
        launch(ZOO, virtual_workers=3, args=args).digest != launch(other, virtual_workers=3, args=args).digest
    )
