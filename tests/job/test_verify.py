"""`verify` on real scripts: clean ones are equal, and each known mistake is found, with step, tensor and cause.

Every script is the same small training with one thing put into it. Two virtual workers see 16 samples in
micro-batches of 2: two epochs of 4 steps.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.core.placement import Placement
from gyrostat.job.processes.protocol import Program
from gyrostat.job.processes.start import WorkerForkServer
from gyrostat.job.verify.causes import Key
from gyrostat.job.verify.compare import DifferenceKind, Scope
from gyrostat.job.verify.plan import Against, default_placements
from gyrostat.job.verify.verdict import VerifyFinding, VerifyVerdict
from gyrostat.job.verify.verifier import VerifyRequest, verify

ROOT = Path(__file__).parents[2]
ZOO = ROOT / "tests/determinism/zoo.py"
SKELETON = """
import os
import time
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset
import gyrostat

job = gyrostat.init(seed=3)
once = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(16, 6, generator=once), torch.randint(0, 3, (16,), generator=once))
model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
{before}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
job.track(model=model, optimizer=optimizer)
loader = job.dataloader(data, batch_size=2, shuffle=True)
{setup}
for epoch in job.epochs(2):
    for {steps}:
        for x, y in step:
            {inner}
            step.backward(loss)
        {update}
        optimizer.step()
        optimizer.zero_grad()
        {after}
