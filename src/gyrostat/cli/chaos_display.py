"""The output of `gyrostat chaos`: faults as they are injected, then a table and the verdict."""

from __future__ import annotations

from collections import Counter
from statistics import median

from rich.console import Console
from rich.table import Table

from gyrostat.core.logs import note
from gyrostat.core.plural import plural
from gyrostat.job.chaos.job_run import ChaosObserver
from gyrostat.job.chaos.record import RecordedRun
from gyrostat.job.chaos.verdict import ChaosVerdict, InjectedFault, Round


class Printer(ChaosObserver):
    """Prints events as they happen."""

    def undisturbed(self, recorded: RecordedRun) -> None:
        if (totals := recorded.totals) is not None:
            compared = (
                "" if recorded.digests else ", which depends on the order of updates and is not compared"
            )
            note(
                f"undisturbed: {totals.updates:,} updates, {totals.samples:,} samples, digest {totals.digest}{compared}"
            )
            return
        note(
            f"undisturbed: {plural(len(recorded.steps), 'step')}, {plural(recorded.samples, 'sample')}, "
            f"digest {_digest(recorded)}"
        )

    def fault_injected(self, fault: InjectedFault) -> None:
        note(f"    {fault}")

    def round_over(self, round: Round) -> None:
        if (totals := round.jobs[0].totals) is not None:
            batches = len(round.jobs[0].steps)
            note(
                f"round over: {len(round.faults)} faults, {totals.updates:,} updates by {batches:,} batches that workers ran, "
                f"digest {totals.digest}"
            )
            return
        note(
            f"round over: {plural(len(round.faults), 'fault')}, {plural(round.samples, 'sample')}, "
            f"recovered {plural(round.recovered, 'time')} from peers and {plural(round.restored, 'time')} from a checkpoint, "
            f"begun again {plural(round.begun_again, 'time')}, digest "
            f"{_digest(round.jobs[0])}"
        )


def _digest(recorded: RecordedRun) -> str:
    return ", ".join(sorted(recorded.digests)) or "none"


def print_verdict(verdict: ChaosVerdict) -> None:
    console = Console(highlight=False)
    table = Table(
        title=f"{plural(len(verdict.faults), 'fault')} in {plural(len(verdict.rounds), 'round')}, seed {verdict.seed}"
    )
    table.add_column("fault")
    for column in ("times", "until the next step: median", "longest"):
        table.add_column(column, justify="right")
    for kind, times in sorted(Counter(fault.kind for fault in verdict.faults).items()):
        waits = [
            fault.until_next_step
            for fault in verdict.faults
            if fault.kind == kind and fault.until_next_step is not None
        ]
        shown = (f"{1e3 * median(waits):,.0f} ms", f"{1e3 * max(waits):,.0f} ms") if waits else ("", "")
        table.add_row(kind, str(times), *shown)
    console.print(table)
    for number, round in enumerate(verdict.rounds):
        for failure in round.failures:
            console.print(f"round {number}, seed {verdict.seed + number}: {failure}", markup=False)
    restored = sum(round.restored for round in verdict.rounds)
    recovered = sum(round.recovered for round in verdict.rounds)
    begun_again = sum(round.begun_again for round in verdict.rounds)
    if verdict.ok and (totals := verdict.undisturbed.totals) is not None:
        console.print(_verdict_on_servers(verdict, totals.updates), soft_wrap=True)
    elif verdict.ok:
        console.print(
            f"verdict: equal. All {len(verdict.rounds)} runs ended with digest {_digest(verdict.undisturbed)}, every step with "
            f"the same loss and samples. They recovered {plural(recovered, 'time')} from peers and {plural(restored, 'time')} "
            f"from a checkpoint, and began again {plural(begun_again, 'time')}.",
            soft_wrap=True,
        )
    else:
        console.print("verdict: NOT EQUAL")


def _verdict_on_servers(verdict: ChaosVerdict, updates: int) -> str:
    again = sum(len(round.jobs[0].steps) - updates for round in verdict.rounds)
    digest = (
        f"and digest {_digest(verdict.undisturbed)}"
        if verdict.undisturbed.digests
        else "; digests depend on the order of updates and were not compared"
    )
    return (
        f"verdict: equal. All {len(verdict.rounds)} runs ended with {updates:,} updates, every batch counted once, {digest}; "
        f"workers ran {again:,} batches more than that, which were refused or had gone back."
    )
