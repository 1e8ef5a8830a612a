"""The files of jobs on this machine: scripts are checked, logs and recordings are read. Implements `service.JobFiles`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.records import LogChunk, LogSource
from gyrostat.cluster.service import OutsideRoot
from gyrostat.core.errors import UsageError
from gyrostat.local.home import Home
from gyrostat.local.log_reader import read_part

_LOGS = {
    LogSource.OUTPUT: "output.log",
    LogSource.HOST: "host.log",
    LogSource.METRICS: "metrics.jsonl",
    LogSource.CURVES: "curves.jsonl",
}


class LocalJobFiles:
    def __init__(self, home: Home, workdirs: Sequence[Path] = (), *, modules: bool = False) -> None:
        """`workdirs`: jobs run in these directories or below them only; without any, anywhere. `modules`: they may be modules
        nevertheless, which Python finds anywhere."""
        self._home, self._modules = home, modules
        self._workdirs = [path.resolve() for path in workdirs]

    def check(self, spec: JobSpec) -> None:
        workdir, script = _resolved(spec)
        if self._workdirs and not any(workdir.is_relative_to(root) for root in self._workdirs):
            raise UsageError(
                f"jobs of this cluster run below {', '.join(map(str, self._workdirs))}; not in {spec.workdir}"
            )
        if not os.path.isdir(workdir):
            raise UsageError(f"there is no directory {spec.workdir} for the job to run in")
        if spec.module:
            if self._workdirs and not self._modules:
                raise UsageError(
                    f"jobs of this cluster run scripts below {', '.join(self.workdirs)}; a module may be anywhere"
                )
            return
        if self._workdirs and not any(script.is_relative_to(root) for root in self._workdirs):
            raise UsageError(f"the script {spec.script} is outside the directories of this cluster's jobs")
        if not os.path.isfile(script) or not os.access(script, os.R_OK):
            raise UsageError(f"there is no script {spec.script!r} in {spec.workdir}")

    @property
    def workdirs(self) -> tuple[str, ...]:
        return tuple(map(str, self._workdirs))

    def check_below(self, spec: JobSpec, root: str) -> None:
        top = Path(os.path.realpath(root))
        workdir, script = _resolved(spec)
        for what, path, given in (("workdir", workdir, spec.workdir), ("script", script, spec.script)):
            if not path.is_relative_to(top):
                raise OutsideRoot(f"your jobs run below {top}; the {what} {given!r} is not there")

    def log(self, id_: str, source: LogSource) -> Path:
        """The file; it may not exist yet. Rotated ones have `.1`, `.2` … after its name."""
        return self._home.job(id_) / "logs" / _LOGS[source]

    def read_log(
        self, id_: str, source: LogSource, *, after: str | None, tail: int | None, over: bool
    ) -> LogChunk:
        return read_part(self.log(id_, source), after, tail, over=over)

    def recording(self) -> bytes | None:
        found = self._home.recording_files()
        return found[-1].read_bytes() if found else None


def _resolved(spec: JobSpec) -> tuple[Path, Path]:
    """The working directory and the script (of a module: the directory), links resolved."""
    workdir = Path(os.path.realpath(spec.workdir))
    return workdir, workdir if spec.module else Path(os.path.realpath(workdir / spec.script))
