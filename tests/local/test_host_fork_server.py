"""Hosts are copies of one process that has imported everything, and owe it nothing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gyrostat.cluster.attempt import AttemptResult
from gyrostat.cluster.job_spec import JobSpec
from gyrostat.local.environment import job_environment
from gyrostat.local.host_files import HostOrder, read_host, read_result, write_order
from gyrostat.local.host_fork_server import HostForkServer
from gyrostat.local.host_pool import HostPool, HostTask, HostTaskState
from gyrostat.local.layout import layout_of_slots
from tests.job.worker_doubles import Departure

TIMEOUT_S = 120.0
SECRET = "gyr_sesame"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class Hosts:
    """A pool of real hosts."""

    def __init__(self, directory: Path, spare: int) -> None:
        self._fork_servers: list[HostForkServer] = []
        self.pool = HostPool(directory / "log", spare=spare, source=self._open)

    def _open(self, log: Path) -> HostForkServer:
        self._fork_servers.append(HostForkServer(log, job_environment(os.environ, ("OF_THE_*",))))
        return self._fork_servers[-1]

    @property
    def fork_server(self) -> int:
        """The process id of the newest one."""
        return self._fork_servers[-1].pid


@contextlib.contextmanager
def hosts(directory: Path, spare: int) -> Iterator[Hosts]:
    found = Hosts(directory, spare)
    try:
        yield found
    finally:
        found.pool.close()


def send(pool: HostPool, directory: Path, script: str) -> HostTask:
    """A job of one worker that runs this script."""
    directory.mkdir()
    (directory / "script.py").write_text(script)
    order = HostOrder(
        job=directory.name,
        attempt=1,
        spec=JobSpec(script="script.py", args=("an argument",), workdir=str(directory), virtual_workers=1),
        slots=(layout_of_slots("cpu:1").slot(0),),
        sockets=str(directory.parent),
    )
    write_order(directory, order)
    return pool.send(directory, 1)


def end_of(task: HostTask) -> AttemptResult:
    assert task.wait(HostTaskState.OVER, TIMEOUT_S)
    result = read_result(Path(task.command.directory), 1)
    assert result is not None
    return result


def children(pid: int) -> list[int]:
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def files(pid: int) -> dict[int, str]:
    return {int(path.name): os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}


def libraries(pid: int) -> set[str]:
    return set(re.findall(r"/\S+torch/lib/\S+", Path(f"/proc/{pid}/maps").read_text()))


def test_hosts_and_their_fork_servers_are_copies_and_share_no_files(tmp_path: Path) -> None:
    with hosts(tmp_path, spare=2) as found:
        found.pool.fill()
        assert found.pool.await_ready(TIMEOUT_S, hosts=2)
        fork_server = found.fork_server
        forked = children(fork_server)
        parents = [parent for host in forked for parent in children(host)]
        assert (len(forked), len(parents)) == (2, 2)
        command = Path(f"/proc/{fork_server}/cmdline").read_bytes()
        everybody = [fork_server, *forked, *parents]
        for pid in everybody:
            assert Path(f"/proc/{pid}/cmdline").read_bytes() == command, "it was started, not forked"
            assert libraries(pid), "torch is not in it"
            assert threads(pid) == 1
            assert os.getsid(pid) == pid
            assert not children(pid) or pid not in parents
        log = str(tmp_path / "log")
        lines = []
        for host in forked:
            stdin, stdout, stderr, *others = (files(host)[number] for number in sorted(files(host)))
            assert (stdin, stderr) == (stdout, log)
            (to_parent,) = (name for name in others if name != "anon_inode:[eventpoll]")
            assert len(others) == 2, "besides, it polls whichever fork server it has"
            lines += [stdin, to_parent]
        for parent in parents:
            stdin, stdout, stderr, *others = (files(parent)[number] for number in sorted(files(parent)))
            assert (stdin, stdout, stderr) == ("/dev/null", log, log)
            sockets = [name for name in others if name.startswith("socket:")]
            assert len(sockets) == 1
            lines += sockets
        assert len(set(lines)) == 6, "a line that two hold does not end with one of them"
        departures = [Departure(pid) for pid in everybody]
    for departure in departures:
        departure.wait()


def test_a_worker_finds_what_training_needs_and_what_is_passed_but_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    before = job_environment(os.environ)
    for name in ("OF_THE_DAEMON", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "3")
        before[name] = "3"
    for name in ("GYROSTAT_TOKEN", "GYROSTAT_ETCD_PASSWORD", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, SECRET)
    script = """
