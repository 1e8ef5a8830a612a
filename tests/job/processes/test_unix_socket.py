"""Sockets can be had at paths of any length."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.job.processes.unix_socket import bind_at, connect_to


@pytest.mark.parametrize("length", [5, 80, 200])
def test_paths_of_any_length(tmp_path: Path, length: int) -> None:
    directory = tmp_path / ("d" * length)
    directory.mkdir()
    path = directory / "socket"
    with pytest.raises(FileNotFoundError):
        connect_to(path)
    with bind_at(path) as listener:
        listener.listen()
        with connect_to(path) as job_client:
            heard, _ = listener.accept()
            with heard:
                job_client.sendall(b"hello")
                assert heard.recv(5) == b"hello"
        with pytest.raises(OSError, match="in use"):
            bind_at(path)
    with pytest.raises(ConnectionRefusedError):
        connect_to(path)
