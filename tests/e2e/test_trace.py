"""`gyrostat run --trace`: where a step's time goes, and that the reduction overlaps with backward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.gyrostat_process import gyrostat

SCRIPT = """
import torch, gyrostat
from torch.utils.data import TensorDataset
job = gyrostat.init(seed=3)
model = torch.nn.Sequential(*[torch.nn.Linear(600, 600) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job.track(model=model, optimizer=optimizer)
loader = job.dataloader(TensorDataset(torch.randn(256, 600)), batch_size=16)
for step in job.steps(loader, limit=4):
    for (x,) in step:
        step.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("reduction", "virtual_workers"), [("ddp", 4), ("tree", 4), ("ddp", 2)])
def test_spans(tmp_path: Path, reduction: str, virtual_workers: int) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["-n", str(virtual_workers), "-w", "2", "--reduction", reduction, "--trace", "trace.json"]
    code, _, err = gyrostat("run", *options, "train.py", cwd=tmp_path)
    assert code == 0, err
    events: list[dict[str, Any]] = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    for worker in (0, 1):
        mine = [span for span in spans if span["pid"] == worker]
        hosted = range(worker * virtual_workers // 2, (worker + 1) * virtual_workers // 2)
        for rank in hosted:
            assert sum(span["name"] == f"virtual worker {rank}" for span in mine) == 4
        for name in ("switch", "fetch", "backward", "exchange: reduce", "reduce", "update"):
            assert any(span["name"] == name for span in mine), name
        assert overlap(mine, last=hosted[-1]), "no bucket was reduced while the last backward ran"


def overlap(spans: list[dict[str, Any]], last: int) -> bool:
    """Whether a reduction began on the reducer's track before the last virtual worker's backward had ended."""
    backwards = [s for s in spans if s["name"] == "backward" and s["args"]["rank"] == last]
    reductions = [s for s in spans if s["name"].startswith("reduce bucket") and s["tid"] == 2]
    return any(b["ts"] < r["ts"] < b["ts"] + b["dur"] for b in backwards for r in reductions)
