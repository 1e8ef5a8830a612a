"""The output of `gyrostat run`: a live progress line on a terminal, occasional lines elsewhere, and the output of every
worker with its name.

Two observers of `job.launcher`. Both print the output of workers (stdout to stdout, stderr to stderr) and the values of
`job.log`; with `--quiet` nothing else. Log records (`core.logs`) reach a terminal above the live line, which redirects stderr.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.text import Text

from gyrostat.core import logs
from gyrostat.core.events import Event, EventKind
from gyrostat.core.placement import Placement
from gyrostat.core.plural import plural
from gyrostat.core.roles import ProcessRole
from gyrostat.job.control.instructions import Reconfiguration, ReconfigurationDone, SurvivorsGoOn
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.control.worker_tracker import JobFailure
from gyrostat.job.diagnostics.stragglers import Straggler
from gyrostat.job.diagnostics.watchdog import Standstill
from gyrostat.job.processes.output import OutputStream
from gyrostat.job.processes.protocol import (
    Checkpointed,
    FromWorker,
    Logged,
    NotCheckpointed,
    Started,
    StepReport,
    StepReports,
)

Clock = Callable[[], float]

_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")
_REFRESH_S = 0.125
_PLAIN_EVERY_S = 10.0
_RATE_WINDOW_S = 5.0
_CURVE = 10


class LossCurve:
    """The loss of a whole run in at most 20 points. Each is the mean of equally many steps; the number doubles when the
    curve is full.
    """

    def __init__(self) -> None:
        self._width = 1
        self._means: list[float] = []
        self._last: list[float] = []

    def append(self, value: float) -> None:
        self._last.append(value)
        if len(self._last) == self._width:
            self._means.append(sum(self._last) / self._width)
            self._last = []
        if len(self._means) == 2 * _CURVE:
            self._means = [(a + b) / 2 for a, b in zip(self._means[::2], self._means[1::2], strict=True)]
            self._width *= 2

    def points(self) -> list[float]:
        return self._means


@dataclass
class ProgressText:
    """Progress and throughput of the job. Pure: steps in, text out."""

    steps: deque[StepReport] = field(default_factory=lambda: deque(maxlen=4096))
    curve: LossCurve = field(default_factory=LossCurve)

    def add(self, steps: Sequence[StepReport]) -> None:
        for step in steps:
            self.steps.append(step)
            if step.loss is not None:
                self.curve.append(step.loss)

    def rate(self) -> float | None:
        """Samples per second over the last few seconds."""
        last = self.steps[-1]
        window = [step for step in self.steps if last.at - step.at <= _RATE_WINDOW_S]
        seconds = last.at - window[0].at
        return sum(step.samples for step in window[1:]) / seconds if seconds > 0 else None

    def parts(self) -> list[str]:
        if not self.steps:
            return ["starting"]
        last, rate = self.steps[-1], self.rate()
        parts = [f"step {last.step:,}"]
        if last.epoch >= 0:
            parts.append(f"epoch {last.epoch}")
        if last.loss is not None:
            parts.append(f"loss {last.loss:.4g}")
        if rate is not None:
            parts.append(f"{rate:,.0f} samples/s")
        return parts


def sparkline(values: Sequence[float]) -> str:
    """A small curve; NaN and infinity leave a gap."""
    finite = [value for value in values if abs(value) != float("inf") and value == value]
    if len(finite) < 2:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    if span == 0:
        return _BARS[0] * len(values)
    return "".join(
        _BARS[int((value - low) / span * (len(_BARS) - 1))] if low <= value <= low + span else " "
        for value in values
    )


def news(message: FromWorker) -> list[str]:
    """Lines to print about this message, if any."""
    match message:
        case Started(resumed_from=None, refused=refused):
            return refused
        case Started(step=step, resumed_from=path, refused=refused):
            return [*refused, f"resumed at step {step} from {path}"]
        case Checkpointed(step=step, path=path):
            return [f"checkpoint of step {step} in {path}"]
        case NotCheckpointed(reason=reason):
            return [f"{reason}; training continues, and the next checkpoint will be attempted"]
    return []


NOT_TRAINED = (
    "the script has ended without gyrostat.init and a loop over job.steps: it ran {}, as it is, and gyrostat has trained "
    "nothing; see docs/howto/from-ddp.md for what a script needs"
)


def summary(outcome: Outcome) -> list[str]:
    """The last lines of a run that finished or was stopped."""
    lines = []
    if outcome.losses:
        lines.append(
            f"{_steps(outcome)}, {plural(outcome.samples, 'sample')} in {outcome.seconds:.1f} s "
            f"({outcome.throughput:,.0f} samples/s), {_size(outcome)}"
        )
    if outcome.digest is not None:
        lines.append(f"digest {outcome.digest}")
    elif outcome.stopped_by is not None:
        how = "by request" if outcome.stop_requested else f"by {signal.Signals(outcome.stopped_by).name}"
        where = (
            f"; its checkpoint is {outcome.checkpoints[-1].path}"
            if outcome.checkpoints and outcome.stopped
            else ""
        )
        lines.append(f"stopped {how} after step {outcome.steps}{where}")
    elif outcome.ok and not outcome.trained:
        lines.append(NOT_TRAINED.format(_times(outcome.workers)))
    return lines


def _times(workers: int) -> str:
    return "once" if workers == 1 else f"{workers} times, once on each worker"


def _steps(outcome: Outcome) -> str:
    what = "step" if outcome.servers is None else "update"
    if outcome.reported_from:
        return f"{what}s {outcome.reported_from + 1:,} to {outcome.steps:,}"
    return plural(outcome.steps, what)


def _size(outcome: Outcome) -> str:
    if outcome.servers is not None:
        return server_job_size(outcome.workers, outcome.servers)
    return f"{plural(outcome.virtual_workers, 'virtual worker')} on {outcome.workers}"


def server_job_size(workers: int, servers: int) -> str:
    return f"{plural(workers, 'worker')} and {plural(servers, 'server')}"


class PlainDisplay:
    """Lines, for a file or a pipe."""

    def __init__(
        self,
        placement: Placement,
        *,
        quiet: bool,
        clock: Clock = time.monotonic,
        write_report: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        """`write_report` is called with the outcome, before it is shown."""
        self.quiet, self._write_report = quiet, write_report
        self.progress = ProgressText()
        self.workers = placement.workers
        self._clock = clock
        self._printed_at = clock()

    def heard(self, worker: int, message: FromWorker) -> None:
        if isinstance(message, StepReports):
            self.progress.add(message.steps)
        elif isinstance(message, Logged):
            self.show(None, OutputStream.STDOUT, str(message))
        for line in news(message):
            self.note(line)

    def printed(self, worker: int, stream: OutputStream, line: str) -> None:
        if logs.is_json_record(line):  # stays one JSON object per line
            print(line, file=sys.stderr, flush=True)
        else:
            self.show(worker, stream, line)

    def resized(self, done: ReconfigurationDone) -> None:
        self.workers = max([self.workers, *(member + 1 for member in done.joined)])
        workers = plural(done.after, "worker")
        what = f"{workers} instead of {done.before}"
        if done.change.counts is not None:
            what = f"other shares among {workers}"
        self.note(
            f"from step {done.step} on {what}, after a pause of {done.paused * 1e3:.0f} ms ({done.change.reason})"
        )

    def worker_died(self, worker: int, how: str, step: int, evidence: Sequence[str]) -> None:
        """`recovered` or `refused` says it, with the consequence."""

    def recovered(self, recovery: SurvivorsGoOn) -> None:
        workers = plural(recovery.after, "worker")
        self.note(
            f"{recovery.reason} in step {recovery.step}; {workers} went on after {recovery.paused * 1e3:.0f} ms, "
            f"{plural(recovery.redone, 'micro-batch', 'micro-batches')} redone, nothing lost"
        )
        if recovery.waits:
            self.note(
                f"{workers}: fewer than --min-workers; the job keeps its state and waits for more workers"
            )

    def happened(self, event: Event) -> None:
        """Of a job with parameter servers."""
        if event.kind is EventKind.RESIZE and event.role is ProcessRole.WORKER:
            self.workers = max(self.workers, event.to_workers or 0)
        self.note(event.reason)
        if event.kind is EventKind.FAILURE:
            for line in event.evidence:
                self.note(f"    {line}")

    def stood_still(self, found: Standstill) -> None:
        for line in (str(found), *found.stack_lines()):
            self.note(line)

    def died(self, failure: JobFailure, wait: float, checkpoint: int | None) -> None:
        when = f" in {wait:.0f} s" if wait else ""
        restarting = f"restarting from step {checkpoint}"
        how = "begins again from the start: no checkpoint" if checkpoint is None else restarting
        self.note(f"{failure}; {how}{when}")
        for line in failure.evidence.describe():
            self.note(line)

    def noticed(self, straggler: Straggler) -> None:
        self.note(str(straggler))

    def refused(self, change: Reconfiguration, reason: str) -> None:
        self.note(f"not resized to {plural(change.workers, 'worker')}: {reason}")

    def ticked(self) -> float | None:
        if self.quiet:
            return None
        now = self._clock()
        if now - self._printed_at >= _PLAIN_EVERY_S:
            self._printed_at = now
            if self.progress.steps:
                self.note(", ".join(self.progress.parts()))
        return self._printed_at + _PLAIN_EVERY_S - now

    def over(self, outcome: Outcome) -> None:
        try:
            self._write_report(outcome)
        except OSError as error:
            self.note(f"the report cannot be written: {error}")
        if outcome.failure is None:
            for line in summary(outcome):
                self.note(line)
            return
        for line in (outcome.failure.traceback or "").splitlines():
            self.show(outcome.failure.worker, OutputStream.STDERR, line)
        for line in outcome.failure.evidence.describe():
            self.note(line)

    def note(self, line: str) -> None:
        """A line of gyrostat itself."""
        if not self.quiet:
            logs.note(line)

    def show(self, worker: int | None, stream: OutputStream, line: str) -> None:
        """A line of a worker, or of `job.log` (None)."""
        file = sys.stdout if stream is OutputStream.STDOUT else sys.stderr
        print(f"{self.name(worker)} │ {line}", file=file, flush=True)

    def name(self, worker: int | None) -> str:
        """Padded to one width."""
        width = len(f"worker {self.workers - 1}")
        return ("job" if worker is None else f"worker {worker}").ljust(width)


class LiveDisplay(PlainDisplay):
    """A live line at the bottom of a terminal; all other output scrolls above it."""

    def __init__(
        self,
        placement: Placement,
        *,
        quiet: bool = False,
        clock: Clock = time.monotonic,
        console: Console | None = None,
        servers: int | None = None,
    ) -> None:
        """`servers`: of a job with parameter servers."""
        super().__init__(placement, quiet=quiet, clock=clock)
        self._servers = servers
        self._console = console or Console(stderr=True, highlight=False)
        self._virtual_workers = placement.virtual_workers
        self._size = f"{placement.virtual_workers} on {plural(placement.workers, 'worker')}"
        if servers is not None:
            self._size = server_job_size(placement.workers, servers)
        self._began = self._drawn_at = clock()
        self._live = Live(
            "", console=self._console, auto_refresh=False, transient=True, redirect_stdout=False
        )
        self._live.start()

    def ticked(self) -> float | None:
        now = self._clock()
        if now - self._drawn_at >= _REFRESH_S:
            self._drawn_at = now
            self._live.update(self._line(now), refresh=True)
        return _REFRESH_S

    def resized(self, done: ReconfigurationDone) -> None:
        super().resized(done)
        self._size = f"{self._virtual_workers} on {plural(done.after, 'worker')}"

    def happened(self, event: Event) -> None:
        super().happened(event)
        if event.kind is EventKind.RESIZE and event.to_workers is not None:
            if event.role is ProcessRole.SERVER:
                self._servers = event.to_workers
            else:
                self.workers = event.to_workers
            self._size = server_job_size(self.workers, self._servers or 0)

    def over(self, outcome: Outcome) -> None:
        self.close()
        super().over(outcome)

    def close(self) -> None:
        """Restore the terminal."""
        self._live.stop()

    def note(self, line: str) -> None:
        self._console.print(Text(f"gyrostat: {line}", style="dim"), soft_wrap=True)

    def show(self, worker: int | None, stream: OutputStream, line: str) -> None:
        if stream is OutputStream.STDOUT and not sys.stdout.isatty():
            super().show(worker, stream, line)
            return
        colour = "bold" if worker is None else _COLOURS[worker % len(_COLOURS)]
        self._console.print(
            Text.assemble((f"{self.name(worker)} │ ", colour), Text.from_ansi(line)), soft_wrap=True
        )

    def _line(self, now: float) -> Text:
        minutes, seconds = divmod(int(now - self._began), 60)
        parts = [*self.progress.parts(), self._size, f"{minutes}:{seconds:02}"]
        curve = sparkline(self.progress.curve.points())
        line = Text(" · ".join(parts), style="bold", no_wrap=True, overflow="ellipsis", end="")
        return line.append(f"  {curve}", style="not bold green")
