from __future__ import annotations

import pytest

from gyrostat.engine.environment import SHARED_MEMORY


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers talk as if they lived on several machines."""
    monkeypatch.setenv(SHARED_MEMORY, "0")
