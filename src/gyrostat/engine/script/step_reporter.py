"""What the main worker reports to the supervisor: steps, metrics of the script, digests for `verify`.

The other workers remember what it has reported lately. If it dies, the one that runs virtual worker 0 from then on repeats
that, because it may not have left the dead process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from gyrostat.core.job import Probe
from gyrostat.engine.script.tracked import Tracked
from gyrostat.engine.state.digest import digest_of, tensor_digests
from gyrostat.engine.supervisor import Supervisor
from gyrostat.engine.trace import now
from gyrostat.engine.training.generation import CurrentGeneration
from gyrostat.engine.training.reports import PassOutcome

_DELIVERED_AFTER_NS = 10_000_000_000
"""A report leaves the process of the main worker within this time."""


class StepReporter:
    """Collects what the passes of a step give, and reports the step at the boundary that follows."""

    def __init__(
        self, generation: CurrentGeneration, tracked: Tracked, supervisor: Supervisor, probe: Probe | None
    ) -> None:
        self._generation, self._tracked, self._supervisor = generation, tracked, supervisor
        self._probe = probe
        self._loss: float | None = None
        self._busy: tuple[float, ...] = ()  # of each worker, in all passes of the step
        self._samples: int | None = 0
        self._epoch: int | None = None  # of a step that is complete but not yet reported
        self._update_began = 0
        self._recent: deque[tuple[int, Callable[[], None]]] = deque()  # reports, with the time of each
        self._repeat = False
        self._main_lost = False

    def begin_step(self, samples: int | None) -> None:
        """`samples`: of all virtual workers; None if that is known only after the first pass."""
        self._samples = samples

    def pass_done(self, outcome: PassOutcome, *, first: bool) -> None:
        if first:
            self._loss, self._busy = outcome.loss, outcome.busy
        else:
            self._loss = outcome.loss if self._loss is None else self._loss  # the first pass was a survey
            self._busy = tuple(map(sum, zip(self._busy, outcome.busy, strict=False)))
        if self._samples is None:
            self._samples = outcome.samples
        self._update_began = now()

    def step_done(self, epoch: int) -> None:
        self._epoch = epoch

    def recovered(self, main_lost: bool, wait_at: int | None) -> None:
        """Survivors of a death go on. `main_lost`: the worker that reported for the job is dead."""
        self._repeat |= main_lost
        self._main_lost |= main_lost

    def watch_main(self) -> None:
        """From now on `main_lost` returns whether the main worker dies."""
        self._main_lost = False

    @property
    def main_lost(self) -> bool:
        return self._main_lost

    def trace_update(self, step: int) -> None:
        """At the boundary of `step`: the update of the step before has ended."""
        if self._epoch is not None:
            self._generation.group.tracer.add("update", self._update_began, now(), step=step - 1)

    def flush(self, step: int) -> bool:
        """At the boundary of `step`. Returns whether this worker reports for the job in the place of a dead one."""
        epoch, self._epoch = self._epoch, None
        took_over, self._repeat = self._repeat and self._generation.is_main, False
        if took_over:
            for _, report in self._recent:
                report()
        if epoch is not None:
            self._report(
                partial(self._supervisor.stepped, step, epoch, self._loss, self._samples or 0, self._busy)
            )
            self._report_digests(step)
        return took_over

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """`job.log`."""
        values = {name: float(value) for name, value in metrics.items()}
        self._report(partial(self._supervisor.logged, step, values))

    def _report_digests(self, step: int) -> None:
        probe = self._probe
        if probe is None or step < probe.first or (probe.last is not None and step > probe.last):
            return
        if step % probe.every == 0 and self._generation.is_main:
            leaves = tensor_digests(**self._tracked.objects)
            self._supervisor.probed(step, digest_of(leaves), leaves if probe.tensors else {})

    def _report(self, report: Callable[[], None]) -> None:
        """The main worker makes the report. The others remember it for a while."""
        at = now()
        while self._recent and at - self._recent[0][0] > _DELIVERED_AFTER_NS:
            self._recent.popleft()
        self._recent.append((at, report))
        if self._generation.is_main:
            report()
