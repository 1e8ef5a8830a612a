"""What a scan measures within its worker, and what is made of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gyrostat.core.errors import ScriptFailed, UsageError
from gyrostat.core.job import DeviceMix, DevicePool
from gyrostat.job.processes.protocol import Program
from gyrostat.job.processes.start import WorkerForkServer
from gyrostat.job.scan.measured import Measured
from gyrostat.job.scan.scanner import ScanRequest, scan
from gyrostat.job.scan.verdict import ScanRow, decide, interval

POOL = DevicePool(types=("avx512", "avx2"))


def run(turns: list[float], **operators: float) -> Measured:
    return Measured(
        cpu_type="avx512",
        turns=turns,
        operators=operators,
        modules={"model (Net)": sum(operators.values())},
    )


def test_the_slowdown_is_the_median_of_pairs_and_the_dearest_operator_stands_first() -> None:
    verdict = decide(
        run([0.010, 0.010, 0.005], conv=0.002, relu=0.001, out=0.001),
        run([0.015, 0.020, 0.005, 9.0], conv=0.004, relu=0.001, fill=0.0005),
        pool=POOL,
        cpu_type="avx512",
        threshold=1.05,
    )
    assert (verdict.slowdown, verdict.low, verdict.high) == (1.5, 1.0, 2.0)
    assert verdict.operators[0] == ScanRow(
        name="conv", elastic_ms=2.0, heterogeneous_ms=4.0, share=0.2, added=0.2
    )
    assert verdict.operators[0].ratio == 2.0
    assert [row.name for row in verdict.operators] == ["conv", "fill", "relu", "out"]
    assert verdict.operators[1].ratio is None
    assert verdict.mix == DeviceMix(pool=("avx512", "avx2"), slowdown=1.5, mixes_types=False)
    assert verdict.reason == (
        "no: pins for avx512, avx2 make a step 1.50× as long here, more than 1.05×, most of it in conv, fill"
    )


def test_a_cheap_model_may_mix_types() -> None:
    verdict = decide(run([0.004]), run([0.00416]), pool=POOL, cpu_type="avx512", threshold=1.05)
    assert verdict.mix.mixes_types
    assert verdict.reason == "yes: pins for avx512, avx2 make a step 1.04× as long here, at most 1.05×"


def test_the_interval_leaves_out_as_much_as_95_percent_allow() -> None:
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert interval([float(value) for value in range(1, 21)]) == (6.0, 15.0)


SCRIPT = """
import torch, gyrostat
job = gyrostat.init()
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = job.dataloader(torch.utils.data.TensorDataset(torch.rand(40, 3, 8, 8)), batch_size=4)
job.track(model=model, optimizer=optimizer)
for step in job.steps(train):
    for (x,) in step:
        step.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""


Parents = tuple[WorkerForkServer, WorkerForkServer]


@pytest.fixture(scope="module")
def parents(fork_server: WorkerForkServer) -> Iterator[Parents]:
    with WorkerForkServer() as second:
        yield fork_server, second


def request(directory: Path, steps: int, script: str = SCRIPT) -> ScanRequest:
    (directory / "train.py").write_text(script)
    return ScanRequest(program=Program(name="train.py"), pool=POOL, steps=steps, profiled=2, cwd=directory)


def test_operators_and_modules_are_named_backward_included(parents: Parents, tmp_path: Path) -> None:
    verdict = scan(request(tmp_path, 3), parents=parents)
    assert verdict.slowdown > 0
    operators = {row.name for row in verdict.operators}
    assert {"mkldnn_convolution", "convolution_backward", "addmm", "mm"} <= operators
    modules = {row.name: row for row in verdict.modules}
    assert {"model.0 (Conv2d)", "model.2 (Linear)", "(update)"} <= modules.keys()
    forward_and_backward = sum(
        row.elastic_ms
        for row in verdict.operators
        if row.name in ("mkldnn_convolution", "convolution_backward")
    )
    assert modules["model.0 (Conv2d)"].elastic_ms >= 0.5 * forward_and_backward
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_script_that_ends_too_soon_says_so(parents: Parents, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="made 10 steps, but a scan needs 15: give it more data or epochs"):
        scan(request(tmp_path, 8), parents=parents)


def test_a_script_that_fails_is_an_error(parents: Parents, tmp_path: Path) -> None:
    with pytest.raises(ScriptFailed, match="ZeroDivisionError"):
        scan(request(tmp_path, 5, "1 / 0"), parents=parents)
