"""There is no room for checkpoints, and a worker is killed: the job says that they failed, recovers from peers, and ends with
the same bits. When there is room again they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.core.events import EventKind
from gyrostat.core.job import CheckpointPolicy
from tests.conftest import Launch
from tests.faults import test_recovery
from tests.faults.injector import fail_at
from tests.faults.test_recovery import STEP, N, check, held_by

ROOM_AGAIN = 7
SCRIPT = test_recovery.SCRIPT.replace(
    "    job = gyrostat.init(seed=4)\n",
    f"""
    import errno
    import os
    import threading

    from gyrostat.engine.script import session
    from gyrostat.engine.checkpoint import store
    from gyrostat.engine.checkpoint.writer import THREAD


    class Disk(store.Disk):
        def write(self, descriptor, data):
            if session.current().step < {ROOM_AGAIN}:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(descriptor, data)


    store.Disk = Disk


    def what_is_being_written_is_over():  # so that it is known of every checkpoint when it was written
        for thread in threading.enumerate():
            if thread.name == THREAD:
                thread.join()


    job = gyrostat.init(seed=4)
""",
).replace(
    "            for (x,) in step:\n",
    "            what_is_being_written_is_over()\n            for (x,) in step:\n",
)
assert SCRIPT.count("what_is_being_written_is_over()") == 2


@pytest.mark.parametrize(
    ("where", "worker", "reports"),
    [
        ("micro_batch", 1, 2),  # worker 0 writes, and reports both failures
        ("checkpoint", 0, 1),  # it dies while it tries the first; another one tries the next
    ],
)
def test_a_worker_is_killed_while_the_disk_is_full(
    launch: Launch, tmp_path: Path, where: str, worker: int, reports: int
) -> None:
    undisturbed = launch(test_recovery.SCRIPT, virtual_workers=N, workers=2, args=["1"])
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"), every=STEP)
    faults = fail_at(step=None if where == "checkpoint" else STEP, where=where, worker=worker)
    outcome = faults.run(launch, SCRIPT, virtual_workers=N, workers=3, args=["1"], checkpoint=policy)
    check(outcome, undisturbed, lost=held_by(worker, 3))
    failed = [event.reason for event in outcome.events if event.kind is EventKind.CHECKPOINT_FAILED]
    assert len(failed) == reports
    assert all("could not be written: No space left on device; earlier ones" in reason for reason in failed)
    assert [written.step for written in outcome.checkpoints] == [9, 12]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000009",
        "step-00000012",
    ]
