"""`--reduction tree`: one digest for every placement, restart and number of workers, and for DDP with the tree as its hook."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gyrostat.core.errors import ScriptFailed
from gyrostat.core.job import CheckpointPolicy, GradientBackend, ReductionChoice, ReductionOrder
from tests.conftest import Launch
from tests.determinism.test_digests import ZOO

FEATURES = (
    "batch_norm_and_dropout",
    "two_passes",
    "unused_parameters",
    "gradient_as_bucket_view",
    "gradients_not_zeroed",
    "bfloat16_parameters",
    "accumulation",
    "several_default_buckets",
    "loops",
)


@pytest.mark.parametrize("name", FEATURES)
def test_equals_ddp_with_the_hook(launch: Launch, name: str) -> None:
    n = 3 + FEATURES.index(name) % 3
    reference = launch(ZOO, virtual_workers=n, reference=True, args=[name], reduction=ReductionOrder.TREE)
    for placement in ([n], [1, n - 1]):
        outcome = launch(ZOO, placement=placement, args=[name], reduction=ReductionOrder.TREE)
        assert outcome.losses == reference.losses
        assert outcome.digest == reference.digest


# Makes a worker believe in a GPU of its own and in NCCL, which is played by gloo.
AS_OVER_NCCL = """
import os, runpy
from gyrostat.engine import torch_internals
from gyrostat.engine.numerics import determinism
from gyrostat.engine.script import session
from gyrostat.engine.transport import group

group.nccl_group = torch_internals.gloo_group
session.is_nccl_available = lambda: True
determinism.gpu = lambda device: "GPU of worker " + os.environ["RANK"]
runpy.run_path({zoo!r}, run_name="__main__")
"""


@pytest.mark.parametrize("name", ["batch_norm_and_dropout", "unused_parameters", "several_default_buckets"])
def test_equals_ddp_with_the_hook_as_over_nccl(launch: Launch, name: str) -> None:
    reference = launch(ZOO, virtual_workers=5, reference=True, args=[name], reduction=ReductionOrder.TREE)
    script = AS_OVER_NCCL.format(zoo=str(ZOO))
    for placement in ([5], [2, 3], [1, 3, 1]):
        outcome = launch(script, placement=placement, args=[name], reduction=ReductionOrder.TREE)
        assert outcome.digest == reference.digest
        assert outcome.reduction is not None
        assert outcome.reduction.carrier is (GradientBackend.NCCL if len(placement) > 1 else None)


def test_without_a_word_the_order_is_that_of_ddp_where_there_is_no_gpu(
    launch: Launch, tmp_path: Path
) -> None:
    args, policy = ["batch_norm_and_dropout"], CheckpointPolicy(directory=str(tmp_path / "checkpoints"))
    outcome = launch(ZOO, placement=[2, 1], args=args, reduction=None, checkpoint=policy, stop_after=1)
    assert outcome.reduction == ReductionChoice(
        order=ReductionOrder.DDP,
        carrier=GradientBackend.GLOO,
        reason="the default on devices of type cpu; gloo carries what is in host memory; "
        "all workers are on one machine and see one another's gradients",
    )
    with pytest.raises(ScriptFailed, match="reduction is 'ddp' there and 'tree' here"):
        launch(ZOO, placement=[3], args=args, reduction=ReductionOrder.TREE, checkpoint=policy)


@pytest.mark.parametrize("n", range(1, 18))
def test_random_cuts_and_changes_in_mid_run(launch: Launch, tmp_path: Path, n: int) -> None:
    chance = random.Random(n)
    args = ["bfloat16_parameters"]
    whole = launch(ZOO, placement=[n], args=args, reduction=ReductionOrder.TREE)
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"))
    for stop in (1, None):
        cuts = sorted(chance.sample(range(1, n), min(n - 1, chance.randint(0, 3))))
        placement = [b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
        part = launch(
            ZOO,
            placement=placement,
            args=args,
            reduction=ReductionOrder.TREE,
            checkpoint=policy,
            stop_after=stop,
        )
    assert part.digest == whole.digest


def test_it_is_another_order_than_that_of_ddp(launch: Launch) -> None:
    """So that equal digests mean something: with N = 5 the two orders round differently."""
    args = ["batch_norm_and_dropout"]
    assert (
        launch(ZOO, placement=[5], args=args, reduction=ReductionOrder.TREE).digest
        != launch(ZOO, placement=[5], args=args).digest
    )
