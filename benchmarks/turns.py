"""Two sides, each of one or more processes, that take turns in blocks of steps.

Both sides stay alive for the whole comparison: starting and warming up does not count, and while one works the other
waits in a read. Every process of a side joins through a Unix socket (`Turns`). The conductor tells all processes of one
side to make a number of steps and takes the time until the last of them has made them (`Side.run`).
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pairs import Pair, measure_pairs

_STEPS = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
_DONE = b"."
_WARM_UP_STEPS = 10
_JOIN_S = 120.0
_END_S = 60.0


class Turns:
    """In a process that trains. Creating it says that all is set up, and waits for the first turn."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        self.over = False
        self._left = 0
        self._wait()

    def step_done(self) -> bool:
        """Call it at the end of every step; returns when the next one is to be made. False: that was the last."""
        self._left -= 1
        if self._left == 0:
            self._socket.sendall(_DONE)
            self._wait()
        return not self.over

    def _wait(self) -> None:
        data = self._socket.recv(_STEPS.size, socket.MSG_WAITALL)
        self._left = _STEPS.unpack(data)[0] if data else 0
        self.over = self._left == 0


class Side:
    """The processes of one side, from outside. As a context: entered when all have joined, nothing is left after it."""

    def __init__(
        self,
        name: str,
        commands: Sequence[Sequence[str]],
        *,
        address: Path,
        processes: int,
        env: Mapping[str, str],
    ) -> None:
        """`commands` are given `--turns ADDRESS`, and between them start `processes` processes that join there."""
        self.name = name
        self._commands, self._address, self._processes = commands, address, processes
        self._env = {**os.environ, **env}
        self._started: list[subprocess.Popen[bytes]] = []
        self._joined: list[socket.socket] = []

    def __enter__(self) -> Self:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._address))
            listener.listen()
            listener.settimeout(1.0)
            try:
                for command in self._commands:
                    full = [*command, "--turns", str(self._address)]
                    self._started.append(subprocess.Popen(full, env=self._env, stdin=subprocess.DEVNULL))
                self._await_all(listener)
            except BaseException:
                self._end()
                raise
        return self

    def _await_all(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + _JOIN_S
        while len(self._joined) < self._processes:
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                connection.settimeout(_JOIN_S)
                self._joined.append(connection)
            if any(process.poll() is not None for process in self._started) or time.monotonic() > deadline:
                raise SystemExit(f"{self.name}: {len(self._joined)} of {self._processes} processes came up")

    def run(self, steps: int) -> float:
        """All processes make `steps` steps; how many seconds that took."""
        began = time.perf_counter()
        for connection in self._joined:
            connection.sendall(_STEPS.pack(steps))
        for connection in self._joined:
            if connection.recv(1) != _DONE:
                raise SystemExit(f"{self.name}: a process ended in the middle of a block")
        return time.perf_counter() - began

    def pids(self) -> list[int]:
        """The processes that take part: those at the other ends of the sockets."""
        return [_CREDENTIALS.unpack(_peer(connection))[0] for connection in self._joined]

    def finish(self) -> None:
        """Let all processes come to their normal end."""
        for connection in self._joined:
            connection.sendall(_STEPS.pack(0))
        for process in self._started:
            if code := process.wait(_END_S):
                raise SystemExit(f"{self.name}: a process ended with code {code}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for connection in self._joined:
            connection.close()
        for process in self._started:
            process.terminate()  # nothing happens if it has ended
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _peer(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)


def take_turns(ours: Side, theirs: Side, *, pairs: int, block_seconds: float) -> list[Pair]:
    """Both sides' steps per second in `pairs` pairs of blocks of equally many steps."""
    for side in (ours, theirs):
        side.run(_WARM_UP_STEPS)
    slower = max(side.run(_WARM_UP_STEPS) for side in (ours, theirs)) / _WARM_UP_STEPS
    steps = math.ceil(block_seconds / slower)
    measured = measure_pairs(lambda: steps / ours.run(steps), lambda: steps / theirs.run(steps), pairs)
    ours.finish()
    theirs.finish()
    return measured
