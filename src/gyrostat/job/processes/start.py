"""Two ways to start workers behind one interface, `WorkerSource`: by the fork server, or each as a fresh interpreter.

`WorkerForkServer` is the launcher's side of `fork_server`. It starts one process, a fresh interpreter or a fork of this process
(`forked`), from which the workers of any number of jobs are forked, one job at a time. If that process is killed, the kernel
kills its workers: they are reported as killed, and another process takes its place and serves the same rendezvous. `ColdStart`
is for comparison. Neither imports torch in this process. Both can be polled: `fileno()` is readable when `exits()` has news.
"""

from __future__ import annotations

import contextlib
import logging
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
from gyrostat.core.secrets import without_secrets
from gyrostat.job import environment
from gyrostat.job.processes import fork_server
from gyrostat.job.processes.channel import Channel, check_greeting, greet
from gyrostat.job.processes.protocol import (
    Children,
    Exited,
    Fork,
    Forked,
    FromForkServer,
    Hello,
    ServeStore,
    Signal,
    WorkerSpec,
)
from gyrostat.job.processes.unix_socket import bind_at, connect_to

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""With these set to 1, numerical libraries start no threads when they are imported."""
_EXIT_TIMEOUT_S = 10.0
_STARTS = 10
"""A fork server that is killed before it is ready is started this many times in all."""

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply", Hello, Forked, Children)


class WorkerSource(Protocol):
    """Starts worker processes."""

    def start(self, spec: WorkerSpec, stdout: int, stderr: int, channel: socket.socket) -> int:
        """Start a worker with these files; the caller closes its own copies. Returns the process id."""

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a worker that was started here; ignored if it has exited."""

    def fileno(self) -> int: ...

    def exits(self) -> list[Exited]:
        """The workers that have exited since the last call. Does not wait."""


