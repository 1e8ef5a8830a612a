"""A total batch that does not fit into memory at once is trained by virtual workers within a real limit."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Launch

SCRIPT = Path(__file__).parents[2] / "examples" / "big_batch.py"
ARGS = ["--small", "--limit", "2", "--memory", "110"]
TOTAL = 256


def test_virtual_workers_fit_where_one_forward_does_not(launch: Launch) -> None:
    at_once = launch(SCRIPT, virtual_workers=1, args=[*ARGS, "--batch-size", str(TOTAL)], check=False)
    assert at_once.failure is not None
    assert at_once.steps == 0
    assert "can't allocate memory" in str(at_once.failure.traceback)

    outcome = launch(SCRIPT, virtual_workers=32, args=[*ARGS, "--batch-size", str(TOTAL // 32)])
    assert outcome.steps == 2
    last = outcome.logs[-1].metrics
    assert last["total_batch"] == TOTAL
    assert 0 < last["peak_mb"] <= 110
    losses = [record.metrics["loss"] for record in outcome.logs[:-1]]
    assert losses[1] < losses[0]
