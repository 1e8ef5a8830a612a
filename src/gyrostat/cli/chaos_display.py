"""The output of `gyrostat chaos`: faults as they are injected, then a table and the verdict."""

from __future__ import annotations

import sys
from collections import Counter
from statistics import median

from rich.console import Console
from rich.table import Table

from gyrostat.job.chaos.play import ChaosObserver
from gyrostat.job.chaos.record import RecordedRun
from gyrostat.job.chaos.verdict import ChaosVerdict, Round, Struck


class Printer(ChaosObserver):
    """Prints events as they happen."""

    def undisturbed(self, recorded: RecordedRun) -> None:
        _print_note(
            f"undisturbed: {len(recorded.steps):,} steps, {recorded.samples:,} samples, digest {_digest(recorded)}"
        )

    def struck(self, struck: Struck) -> None:
        _print_note(f"{struck.at:7.1f} s, step {struck.step}: {struck.kind}: {struck.whom}")

    def round_over(self, round: Round) -> None:
        recorded = round.recorded
        _print_note(
            f"round over: {len(round.struck)} faults, {recorded.samples:,} samples, recovered {len(recorded.rescued)} times "
            f"from peers and {recorded.restored} times from a checkpoint, digest {_digest(recorded)}"
        )


def _print_note(line: str) -> None:
    print(f"gyrostat: {line}", file=sys.stderr, flush=True)


def _digest(recorded: RecordedRun) -> str:
    return ", ".join(sorted(recorded.digests)) or "none"


def print_verdict(verdict: ChaosVerdict) -> None:
    console = Console(highlight=False)
    table = Table(title=f"{len(verdict.struck)} faults in {len(verdict.rounds)} rounds, seed {verdict.seed}")
    table.add_column("fault")
    for column in ("times", "until the next step: median", "longest"):
        table.add_column(column, justify="right")
    for kind, times in sorted(Counter(struck.kind for struck in verdict.struck).items()):
        waits = [
            struck.until_next_step
            for struck in verdict.struck
            if struck.kind == kind and struck.until_next_step is not None
        ]
        shown = (f"{1e3 * median(waits):,.0f} ms", f"{1e3 * max(waits):,.0f} ms") if waits else ("", "")
        table.add_row(kind, str(times), *shown)
    console.print(table)
    for number, round in enumerate(verdict.rounds):
        for difference in round.differences:
            console.print(f"round {number}: {difference}", markup=False)
    restored = sum(round.recorded.restored for round in verdict.rounds)
    rescued = sum(len(round.recorded.rescued) for round in verdict.rounds)
    if verdict.ok:
        console.print(
            f"verdict: equal. All {len(verdict.rounds)} runs ended with digest {_digest(verdict.undisturbed)}, every step "
            f"with the same loss and samples; {rescued} times they recovered from peers, {restored} times from a checkpoint.",
            soft_wrap=True,
        )
    else:
        console.print("verdict: NOT EQUAL")