class WorkerForkServer:
    """A running fork server. Use it as a context manager, or call `close`. Not thread-safe."""

    def __init__(
        self, env: Mapping[str, str] | None = None, *, outlives: tuple[Path, float] | None = None
    ) -> None:
        """Start the process without waiting for it; the first use waits. `env` replaces this process's environment.

        `outlives` is a socket's path and seconds: the fork server outlives this process, and waits that long at the socket for
        another process to `adopt` it.
        """
        self._initialize(env, outlives)
        self._begin()

    def _initialize(self, env: Mapping[str, str] | None, outlives: tuple[Path, float] | None) -> None:
        self._env, self._outlives = env, outlives
        self._poll = selectors.EpollSelector()
        self._workers: dict[int, int] = {}
        """A pidfd of each worker."""
        self._stores: list[socket.socket] = []
        """The sockets on which a child of the fork server serves a rendezvous."""
        self._killed_early = 0
        """How often it was killed, in a row, before it was ready."""

    def _begin(self) -> None:
        env, outlives = self._env, self._outlives
        env = without_secrets(environment.variables() if env is None else env)
        env.update(dict.fromkeys(ONE_THREAD, "1"))
        env.setdefault("PYTHONHASHSEED", "0")
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "gyrostat.job.processes.fork_server", str(theirs.fileno())]
        files = [theirs]
        if outlives is not None:
            path, seconds = outlives
            files.append(_listen_at(path))
            command += ["--outlive", str(files[-1].fileno()), str(seconds)]
        elif threading.current_thread() is threading.main_thread():
            command.append(
                "--die-with-parent"
            )  # the kernel signals the end of the starting thread, here that of the process
        process = subprocess.Popen(
            command,
            env=env,
            pass_fds=[file.fileno() for file in files],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        for file in files:
            file.close()
        self._connect(ours, process.pid, process)
        greet(self._channel)

    @classmethod
    def forked(cls) -> WorkerForkServer:
        """Fork it from this process, which has imported everything (`fork_server.preload`) and has one OS thread."""
        pid, sock = fork_server.fork()
        server = cls._unconnected(None)
        server._connect(sock, pid, _Child(pid))
        greet(server._channel)
        return server

    @classmethod
    def adopt(cls, path: Path, agent_timeout_s: float = 0.0) -> WorkerForkServer | None:
        """The fork server that waits at this socket with the workers of an agent that has ended; None if none does.

        `agent_timeout_s`: how long one that takes its place, if it is killed, waits for the next agent.
        """
        try:
            sock = connect_to(path)
        except OSError:
            return None
        adopted = cls._unconnected((path, agent_timeout_s))
        adopted._connect(sock, 0, None)
        try:
            greet(adopted._channel)
            hello = check_greeting(adopted._receive(Hello))
            adopted._ready, adopted.pid = True, hello.pid
            adopted.children = adopted._receive(Children)
            for pid in adopted.children.living:
                adopted._watch(pid)
        except (OSError, ScriptFailed):  # its time to wait was over, and it is about to end
            adopted._disconnect()
            adopted._poll.close()
            return None
        return adopted

    @classmethod
    def _unconnected(cls, outlives: tuple[Path, float] | None) -> WorkerForkServer:
        server = cls.__new__(cls)
        server._initialize(None, outlives)
        return server

    def _connect(
        self, sock: socket.socket, pid: int, process: subprocess.Popen[bytes] | _Child | None
    ) -> None:
        self._channel: Channel[FromForkServer] = Channel(sock, FromForkServer)
        self._poll.register(self._channel, selectors.EVENT_READ)
        self.pid, self._process = pid, process
        self.children = Children({}, [])
        """The workers that the fork server had when it was adopted."""
        self._ready = False
        self._pending: list[FromForkServer] = []

    def wait_until_ready(self) -> None:
        """Wait until it has imported everything."""
        while not self._ready:
            hello = self._next(Hello)
            if hello is None:
                self._replace()
            else:
                self._greeted(hello)

    def _greeted(self, hello: Hello) -> None:
        """It is ready. One that has taken the place of another serves the same rendezvous."""
        check_greeting(hello)
        self._ready, self._killed_early = True, 0
        for listener in self._stores:
            self._serve(listener)

    def _disconnect(self) -> None:
        with contextlib.suppress(KeyError, ValueError):  # closed already
            self._poll.unregister(self._channel)
        self._channel.close()

    def start(self, spec: WorkerSpec, stdout: int, stderr: int, channel: socket.socket) -> int:
        files = [stdout, stderr, channel.fileno()]
        self.wait_until_ready()
        forked = self._fork(spec, files)
        if forked is None:  # it has ended
            self._replace()
            self.wait_until_ready()
            forked = self._fork(spec, files)
        if forked is None:
            self._raise_ended()
        self._watch(forked.pid)
        return forked.pid

    def _watch(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has exited already
            self._workers[pid] = os.pidfd_open(pid)

    def _fork(self, spec: WorkerSpec, files: list[int]) -> Forked | None:
        """None: the fork server has ended."""
        with contextlib.suppress(ConnectionError):  # what it sent before is still to be read
            self._channel.send(Fork(spec), files)
        return self._next(Forked)

    def _replace(self) -> None:
        """It was killed, and its workers with it: report them, and start another one. One that ends by itself before it is
        ready would do so again."""
        code = self._await_end()
        self._killed_early += not self._ready
        if not self._ready and (self._killed_early == _STARTS or (code is not None and code >= 0)):
            self._raise_ended()
        logger.warning(
            "the fork server (process %d) ended with exit code %s; starting another one", self.pid, code
        )
        self._disconnect()
        killed = [Exited(pid, -signal.SIGKILL) for pid in self._workers]
        for pidfd in self._workers.values():
            _kill_and_wait(pidfd)
        pending = [message for message in self._pending if isinstance(message, Exited)]
        self._begin()
        self._pending += [*pending, *killed]

    def signal(self, pid: int, number: int) -> None:
        if self._ready:  # otherwise it has no workers yet, and those of the one before it are dead
            with contextlib.suppress(ConnectionError):  # it has ended; `exits` notices
                self._channel.send(Signal(pid, number))

    def serve_store(self, listener: socket.socket) -> None:
        """Serve a rendezvous on `listener` as long as this exists; the caller closes its own copy. A child of the fork server
        does it: if the child is killed, the fork server starts another, and if that is killed, its successor does."""
        self.wait_until_ready()
        self._stores.append(listener.dup())
        self._serve(listener)

    def _serve(self, listener: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):  # it has ended: the next one serves it
            self._channel.send(ServeStore(), [listener.fileno()])

    def fileno(self) -> int:
        return self._poll.fileno()

    def exits(self) -> list[Exited]:
        self._pending += self._channel.drain()
        if self._channel.closed:
            self._replace()
        for message in self._pending:
            if isinstance(message, Hello) and not self._ready:
                self._pending.remove(message)
                self._greeted(message)
                break
        exits = [message for message in self._pending if isinstance(message, Exited)]
        self._pending = [message for message in self._pending if not isinstance(message, Exited)]
        for exited in exits:
            if (pidfd := self._workers.pop(exited.pid, None)) is not None:
                os.close(pidfd)
        return exits

    def close(self) -> None:
        """End it, and all workers with it."""
        if self._outlives is not None:
            self._end(signal.SIGTERM)
        if self._process is not None:
            self._disconnect()
        self._await_end()
        self._disconnect()
        self._poll.close()
        for pidfd in self._workers.values():
            os.close(pidfd)
        self._workers.clear()
        for listener in self._stores:
            listener.close()
        self._stores.clear()

    def _await_end(self) -> int | None:
        """Its exit code; None if it is not a child of this process."""
        if self._process is None:  # a child of the previous agent
            while not self._channel.closed:
                if not select.select([self._channel], [], [], _EXIT_TIMEOUT_S)[0]:
                    self._end(signal.SIGKILL)
                list(self._channel.drain())
            return None
        try:
            return self._process.wait(_EXIT_TIMEOUT_S)
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

    def _receive(self, expected: type[Reply]) -> Reply:
        reply = self._next(expected)
        if reply is None:
            self._raise_ended()
        return reply

    def _next(self, expected: type[Reply]) -> Reply | None:
        """Wait for the next message of a type; the others are kept for `exits`. None: the fork server has ended."""
        while True:
            for message in self._pending:
                if isinstance(message, expected):
                    self._pending.remove(message)
                    return message
            messages = self._channel.receive()
            if messages is None:
                return None
            self._pending += messages

    def _raise_ended(self) -> NoReturn:
        code = self._await_end()
        raise ScriptFailed(
            f"the fork server (process {self.pid}), which starts workers, ended with exit code {code}; "
            "its error, if it printed one, is in the output above"
        )


def _listen_at(path: Path) -> socket.socket:
    """From now on another process can connect, and waits while the fork server loads. `path` is in a directory that only this
    user may enter."""
    path.unlink(missing_ok=True)
    listener = bind_at(path)
    listener.listen()
    return listener


def _kill_and_wait(pidfd: int) -> None:
    """The kernel kills the workers of a fork server that was killed; nothing of them may go on when others take their place."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    select.select([pidfd], [], [], _EXIT_TIMEOUT_S)


class _Child:
    """The part of `Popen` that is needed here, for a forked child."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            self._wait_for_exit(timeout)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code

    def _wait_for_exit(self, timeout: float | None) -> None:
        pidfd = os.pidfd_open(self._pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("the fork server", timeout or 0.0)
        finally:
            os.close(pidfd)

    def send_signal(self, number: int) -> None:
        if self._code is None:
            os.kill(self._pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ColdStart:
    """Starts every worker as a fresh interpreter, which imports everything itself. For comparison."""

    def __init__(self) -> None:
        self._selector = selectors.EpollSelector()
        self._workers: dict[int, tuple[subprocess.Popen[bytes], int]] = {}

    def start(self, spec: WorkerSpec, stdout: int, stderr: int, channel: socket.socket) -> int:
        with os.fdopen(os.memfd_create("gyrostat-worker"), "wb") as spec_file:
            spec_file.write(msgspec.msgpack.encode(spec))
            spec_file.flush()
            spec_file.seek(0)
            files = [channel.fileno(), spec_file.fileno()]
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
