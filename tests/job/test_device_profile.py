"""A script is measured with other batch sizes than its own, and what was found goes straight into the planner."""

from __future__ import annotations

import pytest

from gyrostat.cli.profile_device import merged
from gyrostat.core.errors import ScriptFailed, UsageError
from gyrostat.core.profile import Profile, Speed
from gyrostat.job.device_profile import DeviceProfileRequest, profile_device
from gyrostat.job.processes.protocol import Program
from gyrostat.job.processes.start import WorkerForkServer
from gyrostat.sched.planner.split import best_split
from tests.conftest import Launch

SCRIPT = """
    import torch

    import gyrostat

    job = gyrostat.init(seed=5, virtual_workers=3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12), torch.nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = job.dataloader(torch.utils.data.TensorDataset(torch.randn(96, 6)), batch_size=[4, 2, 1], shuffle=True)
    job.track(model=model, optimizer=optimizer)
    for epoch in job.epochs(9):
        for step in job.steps(loader):
            for (x,) in step:
                print(len(x))
                step.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
"""


def measure(
    parent: WorkerForkServer, launch: Launch, script: str = SCRIPT, **asked: object
) -> tuple[Profile, list[str]]:
    messages: list[str] = []
    request = DeviceProfileRequest(
        program=Program(name=str(launch.script(script))),
        **{"batches": (4, 2), "steps": 4, **asked},  # type: ignore[arg-type]
    )
    return profile_device(request, parent, messages.append), messages


def test_throughput_by_batch_size_and_the_exchange(fork_server: WorkerForkServer, launch: Launch) -> None:
    found, messages = measure(fork_server, launch, device_type="mine", workload="small")
    assert (found.workload, found.types) == ("small", ("mine",))
    speed = found.speed("mine")
    assert [batch for batch, _ in speed.throughput] == [2, 4]
    assert [workers for workers, _ in speed.exchange] == [2]
    # Batch norm cannot do with one sample: the exchange is measured with the smallest batch instead.
    assert "(batches of 2)" in messages[-1]
    split = best_split(found, batch=4, virtual_workers=3, devices={"mine": 2})
    assert split is not None


def test_the_device_says_what_it_is(fork_server: WorkerForkServer, launch: Launch) -> None:
    found, _ = measure(fork_server, launch, batches=(4,), workers=())
    assert found.workload == "script0"
    assert found.types[0] in ("sse", "avx2", "avx512", "cpu")
    assert found.speed(found.types[0]).exchange == ()


def test_its_own_batch_size_is_overruled(launch: Launch) -> None:
    outcome = launch(SCRIPT, virtual_workers=1, batch_size=6, stop_after=5)
    assert outcome.samples == 5 * 6


def test_what_cannot_be_measured(fork_server: WorkerForkServer, launch: Launch) -> None:
    with pytest.raises(UsageError, match="ended after 2 steps"):
        measure(fork_server, launch, SCRIPT.replace("epochs(9)", "epochs(2)"), batches=(96,))
    with pytest.raises(UsageError, match=r"steps have 96.0 samples on average, not 200"):
        measure(fork_server, launch, batches=(200,))
    with pytest.raises(ScriptFailed, match="give it a batch_size"):
        measure(fork_server, launch, SCRIPT.replace("batch_size=[4, 2, 1], shuffle=True", "batch_size=None"))


@pytest.mark.parametrize(
    "asked", [{"batches": ()}, {"batches": (0,)}, {"batches": (2, 2)}, {"workers": (1,)}, {"steps": 2}]
)
def test_requests_that_cannot_be(
    fork_server: WorkerForkServer, launch: Launch, asked: dict[str, object]
) -> None:
    with pytest.raises(UsageError):
        measure(fork_server, launch, SCRIPT, **asked)


def test_what_does_not_fit_is_left_out(fork_server: WorkerForkServer, launch: Launch) -> None:
    script = SCRIPT.replace(
        "print(len(x))", "exec('raise torch.OutOfMemoryError(\"no room\")' if len(x) > 4 else 'pass')"
    )
    found, messages = measure(fork_server, launch, script, batches=(4, 8, 16), workers=(), device_type="mine")
    assert [batch for batch, _ in found.speed("mine").throughput] == [4]
    assert "batch 8 does not fit" in messages[-1]


def test_types_are_measured_one_by_one() -> None:
    known = Profile("w", {"v100": Speed(((4, 9.0),)), "p100": Speed(((4, 1.0),))})
    found = Profile("w", {"p100": Speed(((4, 2.0), (8, 3.0)), ((2, 0.1),))})
    assert merged(None, found) == found
    assert merged(known, found).speeds == {"v100": known.speed("v100"), "p100": found.speed("p100")}
    with pytest.raises(UsageError, match="--workload w"):
        merged(known, Profile("other", found.speeds))
