"""What cannot be kept is refused by name, with exit code 2 and what to do, before anything is trained."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import Launch
from tests.integrations.ddp_processes import THREADS

HF = """
    import torch
    from gyrostat.integrations.transformers import Trainer
    from transformers import TrainingArguments
    model = torch.nn.Linear(2, 2)
    args = TrainingArguments("out", use_cpu=True, report_to=[])
"""
LIGHTNING = """
    import warnings; warnings.filterwarnings("ignore")
    import torch
    from gyrostat.integrations.lightning import GyrostatStrategy
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel, RandomIterableDataset
    options = dict(strategy=GyrostatStrategy(), accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
    trainer = pl.Trainer(**options, enable_progress_bar=False, enable_model_summary=False, limit_train_batches=3)
"""
ACCELERATE = """
    import torch
    from gyrostat.integrations.accelerate import Accelerator
"""
CASES = {
    "deepspeed": (
        HF + "    args.deepspeed = 'ds.json'; Trainer(model, args)\n",
        "DeepSpeed runs an engine of its own",
    ),
    "fsdp": (HF + "    args.fsdp = True; Trainer(model, args)\n", "FSDP shards the model"),
    "batch size": (
        HF + "    args.auto_find_batch_size = True; Trainer(model, args)\n",
        "the batch size is part of the job",
    ),
    "resuming": (
        HF + "    t = Trainer(model, args, train_dataset=[1, 2]); t.train(resume_from_checkpoint='x')\n",
        "gyrostat run --checkpoint-dir DIR resumes by itself",
    ),
    "manual optimization": (LIGHTNING + "    trainer.fit(ManualOptimBoringModel())\n", "manual optimization"),
    "metrics as objects": (
        LIGHTNING
        + """
    import torchmetrics
    class Model(BoringModel):
        def __init__(self):
            super().__init__()
            self.seen = torchmetrics.MeanMetric()
        def training_step(self, batch, batch_idx):
            self.log("seen", self.seen)
            return super().training_step(batch, batch_idx)
    trainer.fit(Model())
""",
        "whose state is not kept per virtual worker",
    ),
    "accumulation": (
        LIGHTNING + "    trainer.accumulate_grad_batches = 2; trainer.fit(BoringModel())\n",
        "no multiple of accumulate_grad_batches=2",
    ),
    "gather in a step": (
        ACCELERATE
        + """
    a = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, loader = a.prepare(model, torch.utils.data.DataLoader(torch.randn(8, 2), batch_size=2))
    for x in loader:
        a.gather(model(x).mean())
""",
        "accelerator.job.gather(value) before backward",
    ),
    "no backward": (
        ACCELERATE
        + """
    a = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, loader = a.prepare(model, torch.utils.data.DataLoader(torch.randn(8, 2), batch_size=2))
    for x in loader:
        model(x)
""",
        "a batch was not followed by a backward",
    ),
    "skipping": (
        ACCELERATE + "    Accelerator(cpu=True).skip_first_batches([], 1)\n",
        "gyrostat's own checkpoints resume",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_is_refused(name: str, launch: Launch) -> None:
    script, message = CASES[name]
    outcome = launch(script, virtual_workers=2, env=THREADS, check=False)
    assert outcome.failure is not None
    assert message in str(outcome.failure)
    assert outcome.exit_code == 2


def test_another_launcher_is_refused() -> None:
    script = "from gyrostat.integrations.accelerate import Accelerator; Accelerator(cpu=True)"
    env = {**os.environ, **THREADS, "RANK": "0", "WORLD_SIZE": "2"}
    run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "gyrostat run -n N -w P SCRIPT" in run.stderr


def test_no_framework_is_imported_without_being_asked_for() -> None:
    script = """
import sys, torch, gyrostat
before = set(sys.modules)  # torch looks for some of them itself
gyrostat.init
import gyrostat.integrations, gyrostat.integrations.launch, gyrostat.cli.main, gyrostat.job.launcher
print([name for name in ("transformers", "accelerate", "lightning") if name in set(sys.modules) - before])
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
