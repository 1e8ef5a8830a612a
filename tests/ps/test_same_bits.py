"""`staleness=0`: the same bits in one process, on any number of workers and servers, and as `nn.EmbeddingBag` under DDP."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
GYROSTAT = Path(sys.executable).with_name("gyrostat")


def finished(*processes: subprocess.Popen[str]) -> list[str]:
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


def start(*command: str | Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def found(word: str, output: str) -> set[str]:
    return set(re.findall(rf"{word} ([0-9a-f]{{64}})", output))


def test_embedding_bags_under_ddp(tmp_path: Path) -> None:
    """SGD with a rate of a power of two, two virtual workers: every step but one rounding is exact in both forms."""
    script = SCRIPTS / "embedding_bag.py"
    ranks = finished(*(start(sys.executable, script, tmp_path / "store", str(rank)) for rank in range(2)))
    (alone,) = finished(start(sys.executable, script))
    (run,) = finished(start(GYROSTAT, "run", "--servers", "2", "--workers", "3", script))
    ddp = found("weights", ranks[0])
    assert len(ddp) == 1
    assert found("weights", ranks[1]) == found("weights", alone) == found("weights", run) == ddp


@pytest.mark.parametrize("shape", [(1, 1), (2, 3)])
def test_any_number_of_workers_and_servers(shape: tuple[int, int]) -> None:
    """A model with dropout, Adam and row-wise Adagrad; four virtual workers."""
    servers, workers = shape
    script = SCRIPTS / "ordered.py"
    (alone,) = finished(start(sys.executable, script))
    (run,) = finished(start(GYROSTAT, "run", "--servers", str(servers), "--workers", str(workers), script))
    assert len(found("digest", alone)) == 1
    assert found("digest", run) == found("digest", alone)
