"""A job that waits for a host gets one, or is cancelled; nothing in between."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from gyrostat.local.host_pool import HostPool, HostTask, HostTaskState
from tests.local.fork_servers import FakeForkServer

TIMEOUT_S = 60.0
TAKES_ONE = """
    echo ready
    read -r command && echo "$command" >> taken
"""


def await_end(task: HostTask) -> None:
    assert task.wait(HostTaskState.OVER, TIMEOUT_S)


def test_a_host_that_dies_before_it_is_ready_is_replaced(tmp_path: Path) -> None:
    fork_server = FakeForkServer(
        tmp_path,
        f"""
        mkdir first 2>/dev/null && exit 1
        mkdir second 2>/dev/null && exit 1
        {TAKES_ONE}
        """,
    )
    pool = HostPool(tmp_path / "log", spare=0, source=fork_server)
    await_end(pool.send(tmp_path / "job", 7))
    pool.close()
    fork_server.wait()
    assert (tmp_path / "taken").read_text() == f'{{"directory":"{tmp_path}/job","attempt":7}}\n'
    assert fork_server.opened == 1


def test_each_job_has_a_host_of_its_own_and_spare_ones_take_their_place(tmp_path: Path) -> None:
    fork_server = FakeForkServer(
        tmp_path, 'echo $$ >> hosts; echo ready; read -r command && echo "$command" >> taken'
    )
    pool = HostPool(tmp_path / "log", spare=2, source=fork_server)
    for attempt in (1, 2, 3):
        await_end(pool.send(tmp_path / "job", attempt))
    assert pool.await_ready(TIMEOUT_S, hosts=2)
    pool.close()
    assert not pool.await_ready(0.0)
    fork_server.wait()
    assert len((tmp_path / "taken").read_text().splitlines()) == 3
    assert len((tmp_path / "hosts").read_text().split()) == 5


def test_a_fork_server_that_ended_is_opened_again(tmp_path: Path) -> None:
    fork_server = FakeForkServer(tmp_path, TAKES_ONE)
    pool = HostPool(tmp_path / "log", spare=0, source=fork_server)
    await_end(pool.send(tmp_path / "job", 1))
    fork_server.living = False
    await_end(pool.send(tmp_path / "job", 2))
    pool.close()
    fork_server.wait()
    assert fork_server.opened == 2


def test_one_that_dies_just_when_it_is_asked_is_opened_again(tmp_path: Path) -> None:
    class Dying(FakeForkServer):
        def spawn(self, line: socket.socket) -> None:
            self.living = self.opened > 1
            super().spawn(line)

    fork_server = Dying(tmp_path, TAKES_ONE)
    pool = HostPool(tmp_path / "log", spare=0, source=fork_server)
    await_end(pool.send(tmp_path / "job", 1))
    pool.close()
    fork_server.wait()
    assert fork_server.opened == 2


def test_what_could_not_be_sent_is_not_taken_later(tmp_path: Path) -> None:
    class Full(FakeForkServer):
        def spawn(self, line: socket.socket) -> None:
            if not (tmp_path / "room").exists():
                raise OSError(errno.EMFILE, "too many open files")
            super().spawn(line)

    fork_server = Full(tmp_path, "echo ready; cat >> taken")
    pool = HostPool(tmp_path / "log", spare=1, source=fork_server)
    with pytest.raises(OSError, match="too many open files"):
        pool.send(tmp_path / "first", 1)
    (tmp_path / "room").touch()
    second = pool.send(tmp_path / "second", 1)
    assert second.wait(HostTaskState.ASSIGNED, TIMEOUT_S)
    assert not pool.cancel(second)
    pool.close()
    fork_server.wait()
    assert (tmp_path / "taken").read_text() == f'{{"directory":"{tmp_path}/second","attempt":1}}\n'


def test_a_cancelled_task_leaves_no_host_behind(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    fork_server = FakeForkServer(tmp_path, "read -r word < gate; echo ready; cat > left")
    pool = HostPool(tmp_path / "log", spare=0, source=fork_server)
    task = pool.send(tmp_path / "job", 1)
    assert pool.cancel(task)
    assert not pool.cancel(task)
    (tmp_path / "gate").write_text("go\n")
    fork_server.wait()
    pool.close()
    assert (tmp_path / "left").read_text() == ""
