"""From evidence to likely causes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gyrostat.job.verify.causes import KNOWN, Key
from gyrostat.job.verify.compare import DifferenceKind, Scope
from gyrostat.job.verify.diagnosis import DifferenceEvidence, LikelyCause, diagnose
from gyrostat.job.verify.suspects import Hint, Suspect

PLACEMENT = DifferenceEvidence(
    scope=Scope.PLACEMENT, kind=DifferenceKind.STATE, repeatable=True, tensors=("model.weight",)
)
RESUME = replace(PLACEMENT, scope=Scope.RESUME)
DDP = replace(PLACEMENT, scope=Scope.DDP)
RANDOM = replace(PLACEMENT, repeatable=False)
SETTINGS = ("optimizer.param_groups.0.lr", "optimizer.param_groups.1.betas.0")


def suspect(hint: Hint, line: int = 1) -> Suspect:
    return Suspect("train.py", line, str(hint), hint)


def keys(evidence: DifferenceEvidence, *hints: Hint) -> list[Key]:
    return [cause.key for cause in diagnose(replace(evidence, suspects=tuple(map(suspect, hints))))]


@pytest.mark.parametrize(
    ("evidence", "hints", "expected"),
    [
        (RANDOM, [], [Key.UNSEEDED_RNG, Key.OUTSIDE_WORLD]),
        (RANDOM, [Hint.OWN_GENERATOR], [Key.UNSEEDED_RNG, Key.OUTSIDE_WORLD]),
        (
            replace(RANDOM, scope=Scope.DDP, kind=DifferenceKind.STEPS),
            [],
            [Key.UNSEEDED_RNG, Key.OUTSIDE_WORLD],
        ),
        (
            replace(RANDOM, hash_seed_fixed=False),
            [],
            [Key.UNSEEDED_RNG, Key.HASH_SEED, Key.OUTSIDE_WORLD],
        ),
        (replace(RANDOM, threads=2, repeatable_with_one_thread=True), [], [Key.THREADS]),
        (
            replace(RANDOM, threads=2, repeatable_with_one_thread=False),
            [],
            [Key.UNSEEDED_RNG, Key.OUTSIDE_WORLD],
        ),
        (PLACEMENT, [], [Key.SHARED_STREAM, Key.SHARED_OBJECT, Key.WORKER_CODE, Key.LOCAL_VALUE]),
        (
            PLACEMENT,
            [Hint.WORKER],
            [Key.WORKER_CODE, Key.SHARED_STREAM, Key.SHARED_OBJECT, Key.LOCAL_VALUE],
        ),
        (
            replace(PLACEMENT, workers_differ=True),
            [],
            [Key.LOCAL_VALUE, Key.WORKER_CODE, Key.SHARED_STREAM, Key.SHARED_OBJECT],
        ),
        (replace(PLACEMENT, kind=DifferenceKind.STEPS), [], [Key.STEP_COUNT]),
        (RESUME, [], [Key.UNTRACKED_STATE]),
        (
            RESUME,
            [Hint.OWN_GENERATOR, Hint.COUNTER],
            [Key.COUNTER, Key.GENERATOR_NOT_SAVED, Key.UNTRACKED_STATE],
        ),
        (replace(RESUME, tensors=SETTINGS), [], [Key.UNTRACKED_SCHEDULE, Key.UNTRACKED_STATE]),
        (
            replace(RESUME, tensors=SETTINGS),
            [Hint.HELD_STATE],
            [Key.UNTRACKED_SCHEDULE, Key.UNTRACKED_STATE],
        ),
        (replace(RESUME, tensors=("model.weight", *SETTINGS)), [], [Key.UNTRACKED_STATE]),
        (DDP, [], [Key.NOT_THROUGH_MODULE]),
        (DDP, [Hint.COMPILE], [Key.COMPILE, Key.NOT_THROUGH_MODULE]),
    ],
)
def test_causes(evidence: DifferenceEvidence, hints: list[Hint], expected: list[Key]) -> None:
    assert keys(evidence, *hints) == expected


def test_a_cause_comes_with_the_lines_that_speak_for_it() -> None:
    lines = [suspect(Hint.OWN_GENERATOR, line) for line in range(1, 8)]
    first, second, *_ = diagnose(replace(PLACEMENT, suspects=(*lines, suspect(Hint.HELD_STATE))))
    assert first == LikelyCause(Key.SHARED_STREAM, tuple(lines[:5]))
    assert second == LikelyCause(Key.SHARED_OBJECT, (suspect(Hint.HELD_STATE),))


def test_every_cause_has_words() -> None:
    assert set(KNOWN) == set(Key)
    for key in Key:
        assert LikelyCause(key).says
        assert LikelyCause(key).do
        assert not (LikelyCause(key).says + LikelyCause(key).do).endswith(".")
