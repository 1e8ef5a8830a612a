"""Verbs that run in the test's own process configure its logging; every test begins and ends without."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from gyrostat.core import logs


@pytest.fixture(autouse=True)
def unconfigured_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (logs.LEVEL, logs.FORMAT):
        monkeypatch.setenv(name, "")
    logger = logging.getLogger("gyrostat")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before
