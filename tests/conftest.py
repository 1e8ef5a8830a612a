"""What tests of all packages share: one fork server for the whole session, and `launch`, which runs a script as
a job.

    from tests.conftest import Launch

    def test_something(launch: Launch) -> None:
        outcome = launch(SCRIPT, virtual_workers=4, workers=2)
        assert outcome.digest == launch(SCRIPT, virtual_workers=4, reference=True).digest

`launch` takes the text of a script or the path of one, and raises if the run fails; with `check=False` it
returns the outcome either way. Starting a worker costs tens of milliseconds, since all are forked from one
parent.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from gyrostat.core.job import (
    CheckpointPolicy,
    Determinism,
    DevicePool,
    Probe,
    RecoveryMode,
    ReductionOrder,
    TrainingOptions,
)
from gyrostat.core.placement import Placement
from gyrostat.job.control.failure_policy import FailurePolicy
from gyrostat.job.control.observer import Observer
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.control.run_request import OutputFiles, WorkerOverrides
from gyrostat.job.diagnostics.stragglers import StragglerPolicy
from gyrostat.job.diagnostics.watchdog import WatchdogPolicy
from gyrostat.job.launcher import RunRequest, run_job
from gyrostat.job.processes.protocol import Program
from gyrostat.job.processes.start import WorkerForkServer

# How long an example takes says more of a busy machine than of what it tests.
settings.register_profile("however slow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("however slow")


class Launch:
    """Runs a script as a job and returns its outcome."""

    def __init__(self, parent: WorkerForkServer, directory: Path) -> None:
        self._parent = parent
        self.directory = directory
        self._numbers = itertools.count()

    def script(self, text: str) -> Path:
        """A file of its own with this text."""
        path = self.directory / f"script{next(self._numbers)}.py"
        path.write_text(textwrap.dedent(text))
        return path

    def __call__(
        self,
        script: str | Path,
        *,
        virtual_workers: int = 1,
        workers: int = 1,
        placement: Sequence[int] | None = None,
        reference: bool = False,
        args: Sequence[str] = (),
        checkpoint: CheckpointPolicy | None = None,
        probe: Probe | None = None,
        stop_after: int | None = None,
        threads: int = 1,
        reduction: ReductionOrder | None = ReductionOrder.DDP,
        determinism: Determinism = Determinism.ELASTIC,
        pool: DevicePool | None = None,
        check_fingerprint: bool = True,
        env: Mapping[str, str] | None = None,
        worker_env: Mapping[int, Mapping[str, str]] | None = None,
        worker_threads: Mapping[int, int] | None = None,
        log_dir: Path | None = None,
        observer: Observer | None = None,
        schedule: Sequence[tuple[int, int]] = (),
        name: str | None = None,
        restarts: int = 0,
        recovery: RecoveryMode = RecoveryMode.PEERS,
        min_workers: int = 1,
        heartbeat_timeout_s: float = 0.0,
        paced: Sequence[float] = (),
        batch_size: int | None = None,
        grace_s: float = 30.0,
        stragglers: StragglerPolicy | None = None,
        poison_limit: int = 3,
        watchdog: WatchdogPolicy | None = None,
        check: bool = True,
    ) -> Outcome:
        """`placement` says how many virtual workers each worker runs; without it, `workers` share evenly."""
        path = script if isinstance(script, Path) else self.script(script)
        counts = (
            Placement.even(virtual_workers, workers)
            if placement is None
            else Placement.from_counts(placement)
        )
        request = RunRequest(
            program=Program(name=str(path), args=tuple(args)),
            placement=counts,
            options=TrainingOptions(
                threads=threads,
                reduction=reduction,
                determinism=determinism,
                pool=pool,
                check_fingerprint=check_fingerprint,
                batch_size=batch_size,
                reference=reference,
                recovery=recovery,
                checkpoint=checkpoint,
                stop_after=stop_after,
                probe=probe,
            ),
            failures=FailurePolicy(
                min_workers=min_workers,
                heartbeat_timeout_s=heartbeat_timeout_s,
                grace_s=grace_s,
                restarts=restarts,
                poison_limit=poison_limit,
                stragglers=stragglers or StragglerPolicy(),
                watchdog=watchdog,
            ),
            output=OutputFiles(log_dir=log_dir),
            overrides=WorkerOverrides(paced=paced, env=worker_env or {}, threads=worker_threads or {}),
            schedule=schedule,
            name=name,
            cwd=self.directory,
            env=env or {},
        )
        outcome = run_job(request, parent=self._parent, observer=observer)
        return outcome.check() if check else outcome


@pytest.fixture(scope="session")
def fork_server() -> Iterator[WorkerForkServer]:
    """A fork server that has imported everything."""
    with WorkerForkServer() as parent:
        parent.wait_until_ready()
        yield parent


@pytest.fixture
def launch(fork_server: WorkerForkServer, tmp_path: Path) -> Launch:
    """Scripts run in the test's own directory."""
    return Launch(fork_server, tmp_path)
