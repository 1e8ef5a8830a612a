"""A long chaos run: `gyrostat chaos` on one machine, under agents with a file, under agents with etcd, and in a cluster, until
1,000 faults have been injected; prints a Markdown table.

`--out DIR` keeps the verdict of every run and the logs of rounds that failed, and continues the campaign that DIR holds: with
`--faults 0` it only prints the table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

TARGETS = {
    "one machine": ("--nodes", "1"),
    "3 agents, lease in a file": ("--nodes", "3"),
    "3 agents, etcd": ("--nodes", "3", "--store", "etcd"),
    "cluster of 3 devices, 2 jobs": ("--cluster",),
}
_FAULTS_PER_RUN = 60
_COMMAND = ("chaos", "-n", "4", "-w", "3", "--paced", "120", "--checkpoint-every", "10", "--every", "0.5")
_EPOCHS = "30"
_FAILURES = ("wrong result", "hang", "untrue exit code", "gave up")

Verdict = dict[str, Any]


def run_once(out: Path, target: str, seed: int, faults: int) -> Verdict:
    """One `gyrostat chaos`: it ends at the first round that fails."""
    name = f"{'-'.join(TARGETS[target]).strip('-')}-{seed}"
    verdict = out / f"{name}.json"
    command = [
        *(sys.executable, "-c", "from gyrostat.cli.main import main; main()", *_COMMAND, *TARGETS[target]),
        *("--seed", str(seed), "--faults", str(faults), "--minutes", "60", "--json", str(verdict)),
        *(str(Path(__file__).with_name("side_chaos.py")), _EPOCHS),
    ]
    print(f"{target}, seed {seed}:", "gyrostat", *command[3:], file=sys.stderr, flush=True)
    with (out / f"{name}.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    if not verdict.exists():
        sys.exit(f"it ended with exit code {code}; see {out / name}.log")
    found: Verdict = json.loads(verdict.read_text())
    found["target"], found["commit"] = target, commit()
    verdict.write_text(json.dumps(found))
    for round in found["rounds"]:
        for failure in round["failures"]:
            print(
                f"    seed {round['seed']}: {failure['kind']}: {failure['text']}", file=sys.stderr, flush=True
            )
    return found


def commit() -> str:
    """Of the code that was run."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def read(out: Path) -> list[Verdict]:
    found = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    return [verdict for verdict in found if "target" in verdict]


def table(verdicts: list[Verdict]) -> list[str]:
    """The commits, one line for each target, then the faults by kind."""
    commits = Counter(verdict.get("commit", "unknown") for verdict in verdicts)
    head = (
        "| target | runs | faults | "
        + " | ".join(_FAILURES)
        + " | from peers | from a checkpoint | begun again |"
    )
    lines = ["Commits: " + ", ".join(commits), "", head, "|---|" + "---:|" * (head.count("|") - 2)]
    for target in [*TARGETS, None]:
        of_target = [verdict for verdict in verdicts if target in (None, verdict["target"])]
        rounds = [round for verdict in of_target for round in verdict["rounds"]]
        failures = Counter(kind for round in rounds for kind in {each["kind"] for each in round["failures"]})
        sums = [
            *(len(rounds), sum(len(verdict["faults"]) for verdict in of_target)),
            *(failures[kind] for kind in _FAILURES),
            *(
                sum(round[name] for round in rounds)
                for name in ("recovered_from_peers", "restored_from_checkpoint")
            ),
            sum(round["begun_again"] for round in rounds),
        ]
        lines.append(f"| {target or 'all'} | " + " | ".join(f"{number:,}" for number in sums) + " |")
    lines += ["", "| fault | times | until the next step: median | longest |", "|---|---:|---:|---:|"]
    faults = [fault for verdict in verdicts for fault in verdict["faults"]]
    for kind, times in Counter(fault["kind"] for fault in faults).most_common():
        waits = [fault["until_next_step"] for fault in faults if fault["kind"] == kind]
        known = [seconds for seconds in waits if seconds is not None] or [0.0]
        lines.append(f"| {kind} | {times} | {median(known):.2f} s | {max(known):.1f} s |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--faults", type=int, default=1000, help="in all, those that --out holds included (1000)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the first run (1)")
    parser.add_argument(
        "--target", choices=list(TARGETS), action="append", help="only this one; may be repeated"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/chaos"), help="directory of the results (build/chaos)"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    targets = options.target or list(TARGETS)
    verdicts = read(options.out)
    ends = [verdict["seed"] + len(verdict["rounds"]) for verdict in verdicts]
    seed = max([options.seed, *ends])
    while (left := options.faults - sum(len(verdict["faults"]) for verdict in verdicts)) > 0:
        counts = {
            name: sum(len(one["faults"]) for one in verdicts if one["target"] == name) for name in targets
        }
        target = min(targets, key=lambda name: counts[name])
        verdicts.append(run_once(options.out, target, seed, min(left, _FAULTS_PER_RUN)))
        seed += len(verdicts[-1]["rounds"])
    print("\n".join(table(verdicts)))


if __name__ == "__main__":
    main()
