"""Workers of a server job that do not answer (`heartbeat`), and a job that makes no progress (`watchdog`).

The sibling of `job.control.liveness`: here all workers are looked at, also one that is alone, for it may hold the last shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gyrostat.job.control.failure_policy import FailurePolicy
from gyrostat.job.diagnostics.heartbeat import Heartbeats
from gyrostat.job.diagnostics.watchdog import Standstill, Watchdog
from gyrostat.job.processes.protocol import FromWorker, Stacks


class WorkerLiveness:
    def __init__(self, policy: FailurePolicy) -> None:
        self._heartbeats = Heartbeats(policy.heartbeat_timeout_s)
        self._watchdog = Watchdog(policy.watchdog) if policy.watchdog is not None else None

    def heard(self, member: int, message: FromWorker, now: float) -> None:
        self._heartbeats.received(member, now)
        if isinstance(message, Stacks) and self._watchdog is not None:
            self._watchdog.add_stack(member, message.text)

    def progressed(self, now: float) -> None:
        """Training has begun, or an update was made."""
        if self._watchdog is not None:
            self._watchdog.progress(now)

    def check(self, living: Sequence[int], now: float) -> tuple[bool, Mapping[int, str]]:
        """Whether to ping all workers now, and those that have not answered in time, with what to say of them."""
        pings, silent = self._heartbeats.check(living, now)
        why = f"was lost: silent for {self._heartbeats.timeout_s:g} s"
        return pings, dict.fromkeys(silent, why)

    def asks_for_stacks(self, living: Sequence[int], now: float) -> bool:
        return self._watchdog is not None and self._watchdog.requests_stacks(living, now)

    def standstill(self, now: float) -> tuple[Standstill, Mapping[int, str]] | None:
        """No update was made for too long; and the workers to kill for it, with what to say of them."""
        found = self._watchdog.finding(now) if self._watchdog is not None else None
        if found is None:
            return None
        hanging = found.hanging if found.ends else {}
        why = {member: f"was ended by the watchdog: it hung at {place}" for member, place in hanging.items()}
        return found, why

    def deadline(self) -> float | None:
        times = (self._heartbeats.deadline(), self._watchdog.deadline() if self._watchdog else None)
        return min((each for each in times if each is not None), default=None)
