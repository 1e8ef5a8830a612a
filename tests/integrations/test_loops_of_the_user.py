"""Accelerate and Fabric: loops of the user run once per batch of a virtual worker, and have the bits of DDP on N processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gyrostat.core.job import CheckpointPolicy
from tests.conftest import Launch
from tests.faults.injector import fail_at
from tests.integrations.ddp_processes import SCRIPTS, THREADS, run_ddp

ACCELERATE, FABRIC = SCRIPTS / "accelerate_loop.py", SCRIPTS / "fabric_loop.py"


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


def ours(launch: Launch, script: Any, args: Sequence[str] = (), **options: Any) -> dict[str, Any]:
    """What the job's main worker wrote."""
    result = launch.directory / "result.json"
    out = ["--ours", "--out", str(launch.directory / "out"), "--result", str(result)]
    options.pop("run", launch)(script, args=[*args, *out], env=THREADS, **options)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def test_accelerate_has_what_ddp_has(launch: Launch, references: Path) -> None:
    """Every sample is evaluated once, in the order of the dataset."""
    args = ["--accumulate", "2", "--state"]
    wanted = run_ddp(ACCELERATE, 3, args, references)
    assert wanted["seen"][-1][2] == list(range(37, 58))
    assert ours(launch, ACCELERATE, args, virtual_workers=3, workers=2, schedule=[(3, 1), (5, 3)]) == wanted


def test_accelerate_goes_on_after_a_death_and_from_a_checkpoint(launch: Launch) -> None:
    wanted = ours(launch, ACCELERATE, virtual_workers=3, workers=1)
    text = ACCELERATE.read_text().split("\nimport argparse")[1]  # without what must come first in a file
    killed = ours(
        launch,
        "import argparse" + text,
        run=lambda script, **options: fail_at(step=3, where="backward", worker=0).run(
            launch, script, **options
        ),
        virtual_workers=3,
        workers=2,
    )
    assert killed == wanted
    (launch.directory / "result.json").unlink()
    checkpoint = CheckpointPolicy(directory=str(launch.directory / "checkpoints"))
    out = [
        "--ours",
        "--out",
        str(launch.directory / "out"),
        "--result",
        str(launch.directory / "result.json"),
    ]
    launch(
        ACCELERATE, args=out, env=THREADS, virtual_workers=3, workers=2, checkpoint=checkpoint, stop_after=9
    )
    resumed = ours(launch, ACCELERATE, virtual_workers=3, workers=1, checkpoint=checkpoint)
    assert resumed["digest"] == wanted["digest"]


def test_fabric_has_what_ddp_has(launch: Launch, references: Path) -> None:
    wanted = run_ddp(FABRIC, 3, [], references)
    assert ours(launch, FABRIC, virtual_workers=3, workers=2, schedule=[(3, 1)]) == wanted


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_settings(ranks: int, launch: Launch, references: Path) -> None:
    for script, args in (
        (ACCELERATE, ["--accumulate", "1"]),
        (ACCELERATE, ["--accumulate", "3"]),
        (ACCELERATE, ["--precision", "bf16"]),
        (FABRIC, ["--precision", "bf16-mixed"]),
        (FABRIC, []),
    ):
        wanted = run_ddp(script, ranks, args, references)
        assert ours(launch, script, args, virtual_workers=ranks, workers=1) == wanted
        assert ours(launch, script, args, virtual_workers=ranks, workers=2) == wanted
