"""Where hosts come from: one process that has imported all that a host and the workers of its job need, and has done
nothing.

Importing torch takes seconds of a core, and would take them from jobs that train; forking takes milliseconds, and copies share
their memory. So the daemon starts one nursery, and the nursery forks hosts (`host`), each of which forks its own fork parent.

`python -m gyrostat.local.host_fork_server FD` serves the daemon through the socket FD. A byte with a socket beside it asks
for a host
that has this as its standard input and output. There is no answer but what the host itself says; of one that cannot be forked,
the socket is closed. Forking is sound while the nursery has one OS thread and runs no operator, as for a fork parent.

A host owes the nursery nothing afterwards: it leads a session of its own, has the environment that the daemon was started with
and no files of other hosts, and lives on when the nursery ends, which it does with the daemon. `HostForkServer` is the
daemon's end.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from gyrostat.job.processes import fork_server, worker
from gyrostat.job.processes.start import ONE_THREAD
from gyrostat.local import host

_REQUEST = b"!"


class HostForkServer:
    """A running nursery; it takes requests from the start, and works them off when it has imported everything."""

    def __init__(self, log: Path) -> None:
        self._socket, theirs = socket.socketpair()
        try:
            with theirs, log.open("ab") as file:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "gyrostat.local.host_fork_server", str(theirs.fileno())],
                    env={"PYTHONHASHSEED": "0", **os.environ},  # as workers have it, who are copies of copies
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
        """Have it fork a host with this as its standard input and output; it remains the caller's to close. Raises
        BrokenPipeError if the nursery has just died."""
        socket.send_fds(self._socket, [_REQUEST], [line.fileno()])

    def end(self) -> None:
        """Hosts live on; those that it has not forked yet never will."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


def main() -> None:
    daemon = socket.socket(fileno=int(sys.argv[1]))
    _import_everything()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries hosts that have ended
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
            _be_host(daemon, line)
        os.close(line)


def _import_everything() -> None:
    """Libraries decide on their threads when they are imported; the environment is the hosts' afterwards."""
    environment = dict(os.environ)
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    fork_server.preload()
    os.environ.clear()
    os.environ.update(environment)


def _be_host(daemon: socket.socket, line: int) -> NoReturn:
    """In the child: let go of what is the nursery's, then host a job."""
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
