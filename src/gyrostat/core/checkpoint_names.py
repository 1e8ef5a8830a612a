"""The checkpoints of a directory by name, `step-00000120`: for processes that do not read them, without torch."""

from __future__ import annotations

import re
from pathlib import Path

from gyrostat.core.errors import CheckpointError, UsageError

NAME = re.compile(r"step-(\d{8,18})(\.replaced)?")
"""The name of a checkpoint's directory: its step, and a suffix while it is being replaced."""


def list_checkpoints(directory: Path) -> list[Path]:
    """The paths of checkpoints in a directory, newest first. They may be damaged."""
    try:
        names = [name for entry in directory.iterdir() if (name := NAME.fullmatch(entry.name))]
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise UsageError(f"{directory} is not a directory; give one that holds checkpoints") from None
    except OSError as error:
        raise CheckpointError(f"checkpoints in {directory} cannot be listed: {error.strerror}") from error
    names.sort(key=lambda name: (-int(name[1]), name[2] is not None))
    return [directory / name[0] for name in names]


def newest_step(directory: Path) -> int | None:
    """The step of the newest checkpoint in a directory; None: there is none, or none can be seen."""
    try:
        found = list_checkpoints(directory)
    except (UsageError, CheckpointError):
        return None
    name = NAME.fullmatch(found[0].name) if found else None
    return None if name is None else int(name[1])
