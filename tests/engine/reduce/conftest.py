from __future__ import annotations

import pytest

from gyrostat.engine.transport.shared_memory import SWITCH


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers talk as if they lived on several machines."""
    monkeypatch.setenv(SWITCH, "0")
