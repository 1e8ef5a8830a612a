"""A job that waits for a host gets one, or is called off; nothing in between."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from gyrostat.local.pool import HostPool


def host_script(directory: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """What is run instead of a host."""
    script = directory / "host.sh"
    script.write_text("#!/bin/sh\ncd " + str(directory) + "\n" + textwrap.dedent(text))
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))


def test_a_host_that_dies_before_it_is_ready_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_script(
        tmp_path,
        monkeypatch,
        """
        mkdir first 2>/dev/null && exit 1
        mkdir second 2>/dev/null && exit 1
        echo ready
        read -r errand
        echo "$errand" >> taken
        """,
    )
    pool = HostPool(tmp_path / "log", spare=0)
    dispatch = pool.send(tmp_path / "job", 7)
    with pool._changed:
        assert pool._changed.wait_for(lambda: dispatch.over, 20.0)
    pool.close()
    assert (tmp_path / "taken").read_text() == f'{{"directory":"{tmp_path}/job","attempt":7}}\n'


def test_what_could_not_be_sent_is_not_taken_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool(tmp_path / "log", spare=1)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError):
        pool.send(tmp_path / "first", 1)
    host_script(tmp_path, monkeypatch, "echo ready; cat > taken; echo ready")
    second = pool.send(tmp_path / "second", 1)
    with pool._changed:
        assert pool._changed.wait_for(lambda: not pool._waiting, 20.0)
    assert not pool.call_off(second)
    pool.close()
    for host in list(pool._busy):
        host.process.wait()
    assert '"first"' not in (tmp_path / "taken").read_text()
