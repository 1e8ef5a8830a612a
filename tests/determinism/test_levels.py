"""The levels of determinism on workers that compute as different types of CPU, with different numbers of threads.

A worker is started as a weaker type by an environment that holds torch's libraries back (`STARTED_AS`), which changes the bits
of every model here; so these tests can fail, and one of them shows it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.core.determinism import STARTED_AS, parse_pool
from gyrostat.core.job import CheckpointPolicy, Determinism
from gyrostat.engine.numerics.determinism import cpu_type
from tests.conftest import Launch
from tests.determinism.test_digests import ZOO

MODELS = ("batch_norm_and_dropout", "channels_last", "transformer")
MIXED = Determinism.HETEROGENEOUS

pytestmark = pytest.mark.skipif(cpu_type({}) != "avx512", reason="needs a CPU that has all the types")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("pool", "other"), [("avx512,avx2", "avx2"), ("avx512,sse", "sse"), ("avx512,avx2,sse", "avx2")]
)
def test_any_mixture_of_types_and_threads_gives_the_same_bits(
    launch: Launch, model: str, pool: str, other: str
) -> None:
    chosen = parse_pool(pool, threads=1)
    alone = launch(ZOO, virtual_workers=3, args=[model], determinism=MIXED, pool=chosen)
    mixed = launch(
        ZOO,
        placement=[2, 1],
        args=[model],
        determinism=MIXED,
        pool=chosen,
        worker_env={1: STARTED_AS[other]},
        worker_threads={1: 2},
    )
    assert mixed.digest == alone.digest
    assert mixed.losses == alone.losses


@pytest.mark.parametrize(("models", "difference"), [(MODELS, "type"), (["channels_last"], "threads")])
def test_without_pins_and_checks_bits_differ(launch: Launch, models: list[str], difference: str) -> None:
    """So that equal bits above mean something. Which model differs depends on the CPU: MKL has no AVX-512 kernels for AMD's."""

    def differs(model: str) -> bool:
        alone = launch(ZOO, virtual_workers=3, args=[model])
        mixed = launch(
            ZOO,
            placement=[2, 1],
            args=[model],
            worker_env={1: STARTED_AS["avx2"]} if difference == "type" else {},
            worker_threads={1: 2} if difference == "threads" else {},
            check_fingerprint=False,
            check=False,
        )
        return mixed.digest != alone.digest  # replicas that drifted apart have none at all

    assert any(differs(model) for model in models)


@pytest.mark.parametrize(
    ("env", "threads", "reason"),
    [
        (STARTED_AS["avx2"], 1, "its fingerprint says"),
        ({}, 2, "its fingerprint says threads = '2', worker 0's '1'"),
    ],
)
def test_elastic_refuses_another_type_or_number_of_threads(
    launch: Launch, env: dict[str, str], threads: int, reason: str
) -> None:
    outcome = launch(
        ZOO,
        placement=[1, 1],
        args=[MODELS[0]],
        worker_env={1: env},
        worker_threads={1: threads},
        check=False,
    )
    assert outcome.losses == ()
    assert outcome.failure is not None
    assert f"worker 1 cannot work with worker 0: {reason}" in outcome.failure.summary


def test_a_type_too_weak_for_the_pool_is_refused(launch: Launch) -> None:
    outcome = launch(
        ZOO,
        placement=[1, 1],
        args=[MODELS[0]],
        determinism=MIXED,
        pool=parse_pool("avx512,avx2"),
        worker_env={1: STARTED_AS["sse"]},
        check=False,
    )
    assert outcome.losses == ()
    assert outcome.failure is not None
    assert "of type sse, weaker than the weakest of the job's pool (avx512, avx2)" in outcome.failure.summary


PINNED = """
import os, torch
assert torch.get_num_threads() == 2
assert torch.backends.cpu.get_cpu_capability() == "AVX2"
assert os.environ["MKL_CBWR"] == "AVX2"
import gyrostat
gyrostat.init()
"""
TOO_LATE = """
import gyrostat.engine.script.session as session, torch
from gyrostat.core.determinism import parse_pool
from gyrostat.core.job import Assignment, Determinism, TrainingOptions
from gyrostat.core.placement import Placement
from gyrostat.engine.supervisor import NullSupervisor
torch.ones(4).exp()
options = TrainingOptions(determinism=Determinism.HETEROGENEOUS, pool=parse_pool("avx2"))
session.enter(Assignment(placement=Placement.even(1, 1), options=options), NullSupervisor())
session.init()
"""


def test_pins_are_set_before_the_script_begins(launch: Launch) -> None:
    pool = parse_pool("avx512,avx2", threads=2)
    launch(PINNED, determinism=MIXED, pool=pool)


def test_pins_that_come_too_late_are_noticed(launch: Launch) -> None:
    outcome = launch(TOO_LATE, check=False)
    assert outcome.failure is not None
    assert "asks for AVX2, but torch computes with AVX512: an operator ran before" in str(outcome.failure)


def test_static_resumes_only_on_the_same_placement(launch: Launch, tmp_path: Path) -> None:
    level, args = Determinism.STATIC, [MODELS[0]]
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"))
    whole = launch(ZOO, placement=[2, 1], args=args, determinism=level)
    launch(ZOO, placement=[2, 1], args=args, determinism=level, checkpoint=policy, stop_after=3)
    other = launch(ZOO, placement=[1, 2], args=args, determinism=level, checkpoint=policy, check=False)
    assert other.failure is not None
    assert "placement is '0:0-1,1:2-2' there and '0:0-0,1:1-2' here" in other.failure.summary
    same = launch(ZOO, placement=[2, 1], args=args, determinism=level, checkpoint=policy)
    assert same.first_step == 3
    assert same.digest == whole.digest == launch(ZOO, placement=[3], args=args).digest


def test_heterogeneous_resumes_on_another_type_of_the_pool(launch: Launch, tmp_path: Path) -> None:
    args, pool = ["transformer"], parse_pool("avx512,avx2")
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"))
    whole = launch(ZOO, placement=[2, 1], args=args, determinism=MIXED, pool=pool)
    launch(ZOO, placement=[2, 1], args=args, determinism=MIXED, pool=pool, checkpoint=policy, stop_after=3)
    last = launch(
        ZOO,
        placement=[3],
        args=args,
        determinism=MIXED,
        pool=pool,
        checkpoint=policy,
        env=STARTED_AS["avx2"],
        worker_threads={0: 2},
    )
    assert last.first_step == 3
    assert last.digest == whole.digest
    wider = parse_pool("avx512,avx2,sse")
    other = launch(
        ZOO, placement=[3], args=args, determinism=MIXED, pool=wider, checkpoint=policy, check=False
    )
    assert other.failure is not None
    assert "pool is 'avx512,avx2' there and 'avx512,avx2,sse' here" in other.failure.summary