import json, os, signal, sys, threading
import torch

torch.ones(300, 300) @ torch.ones(300, 300)
print(json.dumps({
    "env": dict(os.environ),
    "cwd": os.getcwd(),
    "argv": sys.argv,
    "threads": torch.get_num_threads(),
    "handlers": [signal.getsignal(n) is signal.SIG_DFL for n in (signal.SIGCHLD, signal.SIGHUP)],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "stdin": os.readlink("/proc/self/fd/0"),
    "hash": hash("gyrostat"),
    "proc": [open(f"/proc/{pid}/{what}").read() for pid in ("self", os.getppid()) for what in ("environ", "cmdline")],
    "sockets": sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
                   for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")),
}))
"""
    with hosts(tmp_path, spare=0) as found:
        directory = tmp_path / "job"
        result = end_of(send(found.pool, directory, script))
        assert result.finished, result
    (line,) = result.last_lines
    seen = msgspec.json.decode(line)
    env = seen.pop("env")
    assert SECRET not in str((seen.pop("proc"), env))
    assert seen.pop("sockets") == 1, "more than the line to its host"
    set_by_host = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
    }
    assert env == {
        **before,
        **set_by_host,
        "PYTHONHASHSEED": "0",
        "GYROSTAT_RUNTIME_DIR": str(tmp_path),
    }
    seeded = [sys.executable, "-c", "print(hash('gyrostat'))"]
    assert seen == {
        "cwd": str(directory),
        "argv": [str(directory / "script.py"), "an argument"],
        "threads": 1,
        "handlers": [True, signal.getsignal(signal.SIGHUP) is signal.SIG_DFL],
        "blocked": [],
        "stdin": "/dev/null",
        "hash": int(subprocess.check_output(seeded, env={**before, "PYTHONHASHSEED": "0"})),
    }


def test_hosts_outlive_the_fork_server_and_the_next_job_finds_another(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    with hosts(tmp_path, spare=0) as found:
        waits = send(found.pool, tmp_path / "waits", f"print(open({str(tmp_path / 'gate')!r}).read())")
        with open(tmp_path / "gate", "w") as gate:  # its script runs
            first, host = found.fork_server, read_host(tmp_path / "waits")
            assert host is not None
            assert children(first) == [host.host.pid]
            death = Departure(first)
            os.kill(first, signal.SIGKILL)
            death.wait()
            assert end_of(send(found.pool, tmp_path / "next", "print('next')")).last_lines == ("next",)
            second = found.fork_server
            assert second != first
            assert waits.state is HostTaskState.ASSIGNED
            assert host.host.alive()
            departures = [Departure(pid) for pid in (host.host.pid, *children(host.host.pid), second)]
            assert len(departures) == 3
            gate.write("went on")
        assert end_of(waits).last_lines == ("went on",)
    for departure in departures:
        departure.wait()


def test_hosts_that_were_never_forked_are_not_waited_for(tmp_path: Path) -> None:
    """The pool is closed while the fork server still imports."""
    with hosts(tmp_path, spare=2) as found:
        waits = found.pool.send(tmp_path / "job", 1)
        departure = Departure(found.fork_server)
    departure.wait()
    assert waits.state is HostTaskState.QUEUED
