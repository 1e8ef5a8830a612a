"""The output of `gyrostat verify`: progress on stderr, then a table and the verdict on stdout."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gyrostat.cli.display import Clock
from gyrostat.core import logs
from gyrostat.core.plural import plural
from gyrostat.job.control.observer import NullObserver
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.processes.output import OutputStream
from gyrostat.job.processes.protocol import FromWorker, Started, StepReports
from gyrostat.job.verify.compare import DifferenceKind, RunDifference, TracedRun, compare
from gyrostat.job.verify.verdict import FailedRun, VerifyFinding, VerifyRow, VerifyVerdict

_REFRESH_S = 0.125


class PlainProgress(NullObserver):
    """A line for every finished run. Implements `job.verify.execution.VerifyObserver`."""

    def __init__(self, *, verbose: bool, clock: Clock = time.monotonic) -> None:
        self._verbose, self._clock = verbose, clock
        self._began = clock()
        self._title, self._steps, self._step = "starting", None, 0  # type: tuple[str, int | None, int]

    def run_started(self, name: str, number: int | None, total: int | None, steps: int | None) -> None:
        self._steps, self._step = steps, 0
        if number is None:
            self._title = f"looking for the first difference: {name}"
            self.note(self._title)
        else:
            self._title = f"run {number} of {total}: {name}"

    def run_ended(self, run: TracedRun, first: TracedRun) -> None:
        result = f"{plural(run.trace.steps, 'step')}, {run.seconds:.1f} s"
        if run is not first:
            result += ", same" if compare(first.trace, run.trace) is None else ", DIFFERENT"
        self.note(f"{self._title}: {result}")

    def heard(self, worker: int, message: FromWorker) -> None:
        if isinstance(message, Started):
            self._step = message.step
        elif isinstance(message, StepReports):
            self._step = message.steps[-1].step

    def printed(self, worker: int, stream: OutputStream, line: str) -> None:
        if self._verbose:
            self.show(f"worker {worker} │ {line}")

    def ticked(self) -> float | None:
        return None

    def over(self, outcome: Outcome) -> None:
        pass

    def note(self, line: str) -> None:
        """A line of gyrostat itself."""
        logs.note(line)

    def show(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class LiveProgress(PlainProgress):
    """The same, above a live line at the bottom of a terminal."""

    def __init__(
        self, *, verbose: bool, clock: Clock = time.monotonic, console: Console | None = None
    ) -> None:
        super().__init__(verbose=verbose, clock=clock)
        self._console = console or Console(stderr=True, highlight=False)
        self._live = Live(
            "", console=self._console, auto_refresh=False, transient=True, redirect_stdout=False
        )
        self._live.start()

    def ticked(self) -> float | None:
        minutes, seconds = divmod(int(self._clock() - self._began), 60)
        done = f"step {self._step}" + (f" of {self._steps}" if self._steps else "")
        line = Text(
            f"{self._title} · {done} · {minutes}:{seconds:02}", "bold", no_wrap=True, overflow="ellipsis"
        )
        self._live.update(line, refresh=True)
        return _REFRESH_S

    def note(self, line: str) -> None:
        self.show(f"gyrostat: {line}")

    def show(self, line: str) -> None:
        self._console.print(Text.from_ansi(line, style="dim"), soft_wrap=True)

    def close(self) -> None:
        """Restore the terminal."""
        self._live.stop()


def print_verdict(verdict: VerifyVerdict, script: str, console: Console | None = None) -> None:
    """The table, then the verdict. A failure of the script goes to stderr."""
    console = console or Console(highlight=False)
    if verdict.failed is not None:
        _print_failure(verdict.failed)
        if not verdict.rows:
            return
    console.print(_table(verdict))
    for note in verdict.notes:
        console.print(Text(f"\nNote: {note}."), soft_wrap=True)
    if verdict.failed is not None:
        console.print(Text(f"\n{_not_verified(verdict, verdict.failed)}", "bold red"), soft_wrap=True)
    elif verdict.equal:
        console.print(Text(f"\n{_equal(verdict, Path(script).name)}", "green"), soft_wrap=True)
    for finding in verdict.findings:
        console.print()
        _print_finding(console, finding)


def _table(verdict: VerifyVerdict) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("configuration", overflow="fold")
    table.add_column("steps", justify="right")
    table.add_column("digest", no_wrap=True)
    table.add_column("")
    table.add_column("seconds", justify="right")
    for row in verdict.rows:
        trace = row.run.trace
        table.add_row(
            Text(row.run.configuration.name),
            str(trace.steps),
            (trace.digest or "–")[:16],
            _status(row, first=row is verdict.rows[0]),
            f"{row.run.seconds:.1f}",
        )
    return table


def _status(row: VerifyRow, *, first: bool) -> Text:
    if row.difference is None:
        return Text("compared with" if first else "same", "dim" if first else "green")
    return Text(f"DIFFERENT {_where(row.difference, exact=row.exact)}", "bold red")


def _where(difference: RunDifference, *, exact: bool) -> str:
    if difference.kind is DifferenceKind.STEPS:
        return f"after step {difference.step - 1}"
    exact = (
        exact and difference.kind is not DifferenceKind.WORKERS
    )  # workers compare checksums only every 100 steps
    return f"{'at' if exact else 'by'} step {difference.step}"


def _equal(verdict: VerifyVerdict, script: str) -> str:
    runs, steps = len(verdict.rows), verdict.rows[0].run.trace.steps
    return (
        f"EQUAL: {runs} runs of {script} with {plural(verdict.virtual_workers, 'virtual worker')}, "
        f"{plural(steps, 'step')} each. Every bit of the tracked state is the same "
        f"({_how_often(verdict.every)}), and so is every loss of virtual worker 0."
    )


def _not_verified(verdict: VerifyVerdict, failed: FailedRun) -> str:
    others = "differ" if any(row.difference for row in verdict.rows) else "are equal"
    return f"NOT VERIFIED: the script failed as {failed.configuration.name}; the runs above {others}."


def _how_often(every: int) -> str:
    return "compared after every step" if every == 1 else f"compared after every {every} steps and at the end"


def _print_finding(console: Console, finding: VerifyFinding) -> None:
    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style), soft_wrap=True)

    one, other = finding.pair.one.configuration.name, finding.pair.other.configuration.name
    if one == other:
        line(f"DIFFERENT: the workers of one run ({one})", "bold red")
    else:
        line(f"DIFFERENT: {one}  ≠  {other}", "bold red")
    for text in _facts(finding):
        line(f"  {text}")
    for number, cause in enumerate(finding.likely):
        line("")
        line(f"{'Likely cause' if number == 0 else 'Or'}: {cause.says}.", "bold")
        for suspect in cause.lines:
            line(f"    {suspect}")
        line(f"  To do: {cause.do}.")
    if finding.unlikely:
        line("\nOther known causes, without evidence in the script:")
    for cause in finding.unlikely:
        line(f"  - {cause.says}.")
    if finding.evidence.repeatable:
        line(
            "\nIf none of these applies, it is a bug in gyrostat: please report it, with the script if possible."
        )


def _facts(finding: VerifyFinding) -> list[str]:
    """The known facts, one line each."""
    facts, located, kind = [], finding.located, finding.difference.kind
    if located is not None:
        facts.append(f"first step   {located.step}")
        facts.append(f"first tensor {located.tensors[0]} ({_share(len(located.tensors), located.total)})")
        facts.append(
            f"loss         of virtual worker 0 "
            f"{'differs too' if finding.loss_differs else 'is the same up to and in that step'}"
        )
    elif kind is DifferenceKind.STEPS:
        steps = [run.trace.steps for run in (finding.pair.one, finding.pair.other)]
        facts.append(f"equal for {min(steps)} steps; then one ended, the other made {max(steps)}")
    elif kind is DifferenceKind.LOSS:
        facts.append(f"first step   {finding.step}, in the loss of virtual worker 0; no tensor differs there")
    elif kind is DifferenceKind.STATE:
        facts.append(f"first step   by {finding.step}; run again, no tensor differed up to there")
    for run in (finding.pair.one, finding.pair.other):
        if run.trace.workers_differ is not None:
            facts.append(f"workers      {run.trace.workers_differ.split('. ')[0]}")
            break
    facts.append(
        "repeatable   yes: a second run of each gives the same result"
        if finding.evidence.repeatable
        else "repeatable   no: a second run of the same configuration gives another result"
    )
    if finding.evidence.repeatable_with_one_thread:
        facts.append("threads      with one thread it is repeatable")
    return facts


def _share(differing: int, total: int) -> str:
    if differing == 1:
        return f"the only one of {total} that differs there"
    return f"{differing} of {total} differ there"


def _print_failure(failed: FailedRun) -> None:
    outcome = failed.outcome
    for line in failed.output:
        print(line, file=sys.stderr)
    failure = outcome.failure
    if failure is None:
        logs.note(f"stopped during {failed.configuration.name}")
        return
    for line in (failure.traceback or "").splitlines():
        print(f"worker {failure.worker} │ {line}", file=sys.stderr)
    logs.error(f"in the run as {failed.configuration.name}, {failure}")
    if failed.configuration.reference:
        logs.note("only the run with torch's own DDP failed; `--against none` omits it")
