"""Whether the kernel killed a process because memory ran out: it counts that per control group, and writes it to its log."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_WHOLE_MACHINE = Path("/proc/vmstat")


def counter_file(cgroups: str, root: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """The file with the kernel's counter for the group that /proc/self/cgroup names; None if it is not visible."""
    candidates = []
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        path = path.lstrip("/")
        if "memory" in controllers.split(","):
            # In a container the group may be mounted as the root.
            candidates += [root / "memory" / path / "memory.oom_control", root / "memory/memory.oom_control"]
        elif not controllers:
            candidates += [root / path / "memory.events", root / "memory.events"]
    return next((file for file in candidates if _count(file) is not None), None)


def _count(file: Path) -> int | None:
    try:
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1])


@dataclass
class OutOfMemory:
    """Reports increments of the kernel's counter of out-of-memory kills."""

    file: Path
    _before: int = 0

    def __post_init__(self) -> None:
        self._before = _count(self.file) or 0

    @classmethod
    def here(cls) -> OutOfMemory:
        """For the control group of this process, or the whole machine if the group has no counter."""
        try:
            file = counter_file(Path("/proc/self/cgroup").read_text())
        except OSError:
            file = None
        return cls(file or _WHOLE_MACHINE)

    def since_last_call(self) -> str | None:
        """The counter's change since the last call; None if the kernel killed no process."""
        before, self._before = self._before, _count(self.file) or 0
        if self._before <= before:
            return None
        return f"oom_kill in {self.file} went from {before} to {self._before}"


class KernelLog:
    """The kernel's log /dev/kmsg from now on, if this user may read it."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._file: int | None = None
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError:
            self.close()

    def killed(self, pid: int) -> str | None:
        """The log line about the out-of-memory kill of this process, if there is one."""
        while self._file is not None:
            try:
                record = os.read(self._file, 1 << 13)
            except BrokenPipeError:
                continue  # lines were overwritten before they were read
            except OSError:
                return None
            if not record:
                return None
            line = record.decode("utf-8", "replace").split("\n", 1)[0].partition(";")[2]
            if f"Killed process {pid} " in line:
                return line
        return None

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
