"""A job whose host is killed or whose script hangs says truthfully what happens to it, and from where it starts again."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.cluster.records import JobState
from gyrostat.local.host_files import CHECKPOINTS, LOGS, read_host
from tests.conftest import Launch
from tests.local.clusters import SCRIPT, at_step, finished, fixed, hurry, running, spec, until, write_script

WAITS = SCRIPT.replace(
    "job = gyrostat.init", 'while os.path.exists("hold"):\n    time.sleep(0.01)\njob = gyrostat.init'
).replace(
    "        for x, y in step:",
    '        while job.step == 30 and not os.path.exists("go"):\n            time.sleep(0.01)\n        for x, y in step:',
)
"""Does not begin to train while a file `hold` exists, and stays at step 30 until there is a file `go`."""


@pytest.mark.parametrize("every", [0, 20], ids=["no checkpoint", "a checkpoint"])
def test_where_it_starts_again(launch: Launch, tmp_path: Path, every: int) -> None:
    write_script(tmp_path, WAITS)
    job = spec(tmp_path, 40, name="a", max=1, checkpoint_every=every)
    with running(tmp_path, "cpu:1", spare=0) as daemon:
        service = daemon.service
        id_ = service.submit(job, "me").id
        at_step(daemon, id_, 25)
        checkpoints = daemon.home.job(id_) / CHECKPOINTS
        until(daemon, lambda: not every or (checkpoints / "step-00000020").exists(), "has a checkpoint")
        (tmp_path / "hold").touch()
        host = read_host(daemon.home.job(id_))
        assert host is not None
        assert host.host.end(timeout_s=60.0)
        until(daemon, lambda: service.job(id_, None).attempts == 2, "starts again")
        record = service.job(id_, None)
        assert (record.state, record.step) == (JobState.STARTING, every)
        where = "from its checkpoint of step 20" if every else "from the beginning: it has no checkpoint"
        assert record.reason == f"its host was killed; it restarts {where}"
        (tmp_path / "go").touch()
        (tmp_path / "hold").unlink()
        hurry(job)
        (record,) = finished(daemon, id_)
    assert record.digest == fixed(launch, job)


def test_the_watchdog_of_a_job_writes_stacks_to_its_log(tmp_path: Path) -> None:
    write_script(tmp_path, WAITS)
    job = spec(tmp_path, 40, name="a", max=1, watchdog=0.5)
    with running(tmp_path, "cpu:1", spare=0) as daemon:
        id_ = daemon.service.submit(job, "me").id
        log = daemon.home.job(id_) / LOGS / "host.log"
        until(
            daemon,
            lambda: log.exists() and "no step was completed for 0.5 s: worker 0 hangs at" in log.read_text(),
            "stands still",
        )
        (tmp_path / "go").touch()
        finished(daemon, id_)
