"""Workers that do not answer (`heartbeat`), and jobs that make no progress (`watchdog`), for the leader of a job."""

from __future__ import annotations

from gyrostat.job.control.attempt import Attempt
from gyrostat.job.control.executor import WorkerExecutor
from gyrostat.job.control.run_request import RunRequest
from gyrostat.job.diagnostics.heartbeat import Heartbeats
from gyrostat.job.diagnostics.watchdog import Standstill, Watchdog
from gyrostat.job.processes.protocol import FromWorker, Stacks, Started, StepReports, WorkerEnded, WorkerId


class Liveness:
    def __init__(self, request: RunRequest, executor: WorkerExecutor) -> None:
        self._executor = executor
        self._heartbeats = Heartbeats(request.failures.heartbeat_timeout_s)
        self._watchdog = Watchdog(watchdog) if (watchdog := request.failures.watchdog) is not None else None

    @property
    def heartbeat_timeout_s(self) -> float:
        return self._heartbeats.timeout_s

    def heard(self, member: int, message: FromWorker, now: float) -> None:
        self._heartbeats.received(member, now)
        if self._watchdog is None:
            return
        match message:
            case Started() | StepReports():
                self._watchdog.progress(now)
            case Stacks(text=text):
                self._watchdog.add_stack(member, text)
            case WorkerEnded(left=False):
                self._watchdog.pause()

    def check(self, attempt: Attempt, now: float) -> tuple[tuple[int, ...], list[int]]:
        """The workers to ping now, and those that have not answered in time."""
        expected = attempt.coordinator.generations.expected
        if not attempt.coordinator.training or attempt.tracker.ends or len(expected) == 1:
            expected = ()  # nobody waits for a worker that starts, ends, or is alone
        # How long an agent may be away is not for the heartbeat to decide.
        expected = tuple(
            member for member in expected if self._executor.reaches(WorkerId(attempt.number, member))
        )
        asks, silent = self._heartbeats.check(expected, now)
        return expected if asks else (), silent

    def asks_for_stacks(self, attempt: Attempt, now: float) -> tuple[int, ...]:
        """The workers whose stacks are needed now."""
        living = attempt.tracker.living
        return living if self._watchdog is not None and self._watchdog.requests_stacks(living, now) else ()

    def standstill(self, now: float) -> Standstill | None:
        """No step has been completed for too long."""
        return self._watchdog.finding(now) if self._watchdog is not None else None

    def rest(self) -> None:
        """All workers have ended."""
        self._heartbeats.pause()
        if self._watchdog is not None:
            self._watchdog.pause()

    def deadlines(self) -> tuple[float | None, float | None]:
        watchdog = self._watchdog.deadline() if self._watchdog is not None else None
        return self._heartbeats.deadline(), watchdog
