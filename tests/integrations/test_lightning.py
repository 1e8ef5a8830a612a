"""Lightning's Trainer on virtual workers has the bits, counters and logged values that it has under DDP on N processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gyrostat.core.job import CheckpointPolicy
from gyrostat.job.processes.start import WorkerForkServer
from tests.conftest import Launch
from tests.faults.injector import fail_at
from tests.integrations.ddp_processes import SCRIPTS, THREADS, run_ddp

SCRIPT = SCRIPTS / "lightning_modules.py"


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


def ours(launch: Launch, args: Sequence[str], **options: Any) -> dict[str, Any]:
    """What the job's main worker wrote."""
    result = launch.directory / "result.json"
    out = ["--ours", "--out", str(launch.directory / "out"), "--result", str(result)]
    run = options.pop("run", launch)
    run(options.pop("script", SCRIPT), args=[*args, *out], env=THREADS, **options)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def settings(*others: str, loader: dict[str, Any] | None = None, **trainer: Any) -> list[str]:
    return ["--trainer", json.dumps(trainer), "--loader", json.dumps(loader or {}), *others]


QUICK = [
    pytest.param(
        settings("--test", "--random"), 3, {"workers": 2, "schedule": [(4, 1), (9, 3)]}, id="resized"
    ),
    pytest.param(
        settings(accumulate_grad_batches=2, precision="bf16-mixed", checkpoints=True),
        2,
        {"workers": 1},
        id="accumulation",
    ),
]


@pytest.mark.parametrize(("args", "ranks", "options"), QUICK)
def test_has_what_ddp_has(
    args: list[str], ranks: int, options: dict[str, Any], launch: Launch, references: Path
) -> None:
    assert ours(launch, args, virtual_workers=ranks, **options) == run_ddp(SCRIPT, ranks, args, references)


def test_predicts_every_sample_once(launch: Launch) -> None:
    """In the order of the dataset, on every worker."""
    alone = ours(launch, settings("--predict", max_epochs=1), virtual_workers=3, workers=1)["predicted"]
    assert [len(batch) for batch in alone] == [4, 4, 4, 4, 3]
    assert (
        ours(launch, settings("--predict", max_epochs=1), virtual_workers=3, workers=2)["predicted"] == alone
    )


DISTURBED = settings("--random", accumulate_grad_batches=2, max_epochs=3, checkpoints=True)


@pytest.fixture(scope="module")
def undisturbed(fork_server: WorkerForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ours(Launch(fork_server, tmp_path_factory.mktemp("undisturbed")), DISTURBED, virtual_workers=3)


@pytest.mark.parametrize(
    ("where", "step", "worker"), [("backward", 3, 0), ("evaluate", 2, 1), ("boundary", 4, 1)]
)
def test_a_worker_is_killed(
    where: str, step: int, worker: int, launch: Launch, undisturbed: dict[str, Any]
) -> None:
    text = SCRIPT.read_text().split("\nimport argparse")[1]  # without what must come first in a file
    killed = ours(
        launch,
        DISTURBED,
        script="import argparse" + text,
        run=lambda script, **options: fail_at(step=step, where=where, worker=worker).run(
            launch, script, **options
        ),
        virtual_workers=3,
        workers=2,
    )
    assert killed == undisturbed


def test_resumes_in_the_middle_of_an_epoch(launch: Launch, undisturbed: dict[str, Any]) -> None:
    checkpoint = CheckpointPolicy(directory=str(launch.directory / "checkpoints"))
    result = launch.directory / "result.json"
    out = ["--ours", "--out", str(launch.directory / "out"), "--result", str(result)]
    launch(
        SCRIPT,
        args=[*DISTURBED, *out],
        env=THREADS,
        virtual_workers=3,
        workers=2,
        checkpoint=checkpoint,
        stop_after=4,
    )
    assert not result.exists()
    assert ours(launch, DISTURBED, virtual_workers=3, workers=1, checkpoint=checkpoint) == undisturbed
    result.unlink()  # and once more from the end, where nothing is left to do
    again = ours(launch, DISTURBED, virtual_workers=3, workers=1, checkpoint=checkpoint)
    assert (again["digest"], again["global_step"]) == (undisturbed["digest"], undisturbed["global_step"])


SETTINGS = {
    "plain": settings("--test"),
    "accumulation": settings(accumulate_grad_batches=3),
    "demo": ["--module", "boring", *settings(limit_train_batches=6, limit_val_batches=2)],
    "data workers": settings("--random", loader={"num_workers": 2}),
    "steps": settings(max_steps=11, max_epochs=-1, val_check_interval=4),
    "drop last": settings(loader={"drop_last": True}, precision="bf16-mixed"),
    "limits": settings(limit_train_batches=4, limit_val_batches=1, gradient_clip_algorithm="value"),
    "best": settings(max_epochs=5, early_stopping=True, checkpoints=True),
}


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, ranks: int, launch: Launch, references: Path) -> None:
    wanted = run_ddp(SCRIPT, ranks, SETTINGS[name], references)
    assert ours(launch, SETTINGS[name], virtual_workers=ranks, workers=1) == wanted
    assert ours(launch, SETTINGS[name], virtual_workers=ranks, workers=2, schedule=[(2, 1), (3, 2)]) == wanted
