"""A job is described once: by groups of options that travel whole, and are valid once they exist."""

from __future__ import annotations

from dataclasses import fields

import pytest

from gyrostat.core.determinism import parse_pool
from gyrostat.core.errors import UsageError
from gyrostat.core.job import Assignment, Determinism, RecoveryMode, TrainingOptions
from gyrostat.core.placement import Placement
from gyrostat.job.control.failure_policy import FailurePolicy
from gyrostat.job.control.run_request import OutputFiles, RunRequest, WorkerOverrides
from gyrostat.job.processes.protocol import Program, WorkerSpec

TRAIN = Program(name="train.py")


def test_no_option_is_in_two_descriptions_of_a_job() -> None:
    groups = (TrainingOptions, FailurePolicy, OutputFiles, RunRequest)
    names = [field.name for group in groups for field in fields(group)]
    assert sorted(names) == sorted(set(names))
    passed_on = {field.name for field in fields(TrainingOptions)}
    assert not passed_on & ({field.name for field in fields(Assignment)} | set(WorkerSpec.__struct_fields__))


def test_a_worker_receives_the_options_of_its_job() -> None:
    options = TrainingOptions(threads=2, recovery=RecoveryMode.APPROXIMATE, stop_after=7)
    job = RunRequest(
        program=TRAIN,
        placement=Placement.even(4, 2),
        options=options,
        overrides=WorkerOverrides(paced=(100.0, 50.0), threads={1: 3}),
    )
    first, second = job.assignment(0, "store"), job.assignment(1, "store")
    assert (first.options, first.paced) == (options, 100.0)
    assert (second.options.threads, second.options.stop_after, second.paced) == (3, 7, 50.0)
    assert job.spec(second).env["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: TrainingOptions(threads=0), "at least one thread, got 0"),
        (lambda: TrainingOptions(determinism=Determinism.HETEROGENEOUS), "need each other"),
        (lambda: TrainingOptions(pool=parse_pool("avx2")), "need each other"),
        (lambda: FailurePolicy(heartbeat_timeout_s=-1), "must be 0 .never. or more seconds, got -1"),
        (lambda: FailurePolicy(grace_s=float("inf")), "must be 0 or more seconds, got inf"),
        (lambda: WorkerOverrides(paced=(0.0,)), "must be more than 0 samples per second, got"),
        (
            lambda: RunRequest(
                program=TRAIN, placement=Placement.even(2, 2), failures=FailurePolicy(min_workers=3)
            ).check(),
            "1 to 2, the number that the job begins with; got 3",
        ),
    ],
)
def test_what_is_invalid_is_refused_by_the_group_that_has_it(wrong: object, says: str) -> None:
    assert callable(wrong)
    with pytest.raises(UsageError, match=says):
        wrong()


def test_the_reference_cannot_recover() -> None:
    assert TrainingOptions().recovers
    assert not TrainingOptions(reference=True).recovers
    assert not TrainingOptions(recovery=RecoveryMode.CHECKPOINT).recovers
