"""Hugging Face's Trainer on virtual workers has the bits, the log and the predictions that it has under DDP on N processes."""

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

SCRIPT = SCRIPTS / "transformers_models.py"


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


def arguments(model: str, **settings: Any) -> list[str]:
    return ["--model", model, "--args", json.dumps(settings)]


EVALUATES = {"eval_strategy": "steps", "eval_steps": 3}
QUICK = [
    pytest.param(
        [*arguments("gpt2", **EVALUATES), "--predict"],
        2,
        {"workers": 2},
        id="gpt2: tokens weighted, evaluation",
    ),
    pytest.param(
        arguments("bert", gradient_accumulation_steps=2, bf16=True),
        3,
        {"workers": 2, "schedule": [(2, 1), (4, 3)]},
        id="bert: draws in the collator, accumulation, bf16, resized",
    ),
]


@pytest.mark.parametrize(("args", "ranks", "options"), QUICK)
def test_has_what_ddp_has(
    args: list[str], ranks: int, options: dict[str, Any], launch: Launch, references: Path
) -> None:
    assert ours(launch, args, virtual_workers=ranks, **options) == run_ddp(SCRIPT, ranks, args, references)


@pytest.fixture(scope="module")
def undisturbed(fork_server: WorkerForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ours(Launch(fork_server, tmp_path_factory.mktemp("undisturbed")), DISTURBED, virtual_workers=3)


DISTURBED = arguments("bert", gradient_accumulation_steps=2, num_train_epochs=3, **EVALUATES)


@pytest.mark.parametrize(
    ("where", "step", "worker"),
    [("exchange", 3, 1), ("backward", 3, 0), ("evaluate", 2, 1), ("reduced", 3, 0), ("boundary", 3, 1)],
)
def test_a_worker_is_killed(
    where: str, step: int, worker: int, launch: Launch, undisturbed: dict[str, Any]
) -> None:
    """In the survey, in the pass that follows, in an evaluation, between the two, and before the next step."""
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
    """The log and the step count go on, and so does what the collator draws."""
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


def test_workers_that_make_other_weights_begin_with_those_of_the_main_one(launch: Launch) -> None:
    """As under DDP. Workers compare their replicas at the first step, and would stop."""
    args = [*arguments("gpt2", max_steps=2), "--unseeded"]
    assert ours(launch, args, virtual_workers=2, workers=2)["global_step"] == 2


SETTINGS = {
    "plain": arguments("gpt2"),
    "accumulation": arguments("gpt2", gradient_accumulation_steps=3, max_steps=9),
    "unweighted": arguments("gpt2", average_tokens_across_devices=False, gradient_accumulation_steps=2),
    "smoothing": arguments("gpt2", label_smoothing_factor=0.1, weight_decay=0.1),
    "by length": arguments("gpt2", train_sampling_strategy="group_by_length"),
    "data workers": arguments("bert", dataloader_num_workers=2, eval_strategy="epoch"),
    "masked": [*arguments("bert", eval_strategy="steps", eval_steps=2), "--predict"],
    "images": [*arguments("vit", eval_strategy="epoch", bf16=True), "--predict"],
    "best": arguments(
        "vit",
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        num_train_epochs=4,
        early_stopping=True,
    ),
    "plateau": arguments(
        "vit",
        eval_strategy="steps",
        eval_steps=1,
        lr_scheduler_type="reduce_lr_on_plateau",
        metric_for_best_model="loss",
    ),
    "tokens seen": arguments(
        "gpt2", include_num_input_tokens_seen="all", optim="sgd", lr_scheduler_type="linear"
    ),
    "unused": arguments(
        "vit", ddp_find_unused_parameters=False, dataloader_drop_last=True, eval_strategy="epoch"
    ),
    "checkpointed activations": arguments("gpt2", activation_checkpointing=True),
}


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, ranks: int, launch: Launch, references: Path) -> None:
    wanted = run_ddp(SCRIPT, ranks, SETTINGS[name], references)
    assert ours(launch, SETTINGS[name], virtual_workers=ranks, workers=1) == wanted
    assert ours(launch, SETTINGS[name], virtual_workers=ranks, workers=2, schedule=[(2, 1), (3, 2)]) == wanted
