"""Reads the script and the modules that it imports from its directory, for `suspects`. Installed packages are skipped."""

from __future__ import annotations

from pathlib import Path

from gyrostat.job.processes.protocol import Program
from gyrostat.job.verify.suspects import Suspect, find_suspects, imported

_MAX_FILES = 100


def suspects_in(program: Program, directory: Path) -> tuple[Suspect, ...]:
    """All suspects of the program: the script's own first, then those of the files it imports."""
    root = directory if program.module else (directory / program.name).parent
    first = _find(root, program.name) if program.module else directory / program.name
    waiting: list[Path | None] = [first]
    seen: set[Path] = set()
    suspects: list[Suspect] = []
    while waiting and len(seen) < _MAX_FILES:
        path = waiting.pop(0)
        if path is None or path in seen:
            continue
        seen.add(path)
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        suspects += find_suspects(str(path.relative_to(root)), source)
        waiting += [_find(root, name) for name in imported(source)]
    return tuple(suspects)


def _find(root: Path, module: str) -> Path | None:
    """The file of a module of that name below `root`."""
    base = root.joinpath(*module.split("."))
    for path in (base.with_name(f"{base.name}.py"), base / "__main__.py", base / "__init__.py"):
        if path.is_file():
            return path
    return None
