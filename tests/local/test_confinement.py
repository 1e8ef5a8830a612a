"""A job that was accepted below its tenant's root starts there only, whatever its links have become meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.records import JobState
from gyrostat.core.errors import UsageError
from gyrostat.local.home import Home
from gyrostat.local.job_files import LocalJobFiles
from tests.local.clusters import finished, running, until


def test_a_link_that_is_swapped_after_submission(tmp_path: Path) -> None:
    root, outside = tmp_path / "tenant", tmp_path / "outside"
    for directory in (root / "code", outside):
        directory.mkdir(parents=True)
        (directory / "train.py").write_text(
            f"import gyrostat, pathlib\ngyrostat.init()\npathlib.Path({str(tmp_path / 'ran')!r}).write_text(__file__)\n"
        )
    for name in ("script.py", "stays.py"):
        os.symlink(root / "code/train.py", root / name)
    os.symlink(root / "code", root / "workdir")
    with running(tmp_path, "cpu:1", spare=0) as daemon:
        service = daemon.service
        assert service.reserve("cpu", 1, wait=60.0)
        swapped = [
            service.submit(JobSpec(script=script, workdir=str(workdir)), "mallory", str(root)).id
            for script, workdir in (("script.py", root), ("train.py", root / "workdir"))
        ]
        for name, target in (("script.py", outside / "train.py"), ("workdir", outside)):
            os.symlink(target, root / "new")
            (root / "new").rename(root / name)
        service.reserve("cpu", 0)
        until(daemon, lambda: all(service.job(id_, None).state.over for id_ in swapped), "is refused")
        for id_, what in zip(swapped, ("script", "workdir"), strict=True):
            record = service.job(id_, None)
            assert record.state is JobState.FAILED
            assert f"the {what} " in record.reason
            assert f"which is not below {root}" in record.reason
        assert not (tmp_path / "ran").exists()
        stays = service.submit(JobSpec(script="stays.py", workdir=str(root)), "mallory", str(root))
        finished(daemon, stays.id)
    assert (tmp_path / "ran").read_text() == str(root / "stays.py")


def test_modules_in_a_cluster_whose_jobs_have_a_place(tmp_path: Path) -> None:
    spec = JobSpec(script="timeit", module=True, workdir=str(tmp_path))
    with pytest.raises(UsageError, match="a module may be anywhere"):
        LocalJobFiles(Home(tmp_path), [tmp_path]).check(spec)
    LocalJobFiles(Home(tmp_path), [tmp_path], modules=True).check(spec)
    LocalJobFiles(Home(tmp_path)).check(spec)
