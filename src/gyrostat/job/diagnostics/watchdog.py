"""The watchdog: finds the worker whose code hangs when no step completes. Pure, from the stacks of all workers.

When no step has completed for some time, the stacks of every worker are requested. A signal handler in C writes them
(`stacks`), so that works also for a worker that hangs in C code and holds the interpreter's lock. A worker that waits inside
the engine waits for others. A worker hangs if its innermost frame outside libraries is in the script, in `step.backward`, or
waits for data, which the script provides.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from gyrostat.core.errors import UsageError

logger = logging.getLogger(__name__)

_PACKAGE = str(Path(__file__).resolve().parents[2])
_LIBRARIES = re.compile(r"<frozen |/(site|dist)-packages/|/lib/python3\.\d+/")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_SCRIPT_THREAD = f'File "{_PACKAGE}/job/processes/worker.py"'
COLLECT_S = 3.0
"""Seconds to wait for stacks."""


class Action(StrEnum):
    """The reaction when no step completes."""

    REPORT = "report"
    END = "end"
    """Workers that hang are killed; then the job recovers as from any lost worker."""


@dataclass(frozen=True, kw_only=True)
class WatchdogPolicy:
    seconds: float
    """The watchdog acts if no step completes for this long. Evaluation and other work of the script count, too."""
    action: Action = Action.REPORT

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise UsageError(f"the watchdog's seconds must be more than 0; got {self.seconds}")


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """No step completes: the result of the watchdog's diagnosis."""

    seconds: float
    """The seconds for which no step completed."""
    stacks: Mapping[int, str]
    """By worker, for every worker that wrote its stacks."""
    hanging: Mapping[int, str]
    """Where each hanging worker hangs."""
    ends: bool
    """The hanging workers are killed."""

    def __str__(self) -> str:
        summary = f"no step was completed for {self.seconds:g} s"
        if not self.hanging:
            return f"{summary}; no worker hangs in the script's code, so all wait inside gyrostat: see the stacks"
        where = ", ".join(f"worker {member} hangs at {place}" for member, place in self.hanging.items())
        return f"{summary}: {where}{', and is killed' if self.ends else ''}"

    def stack_lines(self) -> list[str]:
        """The stacks of all workers, as lines to print."""
        return [
            line
            for member, stack in sorted(self.stacks.items())
            for line in (f"stack of worker {member}:", *(f"    {line}" for line in stack.splitlines()))
        ]


@dataclass
class Watchdog:
    """Waits for steps. Reports each standstill once."""

    policy: WatchdogPolicy
    _since: float | None = None
    _requested_at: float | None = None
    _requested: frozenset[int] = frozenset()
    _stacks: dict[int, str] = field(default_factory=dict)
    _reported: bool = False

    def progress(self, now: float) -> None:
        """Training has begun, or a step has completed. Requested stacks are still collected."""
        self._since, self._reported = now, False

    def pause(self) -> None:
        """Expect no steps until `progress` is called again."""
        self._since = self._requested_at = None

    def requests_stacks(self, members: Sequence[int], now: float) -> bool:
        """Whether to request the stacks of these workers now."""
        if self._since is None or self._reported or now < self._since + self.policy.seconds:
            return False
        self._reported, self._requested_at = True, now
        self._requested, self._stacks = frozenset(members), {}
        logger.info(
            "watchdog: no step was completed for %g s; requests the stacks of all workers",
            self.policy.seconds,
        )
        return True

    def add_stack(self, member: int, stack: str) -> None:
        if self._requested_at is not None and member in self._requested:
            self._stacks[member] = stack

    def finding(self, now: float) -> Standstill | None:
        """The diagnosis, when all stacks have arrived or the time to collect them is over; None before."""
        if self._requested_at is None or (
            self._requested - self._stacks.keys() and now < self._requested_at + COLLECT_S
        ):
            return None
        self._requested_at = None
        found = hanging(self._stacks)
        ends = self.policy.action is Action.END and self._reported and bool(found)
        standstill = Standstill(
            seconds=self.policy.seconds, stacks=dict(self._stacks), hanging=found, ends=ends
        )
        logger.info("watchdog: %s", standstill)
        return standstill

    def deadline(self) -> float | None:
        if self._requested_at is not None:
            return self._requested_at + COLLECT_S
        return None if self._since is None or self._reported else self._since + self.policy.seconds


def hanging(stacks: Mapping[int, str]) -> dict[int, str]:
    """Where each worker hangs in the script's code, or in what it called."""
    places = {member: _place(stack) for member, stack in sorted(stacks.items())}
    return {member: place for member, place in places.items() if place is not None}


def _place(stack: str) -> str | None:
    """None: the worker waits for other workers."""
    for file, line, function in _frames(_script_thread(stack)):
        place = f"{file}:{line} in {function}"
        if file.startswith(f"{_PACKAGE}/data/"):
            return f"{place} (waiting for data)"
        if file.startswith(_PACKAGE):
            return f"{place} (in step.backward)" if function == "backward" else None
        if not _LIBRARIES.search(file):
            return place
    return None


def _script_thread(stack: str) -> str:
    """The thread that runs the script; if its stack is too deep to tell, the one that received the signal."""
    threads = stack.split("\n\n")
    for thread in threads:
        if _SCRIPT_THREAD in thread and " in run_program" in thread:
            return thread
    return next((thread for thread in threads if thread.lstrip().startswith("Current thread")), "")


def _frames(thread: str) -> list[tuple[str, str, str]]:
    return [(file, line, function) for file, line, function in _FRAME.findall(thread)]
