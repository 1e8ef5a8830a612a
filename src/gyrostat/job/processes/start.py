"""Two ways to start workers, behind one small port: from the fork parent, or each as a fresh interpreter.

`WorkerForkServer` starts its process once and forks any number of jobs from it, one after the other; it is a fresh
interpreter, or
a copy of this process (`forked`). `ColdStart` exists to be compared with. Neither imports torch here. Both are pollable:
`fileno()` is readable when `exits()` has news.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Protocol, Self, TypeVar

import msgspec

from gyrostat.core.errors import ScriptFailed
from gyrostat.job.processes import fork_server
from gyrostat.job.processes.protocol import (
    Channel,
    Children,
    Exited,
    Fork,
    Forked,
    FromForkParent,
    Hello,
    ServeStore,
    Signal,
    WorkerSpec,
    check_greeting,
    greet,
)
from gyrostat.job.processes.unix_socket import connect_to

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Set to 1 when numerical libraries are imported, they start no threads."""
_LAST_WORDS_S = 10.0

Answer = TypeVar("Answer", Hello, Forked, Children)


class WorkerSource(Protocol):
    """Where workers come from."""

    def start(self, spec: WorkerSpec, stdout: int, stderr: int, channel: socket.socket) -> int:
        """Start a worker on these files, which remain the caller's to close. Returns its process id."""

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a worker that was started here; nothing happens if it has gone."""

    def fileno(self) -> int: ...

    def exits(self) -> list[Exited]:
        """The workers that exited since the last call. Does not wait."""


class WorkerForkServer:
    """A running fork parent. Use it as a context manager, or `close` it; not from several threads at once."""

    def __init__(
        self, env: Mapping[str, str] | None = None, *, outlives: tuple[Path, float] | None = None
    ) -> None:
        """Begins to start one; the first use waits for it. `env` replaces this process's environment.

        `outlives`: it survives this process, and waits so many seconds at that socket for one to `adopt` it.
        """
        env = dict(os.environ if env is None else env)
        env.update(dict.fromkeys(ONE_THREAD, "1"))
        env.setdefault("PYTHONHASHSEED", "0")
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "gyrostat.job.processes.fork_server", str(theirs.fileno())]
        if outlives is not None:
            command += ["--outlive", str(outlives[0]), str(outlives[1])]
        elif threading.current_thread() is threading.main_thread():
            command.append("--die-with-parent")  # only then is the thread's death the process's
        with theirs:
            process = subprocess.Popen(
                command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._take(ours, process.pid, process)
        self._outlives = outlives is not None
        greet(self._channel)

    @classmethod
    def forked(cls) -> WorkerForkServer:
        """A copy of this process, which has imported everything (`forkparent.preload`) and has one OS thread."""
        pid, sock = fork_server.fork()
        copy = cls.__new__(cls)
        copy._take(sock, pid, _Child(pid))
        copy._outlives = False
        greet(copy._channel)
        return copy

    @classmethod
    def adopt(cls, path: Path) -> WorkerForkServer | None:
        """The one that waits at this socket, with the workers of an agent that went away; None if there is none."""
        try:
            sock = connect_to(path)
        except OSError:
            return None
        adopted = cls.__new__(cls)
        adopted._take(sock, 0, None)
        try:
            greet(adopted._channel)
            hello = check_greeting(adopted._answer(Hello))
            adopted._ready, adopted.pid = True, hello.pid
            adopted.children = adopted._answer(Children)
        except (OSError, ScriptFailed):  # it was about to end: nobody had come in time
            adopted._channel.close()
            return None
        return adopted

    def _take(self, sock: socket.socket, pid: int, process: subprocess.Popen[bytes] | _Child | None) -> None:
        self._channel: Channel[FromForkParent] = Channel(sock, FromForkParent)
        self.pid, self._process = pid, process
        self.children = Children({}, [])
        """The workers that it had when it was adopted."""
        self._ready, self._outlives = False, True
        self._pending: list[FromForkParent] = []

    def wait_until_ready(self) -> None:
        """Until it has imported everything."""
        if not self._ready:
            check_greeting(self._answer(Hello))
            self._ready = True

    def start(self, spec: WorkerSpec, stdout: int, stderr: int, channel: socket.socket) -> int:
        self.wait_until_ready()
        self._channel.send(Fork(spec), [stdout, stderr, channel.fileno()])
        return self._answer(Forked).pid

    def signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # then it is dead, and `exits` will say so
            self._channel.send(Signal(pid, number))

    def serve_store(self, listener: socket.socket) -> socket.socket:
        """Have a process serve a rendezvous on `listener`, which remains the caller's to close; it ends when the socket that is
        returned is closed."""
        self.wait_until_ready()
        ours, theirs = socket.socketpair()
        with theirs:
            self._channel.send(ServeStore(), [listener.fileno(), theirs.fileno()])
        if not ours.recv(1):
            raise ScriptFailed("the process that serves the workers' rendezvous has ended at once")
        return ours

    def fileno(self) -> int:
        return self._channel.fileno()

    def exits(self) -> list[Exited]:
        self._pending += self._channel.drain()
        news = [message for message in self._pending if isinstance(message, Exited)]
        self._pending = [message for message in self._pending if not isinstance(message, Exited)]
        if self._channel.closed:
            self._mourn()
        return news

    def close(self) -> None:
        """End it, and all workers with it."""
        if self._outlives:
            self._end(signal.SIGTERM)
        if self._process is not None:
            self._channel.close()
        self._await_end()
        self._channel.close()

    def _await_end(self) -> int | None:
        """Its exit code, if it is ours to know."""
        if self._process is None:  # a child of the agent before us
            while not self._channel.closed:
                if not select.select([self._channel], [], [], _LAST_WORDS_S)[0]:
                    self._end(signal.SIGKILL)
                list(self._channel.drain())
            return None
        try:
            return self._process.wait(_LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
        elif not self._channel.closed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, expected: type[Answer]) -> Answer:
        """The next message of a type, waiting for it; others are kept for `exits`."""
        while True:
            for message in self._pending:
                if isinstance(message, expected):
                    self._pending.remove(message)
                    return message
            messages = self._channel.receive()
            if messages is None:
                self._mourn()
            self._pending += messages

    def _mourn(self) -> NoReturn:
        code = self._await_end()
        raise ScriptFailed(
            f"the fork parent (process {self.pid}), from which workers are started, ended with code {code}; "
            "if it said why, that stands above"
        )


class _Child:
    """What is wanted here of a `Popen`, of a child that was forked."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            self._await_death(timeout)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code

    def _await_death(self, timeout: float | None) -> None:
        pidfd = os.pidfd_open(self._pid)
        try:
            death = select.poll()
            death.register(pidfd, select.POLLIN)
            if not death.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("the fork parent", timeout or 0.0)
        finally:
            os.close(pidfd)

    def send_signal(self, number: int) -> None:
        if self._code is None:
            os.kill(self._pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ColdStart:
    """Starts every worker as a fresh interpreter, which then has everything to import. For comparison."""

    def __init__(self) -> None:
        self._selector = selectors.EpollSelector()
        self._workers: dict[int, tuple[subprocess.Popen[bytes], int]] = {}

    def start(self, spec: WorkerSpec, stdout: int, stderr: int, channel: socket.socket) -> int:
        with os.fdopen(os.memfd_create("gyrostat-worker"), "wb") as told:
            told.write(msgspec.msgpack.encode(spec))
            told.flush()
            told.seek(0)
            files = [channel.fileno(), told.fileno()]
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gyrostat.job.processes.worker", *map(str, files)],
                env=spec.env,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=files,
                start_new_session=True,
            )
        pidfd = os.pidfd_open(process.pid)
        self._workers[process.pid] = process, pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, process.pid)
        return process.pid

    def signal(self, pid: int, number: int) -> None:
        if pid in self._workers:
            self._workers[pid][0].send_signal(number)

    def fileno(self) -> int:
        return self._selector.fileno()

    def exits(self) -> list[Exited]:
        exits = []
        for key, _ in self._selector.select(0):
            process, pidfd = self._workers.pop(key.data)
            self._selector.unregister(pidfd)
            os.close(pidfd)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            exits.append(Exited(process.pid, process.wait()))
        return exits

    def close(self) -> None:
        for process, pidfd in self._workers.values():
            process.kill()
            process.wait()
            os.close(pidfd)
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
