"""The process that forks hosts: it has imported all that a host and the workers of its job need, and does nothing else.

Importing torch takes seconds of a core, and would take them from jobs that train; forking takes milliseconds, and the copies
share memory. So the daemon starts one host fork server, which forks hosts (`host`), each of which forks a fork server for
its workers.

`python -m gyrostat.local.host_fork_server FD` serves the daemon through the socket FD. A byte with a socket attached requests
a host with this socket as its standard input and output. There is no reply except the host's own output; if it cannot be
forked, the socket is closed. Forking is safe while the fork server has one OS thread and runs no operator.

A host is independent afterwards: it leads a session of its own, has the environment that the daemon built for jobs and no
files of other hosts, and outlives the fork server, which ends with the daemon. `HostForkServer` is the daemon's side.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from gyrostat.core import logs
from gyrostat.job.processes import fork_server, worker
from gyrostat.job.processes.start import ONE_THREAD
from gyrostat.local import host
from gyrostat.local.environment import temporary_variables

_REQUEST = b"!"


class HostForkServer:
    """A running fork server. It accepts requests at once, and serves them when it has imported everything."""

    def __init__(self, log: Path, env: Mapping[str, str]) -> None:
        """`env`: the whole environment of hosts and workers (`environment.job_environment`)."""
        self._socket, theirs = socket.socketpair()
        try:
            with theirs, log.open("ab") as file:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "gyrostat.local.host_fork_server", str(theirs.fileno())],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except BaseException:
            self._socket.close()
            raise
        self.pid = self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def spawn(self, line: socket.socket) -> None:
        """Request a host with this socket as its standard input and output. The caller closes the socket. Raises
        BrokenPipeError if the fork server has just ended."""
        socket.send_fds(self._socket, [_REQUEST], [line.fileno()])

    def end(self) -> None:
        """Hosts go on; those that it has not forked yet never will be."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


def main() -> None:
    logs.configure_from_environment()
    daemon = socket.socket(fileno=int(sys.argv[1]))
    _import_everything()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps hosts that have ended
    while True:
        request, files, _, _ = socket.recv_fds(daemon, len(_REQUEST), 1)
        if not request:
            return
        (line,) = files
        try:
            pid = os.fork()
        except OSError:
            traceback.print_exc()
            pid = -1
        if pid == 0:
            _become_host(daemon, line)
        os.close(line)


def _import_everything() -> None:
    """With one thread, which libraries read when they are imported; then restore the environment for hosts."""
    with temporary_variables(dict.fromkeys(ONE_THREAD, "1")):
        fork_server.preload()


def _become_host(daemon: socket.socket, line: int) -> NoReturn:
    """In the child: close the fork server's files, then host a job."""
    code = 1
    try:
        daemon.close()
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(line, 0)
        os.dup2(line, 1)
        os.close(line)
        host.main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        worker.exit_process(code)


if __name__ == "__main__":
    main()
