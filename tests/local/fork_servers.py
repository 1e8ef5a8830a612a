"""Hosts for tests of the code that sends jobs to them: shell scripts, each a process at the end of a socket."""

from __future__ import annotations

import socket
import subprocess
import textwrap
from pathlib import Path


class FakeForkServer:
    """Stands for a `HostForkServer`. Its hosts run `script`, a shell script, in `directory`."""

    def __init__(self, directory: Path, script: str) -> None:
        self._directory, self._script = directory, script
        self._hosts: list[subprocess.Popen[bytes]] = []
        self.opened = 0
        self.living = True

    def __call__(self, log: Path) -> FakeForkServer:
        """As the pool opens a fork server, and opens another when that has ended."""
        self.opened += 1
        self.living = True
        return self

    def alive(self) -> bool:
        return self.living

    def spawn(self, line: socket.socket) -> None:
        if not self.living:
            raise BrokenPipeError
        command = ["/bin/sh", "-c", textwrap.dedent(self._script)]
        self._hosts.append(
            subprocess.Popen(command, cwd=self._directory, stdin=line.fileno(), stdout=line.fileno())
        )

    def end(self) -> None:
        pass

    def wait(self) -> None:
        """For all hosts to end."""
        for host in self._hosts:
            host.wait()
