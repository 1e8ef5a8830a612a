"""Starts and ends server processes on this machine, and notices their ends."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from gyrostat.ps.server.process import ServerProcessSettings


class ServerProcesses:
    """The processes, by name. They end by themselves when the leader is gone."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        command: Sequence[str],
        on_exit: Callable[[str, int], None],
    ) -> None:
        self._selector, self._command, self._on_exit = selector, tuple(command), on_exit
        self._processes: dict[str, tuple[subprocess.Popen[bytes], int]] = {}

    def start(self, settings: ServerProcessSettings) -> None:
        # In a session of its own: Ctrl-C is for the leader, and its last checkpoint needs the servers.
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
        descriptor = os.pidfd_open(process.pid)
        self._processes[settings.name] = process, descriptor
        self._selector.register(descriptor, selectors.EVENT_READ, partial(self._ended, settings.name))
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, which is noticed
            process.stdin.write(msgspec.json.encode(settings) + b"\n")
            process.stdin.close()

    def pid(self, name: str) -> int | None:
        return self._processes[name][0].pid if name in self._processes else None

    def kill(self, name: str) -> None:
        if name in self._processes:
            self._processes[name][0].send_signal(signal.SIGKILL)

    def close(self) -> None:
        """End all of them, also those that are stopped, and wait for it."""
        for process, descriptor in self._processes.values():
            process.kill()
            process.wait()
            self._selector.unregister(descriptor)
            os.close(descriptor)
        self._processes.clear()

    def _ended(self, name: str) -> None:
        process, descriptor = self._processes.pop(name)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        self._on_exit(name, process.wait())
