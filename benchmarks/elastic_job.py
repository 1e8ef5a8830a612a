"""A job that runs while a benchmark sends it requests: its steps as they complete, its control socket, the cost of a change.

The launcher runs in a thread of the benchmark. What a change costs is read from the times of steps, not from what the engine
says of itself: boundary s is where the generation changes, so the step after it takes longer by all that training stood
still for, the newcomers' first steps included.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from gyrostat.core.placement import Placement
from gyrostat.job.control.client import JobClient
from gyrostat.job.control.failure_policy import FailurePolicy
from gyrostat.job.control.observer import NullObserver
from gyrostat.job.control.requests import RequestResult
from gyrostat.job.control.run_request import WorkerOverrides
from gyrostat.job.diagnostics.stragglers import StragglerPolicy
from gyrostat.job.launcher import RunRequest, run_job
from gyrostat.job.processes.protocol import FromWorker, Program, StepReport, StepReports
from gyrostat.job.processes.start import WorkerSource

SCRIPT = Path(__file__).resolve().parent / "side_elastic.py"
WIDE = ()
"""25 million parameters."""
SMALL = ("--layers", "2", "--width", "64")
"""Where only time counts."""
_AFTER = 5
"""Steps after a change that say how long steps are now."""


class _Enough(Exception):
    """The benchmark has seen what it wanted."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one change, in seconds."""

    blocked: float
    """By which the step after it took longer than those that followed."""
    step: float
    """What steps take since."""
    longest: float
    """The longest time between two steps, from the request on."""
    to_first_step: float
    """From the request until the first step on the new size was complete."""
    reply: RequestResult


class ElasticJob(NullObserver):
    """Use it as a context: it runs until then."""

    def __init__(
        self,
        source: WorkerSource,
        *,
        virtual_workers: int,
        workers: int,
        paced: Sequence[float] = (),
        args: Sequence[str] = WIDE,
        placement: Sequence[int] | None = None,
        stragglers: StragglerPolicy | None = None,
        heartbeat_timeout_s: float = 30.0,
    ) -> None:
        """`placement`: how many virtual workers each worker runs, if not as even as can be."""
        even = Placement.even(virtual_workers, workers)
        self._source = source
        self._request = RunRequest(
            program=Program(name=str(SCRIPT), args=tuple(args)),
            placement=even if placement is None else Placement.from_counts(placement),
            failures=FailurePolicy(
                stragglers=stragglers or StragglerPolicy(), heartbeat_timeout_s=heartbeat_timeout_s
            ),
            overrides=WorkerOverrides(paced=paced),
            name=f"benchmark-{os.getpid()}",
        )
        self._steps: dict[int, StepReport] = {}
        self._news = threading.Condition()
        self._over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory()
        os.environ["GYROSTAT_RUNTIME_DIR"] = self._directory.name
        self._thread.start()
        self.wait_for(1)
        assert self._request.name is not None
        self.job_client = JobClient(self._request.name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        if hasattr(self, "caller"):
            self.job_client.close()
        self._thread.join()
        self._directory.cleanup()

    def _run(self) -> None:
        try:
            run_job(self._request, parent=self._source, observer=self).check()
        except _Enough:
            pass
        except BaseException as error:
            self._error = error
        finally:
            with self._news:
                self._over = True
                self._news.notify_all()

    def heard(self, worker: int, message: FromWorker) -> None:
        if isinstance(message, StepReports):
            with self._news:
                self._steps |= {step.step: step for step in message.steps}
                self._news.notify_all()

    def ticked(self) -> float | None:
        if self._over:
            raise _Enough
        return 0.1

    # What a benchmark wants to know.

    @property
    def last_step(self) -> int:
        with self._news:
            return max(self._steps, default=0)

    def wait_for(self, step: int) -> None:
        """Until step `step`, and all before it, are complete and known here."""
        with self._news:
            self._news.wait_for(lambda: self._over or self._knows(step))
            if self._error is not None:
                raise self._error
            if not self._knows(step):
                raise RuntimeError(f"the job ended before step {step}")

    def _knows(self, step: int) -> bool:
        return bool(self._steps) and all(n in self._steps for n in range(min(self._steps), step + 1))

    def times(self, first: int, last: int) -> list[float]:
        """How long steps first … last took, one by one."""
        self.wait_for(last)
        with self._news:
            return [
                later.at - earlier.at
                for earlier, later in pairwise(self._steps[n] for n in range(first - 1, last + 1))
            ]

    def samples(self, since: float, until: float) -> float:
        """Made in this time; of a step that was under way at either end, the share that falls into it."""
        with self._news:
            steps = [self._steps[n] for n in sorted(self._steps)]
        return sum(
            step.samples * max(0.0, min(step.at, until) - max(before.at, since)) / (step.at - before.at)
            for before, step in pairwise(steps)
        )

    def wait_until(self, moment: float) -> None:
        """Let it train."""
        with self._news:
            self._news.wait_for(lambda: self._over, timeout=max(0.0, moment - time.monotonic()))
        self.wait_for(1)  # raises if it has failed

    def completed_at(self, step: int) -> float:
        self.wait_for(step)
        with self._news:
            return self._steps[step].at

    def steady(self, steps: int = _AFTER) -> float:
        """The median of some steps from now on."""
        first = self.last_step + 2
        return statistics.median(self.times(first, first + steps))

    def scale(self, workers: int) -> Cost:
        """Change the size, and see what that cost."""
        asked = time.monotonic()
        before = self.last_step
        reply = self.job_client.scale(workers)
        if not reply.done:
            raise RuntimeError(reply.text)
        boundary = reply.step
        after = self.times(boundary + 1, boundary + 1 + _AFTER)
        step = statistics.median(after[1:])
        return Cost(
            blocked=after[0] - step,
            step=step,
            longest=max(self.times(max(before, 2), boundary + 1 + _AFTER)),
            to_first_step=self.completed_at(boundary + 1) - asked,
            reply=reply,
        )
