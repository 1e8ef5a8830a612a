"""From evidence to likely causes, the most likely first. Pure.

The kind of difference limits the possible causes:

    the same configuration twice             nothing that gyrostat controls
    only after save and resume               state that is not in checkpoints
    between placements, each one repeatable  something that virtual workers of one worker share
    between the workers of one run           a value that only one of them has
    only from plain DDP                      something that DDP does not handle

Among these, causes that are supported by lines of the script come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gyrostat.job.verify.causes import KNOWN, Key
from gyrostat.job.verify.compare import DifferenceKind, Scope
from gyrostat.job.verify.suspects import Hint, Suspect

_MAX_LINES = 5
_PLAIN = {Key.THREADS, Key.UNTRACKED_SCHEDULE}
"""Causes that the kind of difference alone supports."""


@dataclass(frozen=True, kw_only=True)
class DifferenceEvidence:
    """The facts about a difference between two runs."""

    scope: Scope
    kind: DifferenceKind
    repeatable: bool
    """Both configurations gave the same result when they were run again."""
    workers_differ: bool = False
    """Workers of one of the runs did not hold the same state."""
    tensors: tuple[str, ...] = ()
    """Those that differ in the first differing step."""
    threads: int = 1
    repeatable_with_one_thread: bool | None = None
    """Tested if there are several threads and the runs are not repeatable."""
    hash_seed_fixed: bool = True
    suspects: tuple[Suspect, ...] = ()


@dataclass(frozen=True)
class LikelyCause:
    """A likely cause, and the lines of the script that support it."""

    key: Key
    lines: tuple[Suspect, ...] = ()

    @property
    def supported(self) -> bool:
        """There is evidence for this cause in particular."""
        return bool(self.lines) or self.key in _PLAIN

    @property
    def says(self) -> str:
        return KNOWN[self.key].says

    @property
    def do(self) -> str:
        return KNOWN[self.key].do


def diagnose(evidence: DifferenceEvidence) -> tuple[LikelyCause, ...]:
    """The causes that fit, the most likely first. Never empty."""
    causes = [_with_lines(key, evidence.suspects) for key in _fitting(evidence)]
    return tuple(sorted(causes, key=lambda cause: (cause.key not in _PLAIN, not cause.supported)))


def _fitting(evidence: DifferenceEvidence) -> Iterator[Key]:
    hints = {suspect.hint for suspect in evidence.suspects}
    if not evidence.repeatable:
        yield from _not_repeatable(evidence)
    elif evidence.workers_differ:
        yield from (Key.LOCAL_VALUE, Key.WORKER_CODE, Key.SHARED_STREAM, Key.SHARED_OBJECT)
    elif evidence.kind is DifferenceKind.STEPS:
        yield Key.STEP_COUNT
    elif evidence.scope is Scope.RESUME:
        if _only_settings(evidence.tensors):
            yield Key.UNTRACKED_SCHEDULE
        if Hint.COUNTER in hints:
            yield Key.COUNTER
        if Hint.OWN_GENERATOR in hints:
            yield Key.GENERATOR_NOT_SAVED
        yield Key.UNTRACKED_STATE
    elif evidence.scope is Scope.PLACEMENT:
        yield from (Key.SHARED_STREAM, Key.SHARED_OBJECT, Key.WORKER_CODE, Key.LOCAL_VALUE)
    else:
        yield Key.NOT_THROUGH_MODULE
        if Hint.COMPILE in hints:
            yield Key.COMPILE


def _not_repeatable(evidence: DifferenceEvidence) -> Iterator[Key]:
    if evidence.threads > 1 and evidence.repeatable_with_one_thread:
        yield Key.THREADS
        return
    yield Key.UNSEEDED_RNG
    if not evidence.hash_seed_fixed:
        yield Key.HASH_SEED
    yield Key.OUTSIDE_WORLD


def _with_lines(key: Key, suspects: Sequence[Suspect]) -> LikelyCause:
    """With the lines that support it, in the order of the hints."""
    lines = [suspect for hint in KNOWN[key].hints for suspect in suspects if suspect.hint is hint]
    return LikelyCause(key, tuple(lines[:_MAX_LINES]))


def _only_settings(tensors: Sequence[str]) -> bool:
    """Whether only settings of an optimizer differ, such as its learning rate."""
    return bool(tensors) and all(".param_groups." in name for name in tensors)
