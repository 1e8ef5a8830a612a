"""Expected AUC of asynchronous runs with parameter servers that are resized and disturbed, against undisturbed ones.

    python benchmarks/server_auc.py --pairs 5 --quick

Three sides, the same seeds: two workers and one server throughout; workers that come and go (`--schedule`); and workers and
servers that are killed, one of each in turn, while it trains. What is compared is the spread of the AUC over seeds:
resizing and deaths should not widen it. Every kill is counted and printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_KILLS = 6
GYROSTAT = Path(sys.executable).with_name("gyrostat")


@dataclass(frozen=True)
class Side:
    name: str
    options: tuple[str, ...]
    kill_every: float | None = None
    """Seconds between two kills."""


SIDES = (
    Side("undisturbed", ("--servers", "1", "--workers", "2")),
    Side("elastic", ("--servers", "1", "--schedule", "0:1,60:4,120:2,180:3")),
    Side("disturbed", ("--servers", "2", "--workers", "3", "--checkpoint-every", "20"), kill_every=1.5),
)


def run(side: Side, example: str, arguments: list[str]) -> tuple[float, int, int]:
    """The AUC at the end, and how many workers and servers were killed."""
    with tempfile.TemporaryDirectory() as directory:
        return _run_in(directory, side, example, arguments)


def _run_in(directory: str, side: Side, example: str, arguments: list[str]) -> tuple[float, int, int]:
    script = ROOT / "examples" / f"{example}.py"
    command = [str(GYROSTAT), "run", *side.options, "--checkpoint-dir", directory, str(script), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    killed = {"worker": 0, "server": 0}
    due = time.monotonic() + 3
    while side.kill_every is not None and sum(killed.values()) < _KILLS and process.poll() is None:
        time.sleep(0.05)
        if time.monotonic() >= due:
            due = time.monotonic() + side.kill_every
            role = "worker" if killed["worker"] <= killed["server"] else "server"
            found = _processes(process.pid, role)
            if found:
                os.kill(found[0], signal.SIGKILL)
                killed[role] += 1
    output, _ = process.communicate()
    scores = re.findall(r"auc (\S+)", output)
    if process.returncode or not scores:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}\n{output}")
    return float(scores[-1]), killed["worker"], killed["server"]


def _processes(launcher: int, role: str) -> list[int]:
    """Servers are children of the launcher; workers are children of its fork server, oldest first."""
    children = _children(launcher)
    servers = [each for each in children if "gyrostat.ps.server" in _command(each)]
    if role == "server":
        return servers
    return sorted(worker for each in children if each not in servers for worker in _children(each))


def _children(process: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5, help="seeds that all sides run with (default 5)")
    parser.add_argument("--example", default="deepfm", choices=("wide_and_deep", "deepfm", "xdeepfm"))
    parser.add_argument("--quick", action="store_true", help="the example's small form")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all scores to FILE")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    given = ["--epochs", str(args.epochs), *(["--small"] if args.quick else [])]
    found: dict[str, list[float]] = {side.name: [] for side in SIDES}
    for seed in range(args.pairs):
        for side in SIDES:
            auc, workers, servers = run(side, args.example, [*given, "--seed", str(seed)])
            found[side.name].append(auc)
            print(
                f"seed {seed}  {side.name:12} AUC {auc:.5f}  killed: {workers} workers, {servers} servers",
                flush=True,
            )
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2))
    for name, scores in found.items():
        spread = max(scores) - min(scores)
        print(f"{name:12} mean {statistics.fmean(scores):.5f}  spread {spread:.5f} over {len(scores)} seeds")
    undisturbed = max(found["undisturbed"]) - min(found["undisturbed"])
    others = [score for side in SIDES[1:] for score in found[side.name]]
    spread = max(others) - min(others)
    print(
        f"spread over all elastic and disturbed runs: {spread:.5f}; over undisturbed seeds: {undisturbed:.5f}: "
        f"{'not larger' if spread <= undisturbed else 'not reached'}"
    )


if __name__ == "__main__":
    main()
