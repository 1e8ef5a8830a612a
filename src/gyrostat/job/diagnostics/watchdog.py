"""Training stands still: whose code hangs? Decided purely, from the stack of every worker.

When no step has been completed for some time, every worker is asked for its stack. That comes from a signal handler in C
(`stacks`), so it comes even if a worker is stuck in C code and holds the interpreter's lock. Workers whose script waits within
the engine wait for others; a worker that hangs is one whose innermost frame, libraries aside, is the script's own, is in
`step.backward`, or waits for data, which is the script's, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from gyrostat.core.errors import UsageError

_PACKAGE = str(Path(__file__).resolve().parents[2])
_LIBRARIES = re.compile(r"<frozen |/(site|dist)-packages/|/lib/python3\.\d+/")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_SCRIPTS_THREAD = f'File "{_PACKAGE}/job/worker.py"'
COLLECT_S = 3.0


class Action(StrEnum):
    """What is done when training stands still."""

    REPORT = "report"
    END = "end"
    """Whoever hangs is killed; the job then does what it does when a worker dies."""


@dataclass(frozen=True, kw_only=True)
class WatchdogPolicy:
    seconds: float
    """Training stands still if no step is completed for so long. Evaluation and the script's other work count."""
    action: Action = Action.REPORT

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise UsageError(f"a watchdog waits for some seconds, more than 0; got {self.seconds}")


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """What was found."""

    seconds: float
    """For which no step was completed."""
    stacks: Mapping[int, str]
    """Of every worker that could be asked."""
    hanging: Mapping[int, str]
    """Where, for those that hang."""
    ends: bool
    """These are ended."""

    def __str__(self) -> str:
        said = f"no step was completed for {self.seconds:g} s"
        if not self.hanging:
            return f"{said}; no worker's stack is in the script's code"
        where = ", ".join(f"worker {member} hangs at {place}" for member, place in self.hanging.items())
        return f"{said}: {where}{', and is ended' if self.ends else ''}"

    def told(self) -> list[str]:
        """All stacks, in lines."""
        return [
            line
            for member, stack in sorted(self.stacks.items())
            for line in (f"stack of worker {member}:", *(f"    {line}" for line in stack.splitlines()))
        ]


@dataclass
class Watchdog:
    """Waits for steps. Barks once per standstill."""

    policy: WatchdogPolicy
    _since: float | None = None
    _asked_at: float | None = None
    _asked: frozenset[int] = frozenset()
    _stacks: dict[int, str] = field(default_factory=dict)
    _barked: bool = False

    def progress(self, now: float) -> None:
        """Training has begun, or a step is complete. Stacks that were asked for are still worth knowing."""
        self._since, self._barked = now, False

    def rest(self) -> None:
        """Nothing is to be expected, until there is progress again."""
        self._since = self._asked_at = None

    def asks(self, members: Sequence[int], now: float) -> bool:
        """Whether these workers are to be asked for their stacks now."""
        if self._since is None or self._barked or now < self._since + self.policy.seconds:
            return False
        self._barked, self._asked_at = True, now
        self._asked, self._stacks = frozenset(members), {}
        return True

    def answered(self, member: int, stack: str) -> None:
        if self._asked_at is not None and member in self._asked:
            self._stacks[member] = stack

    def finding(self, now: float) -> Standstill | None:
        """What the stacks say, when all have come that will."""
        if self._asked_at is None or (self._asked - self._stacks.keys() and now < self._asked_at + COLLECT_S):
            return None
        self._asked_at = None
        found = hanging(self._stacks)
        ends = self.policy.action is Action.END and self._barked and bool(found)
        return Standstill(seconds=self.policy.seconds, stacks=dict(self._stacks), hanging=found, ends=ends)

    def deadline(self) -> float | None:
        if self._asked_at is not None:
            return self._asked_at + COLLECT_S
        return None if self._since is None or self._barked else self._since + self.policy.seconds


def hanging(stacks: Mapping[int, str]) -> dict[int, str]:
    """Where the script's own code, or what it asked for, runs."""
    places = {member: _place(stack) for member, stack in sorted(stacks.items())}
    return {member: place for member, place in places.items() if place is not None}


def _place(stack: str) -> str | None:
    """None: it waits for other workers."""
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
    """Of all threads the one that runs the script; if its stack is too deep to tell, the one that took the signal."""
    threads = stack.split("\n\n")
    for thread in threads:
        if _SCRIPTS_THREAD in thread and " in run_program" in thread:
            return thread
    return next((thread for thread in threads if thread.lstrip().startswith("Current thread")), "")


def _frames(thread: str) -> list[tuple[str, str, str]]:
    return [(file, line, function) for file, line, function in _FRAME.findall(thread)]
