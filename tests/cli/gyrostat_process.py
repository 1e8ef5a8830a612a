"""`gyrostat` as its users start it: a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

_MAIN = "from gyrostat.cli.main import main; main()"


@contextlib.contextmanager
def running(
    *args: str | Path, cwd: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Started, and ended with the block if it has not ended itself. `env` is added to its environment."""
    with subprocess.Popen(
        [sys.executable, "-c", _MAIN, *map(str, args)],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "120", "NO_COLOR": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(process: subprocess.Popen[str]) -> tuple[int, list[str], list[str]]:
    """Its exit code, and the lines it printed to stdout and stderr."""
    out, err = process.communicate(timeout=280)
    return process.returncode, out.splitlines(), err.splitlines()


def gyrostat(
    *args: str | Path, cwd: Path, env: Mapping[str, str] | None = None
) -> tuple[int, list[str], list[str]]:
    with running(*args, cwd=cwd, env=env) as process:
        return finish(process)
