"""The NumPy and the JAX loop as real processes, killed with SIGKILL again and again: the model is that of a quiet run."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(name: str, *args: str) -> str:
    """To the end; the last line it prints."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]


KILLER = """
import os, runpy, signal, sys
import gyrostat.data.shards.saves as saves
from gyrostat.data.shards.loop import ShardSource

where, at, sys.argv = sys.argv[1], int(sys.argv[2]), sys.argv[3:]

def dying(original, when):
    def call(*args):
        if when(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)
    return call

feeds = []
ShardSource.batch_end = dying(
    ShardSource.batch_end, lambda feed, samples: feeds.append(feed) or (where == "update" and feed.step == at)
)
saves._sync = dying(saves._sync, lambda path: where == "save" and feeds[-1].step >= at)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_and_kill(name: str, *args: str, where: str, at: int) -> int:
    """It kills itself with SIGKILL after the update of batch `at`, or in the next save; the step that it began with."""
    command = [sys.executable, "-c", KILLER, where, str(at), str(EXAMPLES / f"{name}.py"), *args]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    resumed = re.match(r"resumed at step (\d+)", ended.stdout)
    return int(resumed[1]) if resumed else 0


@pytest.mark.parametrize(
    ("name", "epochs", "kills", "begins"),
    [
        (
            "shards_numpy",
            2,
            [("update", 30), ("update", 75), ("save", 90), ("update", 120), ("save", 201)],
            [0, 25, 75, 75, 100],
        ),
        ("shards_jax", 2, [("update", 60)], [0]),
    ],
)
def test_killed_and_started_anew_it_ends_with_the_same_model(
    tmp_path: Path, name: str, epochs: int, kills: list[tuple[str, int]], begins: list[int]
) -> None:
    quiet = run(name, "--epochs", str(epochs))
    assert quiet.startswith(f"every sample exactly {epochs} times")
    args = ["--epochs", str(epochs), "--directory", str(tmp_path / "run"), "--save-every", "25"]
    began = [run_and_kill(name, *args, where=where, at=step) for where, step in kills]
    assert began == begins
    assert run(name, *args) == quiet


def test_the_loop_in_the_docs_can_be_killed(tmp_path: Path) -> None:
    [loop] = [
        block
        for block in re.findall(
            r"```python\n(.*?)```", (ROOT / "docs" / "reference" / "shards.md").read_text(), re.DOTALL
        )
        if "gyrostat.shards(" in block
    ]
    (tmp_path / "loop.py").write_text(loop)
    command = [sys.executable, "-c", KILLER, "update", "55", "loop.py"]
    assert subprocess.run(command, cwd=tmp_path).returncode == -signal.SIGKILL
    assert (tmp_path / "run" / "step-00000050").is_dir()
    subprocess.run([sys.executable, "loop.py"], cwd=tmp_path, check=True)
