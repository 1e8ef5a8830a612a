"""Directories and scripts that must lie below certain directories, checked on what was opened, not on its name.

A name that was checked may mean something else a moment later: a symbolic link is swapped. So the file is opened first,
links followed; the kernel says where that file is; and what was opened is used, whatever its name means by then.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import PurePosixPath
from types import ModuleType

from gyrostat.core.errors import UsageError
from gyrostat.job.processes.protocol import Program

Beneath = tuple[tuple[str, ...], ...]
"""Groups of directories: of every group, one must be above. Empty: anything may be opened."""


def open_beneath(
    path: str, beneath: Beneath, what: str, flags: int = 0, directory: int | None = None
) -> tuple[int, str]:
    """A descriptor of it, and where it really is. A relative path begins in `directory`, or else in the current one.

    Raises `UsageError` if that is not allowed or it cannot be opened.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags, dir_fd=directory)
    except OSError as error:
        raise UsageError(f"the {what} {path!r} cannot be opened: {error.strerror}") from error
    real = os.readlink(f"/proc/self/fd/{file}")
    for group in beneath:
        if not _is_below(real, group):
            os.close(file)
            raise UsageError(f"the {what} {path!r} is at {real}, which is not below {' or '.join(group)}")
    return file, real


def check_program(program: Program, workdir: str) -> None:
    """Raise `UsageError` if it or its working directory is not where it must be, or cannot be opened."""
    if not program.beneath:
        return
    directory, _ = open_beneath(workdir, program.beneath, "workdir", os.O_DIRECTORY)
    try:
        if not program.module:
            os.close(open_beneath(program.name, program.beneath, "script", directory=directory)[0])
    finally:
        os.close(directory)


def enter_directory(path: str, beneath: Beneath) -> None:
    """Make it the current one."""
    if not beneath:
        os.chdir(path)
        return
    file, _ = open_beneath(path, beneath, "workdir", os.O_DIRECTORY)
    try:
        os.fchdir(file)
    finally:
        os.close(file)


def run_script(path: str, beneath: Beneath) -> None:
    """Run it as `__main__`, as `runpy.run_path` does, from what was opened."""
    file, real = open_beneath(path, beneath, "script")
    with os.fdopen(file, "rb") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise UsageError(f"the script {path!r} is not a file")
        source = opened.read()
    sys.path.insert(0, os.path.dirname(real))
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __cached__=None, __package__="")
    sys.modules["__main__"] = main
    exec(compile(source, path, "exec"), main.__dict__)


def _is_below(real: str, group: Sequence[str]) -> bool:
    return any(PurePosixPath(real).is_relative_to(os.path.realpath(root)) for root in group)
