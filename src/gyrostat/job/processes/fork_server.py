"""The fork parent: a process that has imported everything and done nothing, of which workers are copies.

Importing torch takes seconds, forking milliseconds. For a fork to be sound this process has exactly one OS
thread and never runs an operator: thread pools and instruction-set pins are decided by the first operator,
which is the child's.

`python -m gyrostat.job.processes.fork_server FD` serves one launcher through the socket FD: it forks a worker on
request, passes on signals, and tells who exited. When the launcher goes away, so does it, and all its workers
with it; should it be killed itself, the kernel kills them. Each worker leads a process group, so what a
script started dies with its worker. The launcher's end is `start.ForkParent`. A launcher that has itself imported
everything, and has one OS thread, need not start a fork parent: it has one as a copy of itself (`fork`).

With `--outlive SOCKET SECONDS` it serves an agent, and outlives it: workers train on, and the next agent is awaited
at SOCKET. If none comes in time, workers are killed: their job goes on without them, or has stopped with a checkpoint before
(`session.set_orphaned`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from gyrostat.core.errors import GyrostatError
from gyrostat.job.processes import worker
from gyrostat.job.processes.protocol import (
    Channel,
    Children,
    Exited,
    Fork,
    Forked,
    ProtocolError,
    ServeStore,
    Signal,
    ToForkParent,
    ToWorker,
    WorkerId,
    WorkerSpec,
    check_greeting,
    greet,
)
from gyrostat.job.processes.unix_socket import bind_at

PRELOAD = (
    "numpy",
    "safetensors.torch",
    "torch",
    "torch._dynamo",  # the first optimizer would import it
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.checkpoint",
    "torch.utils.data",
    "gyrostat.engine.script.session",
)
_FILES_PER_WORKER = 3
_FILES_PER_STORE = 2
_GREETING_S = 5.0
_OURS = (signal.SIGTERM, signal.SIGINT)


class ForkedWorkers:
    """The living workers, each watched through a pidfd."""

    def __init__(
        self,
        channel: Channel[ToForkParent],
        successors: socket.socket | None = None,
        patience: float = 0.0,
    ) -> None:
        """`successors`: where the next agent is awaited, for `patience` seconds, when this one goes away."""
        self._channel: Channel[ToForkParent] | None = channel
        self._successors, self._patience = successors, patience
        self._alone_until: float | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        if successors is not None:
            self._selector.register(successors, selectors.EVENT_READ)
        self._pidfds: dict[int, int] = {}
        self._worker_ids: dict[int, WorkerId] = {}
        self._exited: list[tuple[WorkerId, int]] = []

    def serve(self) -> None:
        """Until the launcher, or the last agent, goes away."""
        while self._goes_on():
            wait = None if self._alone_until is None else max(0.0, self._alone_until - time.monotonic())
            for key, _ in self._selector.select(wait):
                if key.fileobj is self._successors:
                    self._welcome()
                elif key.fileobj is self._channel:
                    self._obey(self._channel)
                elif key.data in self._pidfds:
                    self._reap(key.data)

    def _goes_on(self) -> bool:
        if self._channel is not None:
            return True
        if self._successors is None:
            return False
        assert self._alone_until is not None
        return time.monotonic() < self._alone_until

    def _obey(self, channel: Channel[ToForkParent]) -> None:
        try:
            messages = channel.receive()
        except OSError:
            messages = None
        if messages is None:
            self._selector.unregister(channel)
            channel.close()
            self._channel, self._alone_until = None, time.monotonic() + self._patience
        for message in messages or ():
            if isinstance(message, Fork):
                self._fork(channel, message.spec)
            elif isinstance(message, ServeStore):
                self._fork_store(channel)
            elif isinstance(message, Signal) and message.pid in self._pidfds:
                signal.pidfd_send_signal(self._pidfds[message.pid], message.number)

    def _welcome(self) -> None:
        """The next agent. Whoever is at the other end must speak our language, and soon."""
        assert self._successors is not None
        sock, _ = self._successors.accept()
        channel: Channel[ToForkParent] = Channel(sock, ToForkParent)
        sock.settimeout(_GREETING_S)
        try:
            await_greeting(channel)
            greet(channel)
            channel.send(Children(self._worker_ids, self._exited))
        except (OSError, GyrostatError, SystemExit):
            channel.close()
            return
        sock.settimeout(None)
        if self._channel is not None:
            self._selector.unregister(self._channel)
            self._channel.close()
        self._channel, self._alone_until = channel, None
        self._selector.register(channel, selectors.EVENT_READ)

    def _fork(self, channel: Channel[ToForkParent], spec: WorkerSpec) -> None:
        files = _take_files(channel, _FILES_PER_WORKER)
        pid = self._fork_child(lambda: self._be_worker(spec, files), files)
        self._worker_ids[pid] = spec.worker_id
        channel.send(Forked(pid))

    def _fork_store(self, channel: Channel[ToForkParent]) -> None:
        """It has no seat in the job: of its end nobody is told."""
        files = _take_files(channel, _FILES_PER_STORE)
        self._fork_child(lambda: self._be_store(files), files)

    def _fork_child(self, be: Callable[[], NoReturn], files: list[int]) -> int:
        signal.pthread_sigmask(
            signal.SIG_BLOCK, _OURS
        )  # none may reach the child while the handlers are ours
        pid = os.fork()
        if pid == 0:
            be()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OURS)
        for file in files:
            os.close(file)
        self._pidfds[pid] = os.pidfd_open(pid)
        self._selector.register(self._pidfds[pid], selectors.EVENT_READ, pid)
        return pid

    def _let_go(self) -> None:
        """In a child: of what is the parent's."""
        for number in _OURS:  # until `live` listens to them
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OURS)
        worker.die_with_parent(signal.SIGKILL)
        os.setpgid(0, 0)
        self._selector.close()
        if self._channel is not None:
            self._channel.close()
        if self._successors is not None:
            self._successors.close()
        for pidfd in self._pidfds.values():
            os.close(pidfd)

    def _be_store(self, files: list[int]) -> NoReturn:
        try:
            self._let_go()
            from gyrostat.engine.torch_internals import rendezvous_server

            listener, to_agent = files
            server = rendezvous_server(socket.socket(fileno=listener))
            with socket.socket(fileno=to_agent) as agent:
                agent.send(b"!")
                while agent.recv(1):  # nothing is said: its end is the agent's
                    pass
            del server
        finally:
            os._exit(0)

    def _be_worker(self, spec: WorkerSpec, files: list[int]) -> NoReturn:
        """In the child: let go of what is the parent's, then live."""
        try:
            self._let_go()
            stdout, stderr, to_launcher = files
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            os.close(stdout)
            os.close(stderr)
            worker.live(spec, Channel(socket.socket(fileno=to_launcher), ToWorker))
        finally:
            os._exit(1)

    def _reap(self, pid: int) -> None:
        """The worker is dead but not yet buried: its process group still has its number. End the group, then
        bury it.
        """
        pidfd = self._pidfds.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        worker_id = self._worker_ids.pop(pid, None)
        if worker_id is not None and self._successors is not None:
            self._exited.append((worker_id, code))
        if worker_id is not None and self._channel is not None:
            with contextlib.suppress(OSError):  # gone: we are about to read that
                self._channel.send(Exited(pid, code))

    def end(self) -> None:
        """Leave nothing running."""
        for pid in self._pidfds:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.killpg(pid, signal.SIGKILL)


