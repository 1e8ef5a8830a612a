"""A cluster for tests: a daemon in this process, real hosts and workers, state in a directory of the test's own.

Jobs run `SCRIPT`, which computes for real and takes a few milliseconds per step by sleeping, so that there is time to
disturb it, until a file tells it to hurry. Its result is compared
with `fixed`, the same script run undisturbed on fixed workers.
"""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.layout import ClusterLayout
from gyrostat.cluster.records import JobRecord, JobState
from gyrostat.core.job import ReductionOrder
from gyrostat.local.daemon import Daemon
from gyrostat.local.home import Home
from gyrostat.local.layout import layout_of_slots
from tests.conftest import Launch

SCRIPT = textwrap.dedent(
    """
    import os
    import sys
    import time

    import torch

    import gyrostat

    steps, pause, hurry = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    job = gyrostat.init(seed=5)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12), torch.nn.Dropout(0.2), torch.nn.Linear(12, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(96, 6), torch.randint(3, (96,)))
    loader = job.dataloader(data, batch_size=3, shuffle=True)
    job.track(model=model, optimizer=optimizer)
    for epoch in job.epochs(10_000):
        for step in job.steps(loader, limit=steps - job.step):
            for x, y in step:
                step.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            job.log(lr=0.01)
            time.sleep(0 if os.path.exists(hurry) else pause)
        if job.step >= steps:
            break
    print("the end, after step", job.step)
    """
)
TIMEOUT_S = 120.0


def write_script(directory: Path, text: str = SCRIPT) -> Path:
    path = directory / "train.py"
    path.write_text(text)
    return path


def spec(directory: Path, steps: int, pause: float = 0.01, **fields: Any) -> JobSpec:
    """A job that runs this many steps of `SCRIPT`."""
    return JobSpec(
        script="train.py",
        args=(str(steps), str(pause), f"hurry-{fields.get('name')}"),
        workdir=str(directory),
        **{"virtual_workers": 4, "reduction": ReductionOrder.DDP, **fields},
    )


def hurry(job: JobSpec) -> None:
    """From now on it does not sleep: what had to happen while it ran has happened."""
    (Path(job.workdir) / job.args[2]).touch()


def fixed(launch: Launch, job: JobSpec) -> str:
    """The result of the job, undisturbed on one worker."""
    path = Path(job.workdir) / job.script
    args = (job.args[0], "0", "-")
    digest = launch(path, virtual_workers=job.virtual_workers, workers=1, args=args).digest
    assert digest is not None
    return digest


@contextlib.contextmanager
def running(
    directory: Path, devices: str | ClusterLayout = "cpu:4", policy: str = "wfs", **options: Any
) -> Iterator[Daemon]:
    """A daemon with its state below `directory`; jobs that are left at the end are checkpointed and stopped."""
    layout = layout_of_slots(devices) if isinstance(devices, str) else devices
    daemon = Daemon(Home(directory / "state"), layout, policy, **options)
    with daemon:
        try:
            yield daemon
        finally:
            daemon.service.shutdown()
            assert daemon.wait(TIMEOUT_S)


def until(daemon: Daemon, reached: Callable[[], bool], what: str = "") -> None:
    """Wait until it is so; every event makes us look again."""
    deadline = time.monotonic() + TIMEOUT_S
    while not reached():
        assert time.monotonic() < deadline, f"{what}: {[_describe(job) for job in daemon.service.jobs(None)]}"
        assert not daemon.wait(0.02), "the daemon has ended"


def finished(daemon: Daemon, *ids: str) -> list[JobRecord]:
    """Wait until these jobs have ended, and see that all ended well."""
    until(daemon, lambda: all(daemon.service.job(id_, None).state.over for id_ in ids), "ends")
    records = [daemon.service.job(id_, None) for id_ in ids]
    assert [record.state for record in records] == [JobState.FINISHED] * len(ids), [
        _describe(job) for job in records
    ]
    return records


def at_step(daemon: Daemon, id_: str, step: int) -> None:
    until(daemon, lambda: daemon.service.job(id_, None).step >= step, f"{id_} at step {step}")


def _describe(job: JobRecord) -> str:
    return f"{job.id} {job.state} at {job.step} on {job.devices}: {job.reason}; {job.last_lines[-3:]}"