"""


class Verify:
    """Verifies a script; `mistake` puts something into the skeleton first."""

    def __init__(self, parent: WorkerForkServer, directory: Path) -> None:
        self._parent, self._directory = parent, directory

    def __call__(
        self,
        script: Path,
        *args: str,
        virtual_workers: int = 2,
        placements: tuple[Placement, ...] | None = None,
        against: Against = Against.DDP,
        every: int = 10,
        steps: int | None = None,
        threads: int = 1,
    ) -> VerifyVerdict:
        request = VerifyRequest(
            program=Program(name=str(script), args=args),
            placements=placements or default_placements(virtual_workers),
            against=against,
            every=every,
            steps=steps,
            threads=threads,
            cwd=self._directory,
        )
        return verify(request, parent=self._parent)

    def script(
        self,
        *,
        before: str = "",
        setup: str = "",
        steps: str = "step in job.steps(loader)",
        inner: str = "loss = F.cross_entropy(model(x), y)",
        update: str = "pass",
        after: str = "pass",
    ) -> Path:
        path = self._directory / "train.py"
        before = textwrap.dedent(before)
        path.write_text(
            SKELETON.format(before=before, setup=setup, steps=steps, inner=inner, update=update, after=after)
        )
        return path

    def finding(self, script: Path, *, every: int = 10, threads: int = 1) -> VerifyFinding:
        """The one finding about a script that is wrong in one way. Plain DDP would not add to it."""
        verdict = self(script, against=Against.NONE, every=every, threads=threads)
        assert verdict.failed is None
        assert verdict.exit_code == 1
        (finding,) = verdict.findings
        return finding


@pytest.fixture
def verifying(fork_server: WorkerForkServer, tmp_path: Path) -> Verify:
    return Verify(fork_server, tmp_path)


def place(finding: VerifyFinding) -> tuple[Scope, int, str | None, int]:
    """Between what, the first step, the first tensor, and how many tensors differ."""
    located = finding.located
    names = () if located is None else located.tensors
    return finding.pair.scope, finding.step, names[0] if names else None, len(names)


def lines(finding: VerifyFinding) -> list[str]:
    """The lines that are shown for the first cause."""
    return [line.text for line in finding.causes[0].lines]


# Equal


def names(verdict: VerifyVerdict) -> list[str]:
    return [row.run.configuration.name for row in verdict.rows]


def test_a_clean_script(verifying: Verify) -> None:
    verdict = verifying(verifying.script(), virtual_workers=3, every=2)
    assert names(verdict) == [
        "plain DDP, 3 processes",
        "3 workers",
        "2 workers (2+1)",
        "1 worker",
        "2 workers (2+1), saved after step 2, resumed on 1 worker",
    ]
    assert verdict.equal
    assert verdict.exit_code == 0
    assert verdict.notes == ()
    assert verdict.findings == ()
    assert len({row.run.trace.digest for row in verdict.rows}) == 1
    for row in verdict.rows:
        assert row.run.trace.steps == 6
        assert [*row.run.trace.digests] == [2, 4, 6]
        assert [*row.run.trace.losses] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("feature", ["two_passes", "loops"])
def test_features(verifying: Verify, feature: str) -> None:
    verdict = verifying(ZOO, feature, virtual_workers=3)
    assert verdict.equal, verdict.findings
    assert len(verdict.rows) == 5


def test_an_example(verifying: Verify) -> None:
    script = ROOT / "examples/gan.py"
    verdict = verifying(script, "--small", "--epochs", "2", "--limit", "3")
    assert verdict.equal, (verdict.findings, verdict.failed)
    assert verdict.rows[0].run.trace.steps == 6


def test_without_ddp_all_are_compared_with_the_first(verifying: Verify) -> None:
    verdict = verifying(
        verifying.script(), against=Against.NONE, placements=(Placement.even(2, 1), Placement.even(2, 2))
    )
    assert verdict.equal
    assert names(verdict) == ["1 worker", "2 workers", "1 worker, saved after step 3, resumed on 2 workers"]


def test_one_virtual_worker(verifying: Verify) -> None:
    verdict = verifying(verifying.script(), virtual_workers=1)
    assert verdict.equal
    assert names(verdict) == [
        "plain DDP, 1 process",
        "1 worker",
        "1 worker, saved after step 7, resumed on 1 worker",
    ]


def test_only_the_first_steps(verifying: Verify) -> None:
    """What comes later is neither run nor compared; what ends there is compared there."""
    script = verifying.script(after="assert job.step < 3")
    verdict = verifying(script, steps=3)
    assert verdict.equal
    assert verdict.every == 1  # so that step 3 is among them
    for row in verdict.rows:
        assert row.run.trace.steps == 3
        assert [*row.run.trace.digests] == [1, 2, 3]


@pytest.mark.parametrize("steps", [0, 1])
def test_too_few_steps_to_resume(verifying: Verify, steps: int) -> None:
    verdict = verifying(
        verifying.script(steps=f"step in job.steps(loader, limit={steps}) if not epoch else []")
    )
    assert verdict.equal
    assert names(verdict) == ["plain DDP, 2 processes", "2 workers", "1 worker"]
    number = "1 step" if steps else "0 steps"
    assert verdict.notes == (
        f"save and resume was not tested: the script makes only {number}; give it more data or epochs",
    )


def test_checkpoints_of_the_user_are_left_alone(verifying: Verify, tmp_path: Path) -> None:
    script = verifying.script()
    script.write_text(
        script.read_text().replace("seed=3", "seed=3, checkpoint_dir='mine', checkpoint_every=2")
    )
    assert verifying(script).equal
    assert not (tmp_path / "mine").exists()


# Not repeatable


def test_an_unseeded_generator(verifying: Verify) -> None:
    finding = verifying.finding(
        verifying.script(
            before="rng = np.random.default_rng()",
            inner="loss = F.cross_entropy(model(x + rng.normal() * (job.step >= 2)), y)",
        ),
    )
    assert place(finding) == (Scope.PLACEMENT, 3, "model.0.weight", 8)
    assert finding.loss_differs
    assert not finding.evidence.repeatable
    assert finding.causes[0].key is Key.UNSEEDED_RNG
    assert lines(finding) == ["np.random.default_rng()"]


def test_a_model_that_is_built_by_chance(verifying: Verify) -> None:
    """Already before the first step the workers differ from one another, which the engine notices."""
    script = verifying.script(before="nn.init.constant_(model[0].weight, float(time.time_ns() % 1000))")
    verdict = verifying(script)
    assert verdict.notes == ("save and resume was not tested, because the workers of one run differ",)
    (finding,) = verdict.findings
    assert finding.difference.kind is DifferenceKind.WORKERS
    assert "model.0.weight differs" in str(finding.pair.other.trace.workers_differ)
    assert not finding.evidence.repeatable
    assert finding.causes[0].key is Key.UNSEEDED_RNG
    assert lines(finding) == ["time.time_ns()"]


def test_threads(verifying: Verify) -> None:
    """Chance that comes with the second thread only; real operators are too rarely so unlucky for a test.

    It moves one class only: moving all alike would leave the loss as it is.
    """
    chance = "int.from_bytes(os.urandom(2)) * (torch.get_num_threads() > 1)"
    finding = verifying.finding(verifying.script(update=f"model[2].bias.grad[0].add_({chance})"), threads=2)
    assert finding.evidence.repeatable_with_one_thread
    assert [cause.key for cause in finding.causes] == [Key.THREADS]


# Only after save and resume


def test_an_untracked_schedule(verifying: Verify) -> None:
    schedule = "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))"
    finding = verifying.finding(verifying.script(setup=schedule, after="schedule.step()"))
    assert place(finding) == (Scope.RESUME, 4, "optimizer.param_groups.0.lr", 1)
    assert finding.causes[0].key is Key.UNTRACKED_SCHEDULE


def test_a_counter_of_the_script(verifying: Verify) -> None:
    finding = verifying.finding(
        verifying.script(
            steps="number, step in enumerate(job.steps(loader))",
            update="model[0].bias.grad.mul_(1 + (number > 2))",
        )
    )
    assert place(finding) == (Scope.RESUME, 4, "model.0.bias", 2)
    assert not finding.loss_differs
    assert finding.evidence.repeatable
    assert finding.causes[0].key is Key.COUNTER
    assert lines(finding) == ["enumerate(job.steps(loader))"]


def test_an_attribute_of_a_module(verifying: Verify) -> None:
    finding = verifying.finding(
        verifying.script(
            before="model.scale = 1.0",
            inner="loss = F.cross_entropy(model(x), y) * model.scale",
            after="model.scale *= 0.9",
        )
    )
    assert place(finding) == (Scope.RESUME, 4, "model.0.weight", 8)
    assert [cause.key for cause in finding.causes] == [Key.UNTRACKED_STATE]


def test_a_generator_that_is_not_saved(verifying: Verify) -> None:
    finding = verifying.finding(
        verifying.script(
            before="noise = torch.Generator().manual_seed(5)",
            update="model[2].bias.grad.add_(torch.randn(3, generator=noise))",
        )
    )
    assert place(finding) == (Scope.RESUME, 4, "model.2.bias", 2)
    assert finding.causes[0].key is Key.GENERATOR_NOT_SAVED
    assert lines(finding) == ["torch.randn(3, generator=noise)"]


# Between placements


def test_a_generator_shared_by_virtual_workers(verifying: Verify) -> None:
    script = verifying.script(
        before="noise = torch.Generator().manual_seed(5)",
        inner="loss = F.cross_entropy(model(x + torch.randn(x.shape, generator=noise)), y)",
    )
    verdict = verifying(script)
    (finding,) = verdict.findings
    assert place(finding) == (Scope.PLACEMENT, 1, "model.0.weight", 8)
    assert not finding.loss_differs  # virtual worker 0 was the first to draw
    assert finding.evidence.repeatable
    assert finding.causes[0].key is Key.SHARED_STREAM
    assert lines(finding) == ["torch.randn(x.shape, generator=noise)"]
    same = [row.difference is None for row in verdict.rows]
    assert same == [True, True, False, False]  # DDP, 2 workers, 1 worker, resumed


def test_a_dataset_that_counts(verifying: Verify) -> None:
    finding = verifying.finding(
        verifying.script(
            before="""
            class Counting(Dataset):
                seen = 0
                def __len__(self):
                    return 16
                def __getitem__(self, index, base=data):
                    self.seen += 1
                    x, y = base[index]
                    return x * self.seen, y
            data = Counting()
            """
        )
    )
    assert place(finding) == (Scope.PLACEMENT, 1, "model.0.weight", 8)
    assert finding.causes[0].key is Key.SHARED_OBJECT
    assert lines(finding) == ["self.seen += 1"]


def test_only_a_buffer_differs(verifying: Verify) -> None:
    finding = verifying.finding(
        verifying.script(
            before="""
            class Counting(nn.Linear):
                calls = 0
                def forward(self, x):
                    self.calls += 1
                    self.count.fill_(self.calls)
                    return super().forward(x)
            model = Counting(6, 3)
            model.register_buffer("count", torch.zeros(()))
            """
        ),
        every=3,
    )
    assert place(finding) == (Scope.PLACEMENT, 2, "model.count", 1)
    assert finding.causes[0].key is Key.SHARED_OBJECT
    assert lines(finding) == ["self.calls += 1"]


def test_the_number_of_workers(verifying: Verify) -> None:
    finding = verifying.finding(
        verifying.script(update="model[0].weight.grad.mul_(int(os.environ['WORLD_SIZE']))")
    )
    assert place(finding) == (Scope.PLACEMENT, 1, "model.0.weight", 2)
    assert finding.causes[0].key is Key.WORKER_CODE
    assert lines(finding) == ["os.environ['WORLD_SIZE']"]


def test_only_the_loss_differs(verifying: Verify) -> None:
    world = "int(os.environ['WORLD_SIZE'])"
    finding = verifying.finding(
        verifying.script(inner=f"loss = F.cross_entropy(model(x), y) + (job.step == 4) * {world}")
    )
    assert place(finding) == (Scope.PLACEMENT, 5, None, 0)
    assert finding.evidence.kind is DifferenceKind.LOSS
    assert finding.causes[0].key is Key.WORKER_CODE


def test_another_number_of_steps(verifying: Verify) -> None:
    script = verifying.script(after="if job.step == 6 and os.environ['WORLD_SIZE'] == '1': break")
    verdict = verifying(script)
    (finding,) = verdict.findings
    assert finding.difference.kind is DifferenceKind.STEPS
    assert finding.step == 8
    assert finding.causes[0].key is Key.STEP_COUNT
    assert [row.run.trace.steps for row in verdict.rows] == [8, 8, 7, 7]


def test_the_loss_of_one_virtual_worker(verifying: Verify) -> None:
    finding = verifying.finding(
        verifying.script(after="optimizer.param_groups[0]['lr'] = 0.1 / (1 + loss.item())")
    )
    assert place(finding) == (Scope.PLACEMENT, 1, "optimizer.param_groups.0.lr", 1)
    assert "workers 0 and 1" in str(finding.pair.other.trace.workers_differ)
    assert finding.evidence.repeatable
    assert finding.causes[0].key is Key.LOCAL_VALUE
    assert lines(finding) == ["optimizer.param_groups[0]['lr'] = 0.1 / (1 + loss.item())"]


def test_an_update_on_the_main_worker_only(verifying: Verify) -> None:
    finding = verifying.finding(verifying.script(update="job.is_main and model[0].weight.grad.mul_(2)"))
    assert finding.pair.scope is Scope.PLACEMENT
    assert finding.evidence.repeatable
    assert finding.causes[0].key is Key.WORKER_CODE
    assert lines(finding) == ["job.is_main"]


# Only from plain DDP


def test_a_module_that_is_not_called_itself(verifying: Verify) -> None:
    script = verifying.script(inner="loss = F.cross_entropy(model[2](torch.relu(model.get(x))), y)")
    text = script.read_text().replace(
        "optimizer = ", "type(model).get = lambda self, x: self[0](x)\noptimizer = ", 1
    )
    script.write_text(text)
    verdict = verifying(script)
    (finding,) = verdict.findings
    assert place(finding) == (Scope.DDP, 1, "model.0.weight", 8)
    assert finding.causes[0].key is Key.NOT_THROUGH_MODULE
    assert [row.difference is None for row in verdict.rows] == [True, False, False, False]
    assert all(row.exact for row in verdict.rows)


# The script fails


def test_a_script_that_raises(verifying: Verify) -> None:
    verdict = verifying(verifying.script(after="if job.step == 2: raise ValueError('no luck')"))
    assert verdict.failed is not None
    assert verdict.failed.configuration.name == "2 workers"
    assert verdict.failed.outcome.failure is not None
    assert "ValueError: no luck" in str(verdict.failed.outcome.failure.traceback)
    assert (verdict.rows, verdict.findings, verdict.exit_code) == ((), (), 1)


def test_a_script_with_an_exit_code(verifying: Verify, tmp_path: Path) -> None:
    (tmp_path / "exit.py").write_text("print('bye')\nraise SystemExit(7)")
    verdict = verifying(tmp_path / "exit.py", virtual_workers=1)
    assert verdict.exit_code == 7
    assert verdict.failed is not None
    assert verdict.failed.output == ("worker 0 │ bye",)


def test_a_script_that_fails_only_as_plain_ddp(verifying: Verify) -> None:
    """The other runs have been compared by then, and a difference between them is explained."""
    script = verifying.script(
        update="assert type(model) is nn.Sequential; model[0].bias.grad.mul_(int(os.environ['WORLD_SIZE']))"
    )
    verdict = verifying(script)
    assert verdict.failed is not None
    assert verdict.failed.configuration.reference
    assert names(verdict) == ["2 workers", "1 worker", "2 workers, saved after step 3, resumed on 1 worker"]
    assert [place(finding) for finding in verdict.findings] == [(Scope.PLACEMENT, 1, "model.0.bias", 2)]
    assert verdict.exit_code == 1


def test_a_script_that_says_another_number_of_virtual_workers(verifying: Verify) -> None:
    script = verifying.script()
    script.write_text(script.read_text().replace("seed=3", "seed=3, virtual_workers=5"))
    verdict = verifying(script)
    assert verdict.exit_code == 2
    assert verdict.failed is not None
    assert "gyrostat.init(virtual_workers=5)" in str(verdict.failed.outcome.failure)


def test_a_script_without_a_job(verifying: Verify, tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(UsageError, match=r"empty\.py has nothing to verify"):
        verifying(tmp_path / "empty.py")