def _take_files(channel: Channel[ToForkParent], count: int) -> list[int]:
    files, channel.files = channel.files, []
    if len(files) != count:
        raise ProtocolError(f"this request needs {count} files, {len(files)} came with it")
    return files


def await_greeting(channel: Channel[ToForkParent]) -> None:
    """Before anything else: whoever is at the other end must speak our language."""
    while not (messages := channel.receive()):
        if messages is None:
            raise SystemExit(0)
    check_greeting(messages[0])
    if len(messages) > 1:
        raise ProtocolError("the launcher sent a request before it was greeted")


def preload() -> None:
    """Import what workers need, and make sure that forking is sound afterwards."""
    for name in PRELOAD:
        importlib.import_module(name)
    check_threads()
    gc.collect()
    gc.freeze()  # so that the collector does not touch, and thereby copy, what children share with us


def check_threads() -> None:
    """Only what has one OS thread may be forked: of others the copy would have half of what they were doing."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise GyrostatError(
            f"a process that is to be forked has {threads} OS threads, but only with one is that sound; a library starts "
            "threads when imported: see that OPENBLAS_NUM_THREADS=1 and OMP_NUM_THREADS=1 are set"
        )


def fork() -> tuple[int, socket.socket]:
    """A fork parent that is a copy of this process, which has imported everything: its process id, and the socket to it."""
    check_threads()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _be_fork_parent(theirs)
    theirs.close()
    return pid, ours


def _be_fork_parent(to_launcher: socket.socket) -> NoReturn:
    """In the copy: of the launcher's files it keeps standard error, to say what went wrong."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, _leave)
        worker.die_with_parent(signal.SIGTERM)
        os.setsid()
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        channel: Channel[ToForkParent] = Channel(to_launcher, ToForkParent)
        await_greeting(channel)
        _serve(channel)
        code = 0
    except SystemExit:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        worker.leave(code)


def _listen_at(path: str) -> socket.socket:
    """In a directory that only this user may enter."""
    Path(path).unlink(missing_ok=True)
    listener = bind_at(path)
    listener.listen()
    return listener


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def _serve(
    channel: Channel[ToForkParent], successors: socket.socket | None = None, patience: float = 0.0
) -> None:
    """Fork workers until the launcher goes away."""
    workers = ForkedWorkers(channel, successors, patience)
    try:
        greet(channel)
        workers.serve()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the launcher went away while we told it something
    finally:
        workers.end()


def main() -> None:
    signal.signal(signal.SIGTERM, _leave)
    if "--die-with-parent" in sys.argv:
        worker.die_with_parent(signal.SIGTERM)
    successors, patience = None, 0.0
    if "--outlive" in sys.argv:
        path, seconds = sys.argv[sys.argv.index("--outlive") + 1 :][:2]
        successors, patience = _listen_at(path), float(seconds)
    channel: Channel[ToForkParent] = Channel(socket.socket(fileno=int(sys.argv[1])), ToForkParent)
    await_greeting(channel)
    preload()
    _serve(channel, successors, patience)


if __name__ == "__main__":
    main()
