"""Where recorded traces are: outside the project, and not everywhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def data(name: str) -> Path:
    """The path of a recorded file; the test is skipped where it is not there."""
    directory = Path(os.environ.get("GYROSTAT_DATA", ROOT / "../shared/data"))
    path = directory / name
    if not path.exists():
        pytest.skip(f"{path} is not there: set GYROSTAT_DATA to the directory with the traces")
    return path
