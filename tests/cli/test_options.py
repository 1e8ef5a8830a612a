"""Options that belong together, and what is said when they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.cli.options import choose_checkpoint, choose_placement, choose_pool, choose_schedule
from gyrostat.core.errors import UsageError
from gyrostat.core.job import CheckpointPolicy, Determinism, DevicePool
from gyrostat.core.placement import Placement


@pytest.mark.parametrize(
    ("virtual_workers", "workers", "placement", "counts", "given"),
    [
        (None, None, None, [1], False),
        (4, None, None, [4], True),
        (None, 3, None, [1, 1, 1], False),
        (5, 2, None, [3, 2], True),
        (None, None, "3,1", [3, 1], True),
        (4, 2, "3,1", [3, 1], True),
    ],
)
def test_placements(
    virtual_workers: int | None, workers: int | None, placement: str | None, counts: list[int], given: bool
) -> None:
    chosen = choose_placement(virtual_workers, workers, placement)
    assert chosen == (Placement.from_counts(counts), given)


@pytest.mark.parametrize(
    ("virtual_workers", "workers", "placement", "message"),
    [
        (2, 3, None, r"3 workers cannot share 2 virtual workers: .*use --workers 2 or fewer"),
        (0, None, None, "at least one worker and one virtual worker, got 1 and 0"),
        (None, 0, None, "at least one worker and one virtual worker, got 0 and 0"),
        (None, 3, "3,1", r"--placement 3,1 is for 2 workers, but --workers says 3"),
        (5, None, "3,1", r"places 4 virtual workers, but --virtual-workers says 5"),
        (None, None, "3,x", r"such as 3,1; got '3,x'"),
        (None, None, "3,0", r"at least one virtual worker, but the counts are \[3, 0\]"),
    ],
)
def test_placements_that_make_no_sense(
    virtual_workers: int | None, workers: int | None, placement: str | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        choose_placement(virtual_workers, workers, placement)


def test_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert choose_checkpoint(None, 0, 0.0, 3, True) is None
    assert choose_checkpoint(Path("c"), 5, 60.0, 2, False) == CheckpointPolicy(
        directory=str(tmp_path / "c"), every=5, interval_s=60.0, keep=2, resume=False
    )
    with pytest.raises(UsageError, match="--checkpoint-every needs --checkpoint-dir DIR"):
        choose_checkpoint(None, 5, 0.0, 3, True)
    with pytest.raises(UsageError, match="--checkpoint-interval needs --checkpoint-dir DIR"):
        choose_checkpoint(None, 0, 60.0, 3, True)
    with pytest.raises(UsageError, match="--checkpoint-interval must be 0 or more seconds, got -1"):
        choose_checkpoint(Path("c"), 0, -1.0, 3, True)
    with pytest.raises(UsageError, match="--keep 1 or more, got 0 and 0"):
        choose_checkpoint(Path("c"), 0, 0.0, 0, True)


def test_schedules() -> None:
    assert choose_schedule(None, 4, 2, None) == (2, ())
    assert choose_schedule("0:2,50:4,100:1", 4, None, None) == (2, ((50, 4), (100, 1)))
    assert choose_schedule("5:3", 4, 1, None) == (1, ((5, 3),))


@pytest.mark.parametrize(
    ("text", "virtual_workers", "workers", "placement", "problem"),
    [
        ("5", 4, None, None, "'5' in '5' is not such a pair"),
        ("0:2,x:1", 4, None, None, "'x:1' in '0:2,x:1' is not such a pair"),
        ("5:2,5:3", 4, None, None, "must increase, from 0 or more"),
        ("-1:2", 4, None, None, "must increase, from 0 or more"),
        ("0:2,5:9", 4, None, None, "has 9 workers at step 5"),
        ("0:0", 4, None, None, "has 0 workers at step 0"),
        ("0:2", 4, 3, None, "begins with 2 workers, but --workers says 3"),
        ("0:2", None, None, None, "needs --virtual-workers N"),
        ("0:2", 4, None, "2,2", "--placement 2,2 is for a fixed number"),
    ],
)
def test_schedules_that_cannot_be(
    text: str, virtual_workers: int | None, workers: int | None, placement: str | None, problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        choose_schedule(text, virtual_workers, workers, placement)


def test_pools() -> None:
    level = Determinism.HETEROGENEOUS
    assert choose_pool(Determinism.ELASTIC, None, 1) is None
    assert choose_pool(Determinism.STATIC, None, 1) is None
    assert choose_pool(level, "sse, AVX512,avx2", 2) == DevicePool(types=("avx512", "avx2", "sse"), threads=2)
    assert choose_pool(level, "avx2,v100,t4", 1) == DevicePool(types=("v100", "t4", "avx2"), threads=1)
    with pytest.raises(
        UsageError, match=r"heterogeneous needs the device types .* such as --pool avx512,avx2"
    ):
        choose_pool(level, None, 1)
    with pytest.raises(
        UsageError, match="--pool avx2 is for --determinism heterogeneous; this job is elastic"
    ):
        choose_pool(Determinism.ELASTIC, "avx2", 1)
    for text in ("", "avx2,", "avx2,avx2"):
        with pytest.raises(UsageError, match="--pool takes different device types, such as avx512,avx2"):
            choose_pool(level, text, 1)
