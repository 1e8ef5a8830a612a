"""The fork parent: a process that has imported everything and done nothing, of which workers are copies.

Importing torch takes seconds, forking milliseconds. For a fork to be sound this process has exactly one OS
thread and never runs an operator: thread pools and instruction-set pins are decided by the first operator,
which is the child's.

`python -m gyrostat.job.forkparent FD` serves one launcher through the socket FD: it forks a worker on
request, passes on signals, and tells who exited. When the launcher goes away, so does it, and all its workers
with it; should it be killed itself, the kernel kills them. Each worker leads a process group, so what a
script started dies with its worker. The launcher's end is `start.ForkParent`.
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
from pathlib import Path
from types import FrameType
from typing import NoReturn

from gyrostat.core.errors import GyrostatError
from gyrostat.job import worker
from gyrostat.job.protocol import (
    Channel,
    Exited,
    Fork,
    Forked,
    ProtocolError,
    Signal,
    ToForkParent,
    ToWorker,
    WorkerSpec,
    check_greeting,
    greet,
)

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
    "gyrostat.engine.session",
)
_FILES_PER_WORKER = 3
_OURS = (signal.SIGTERM, signal.SIGINT)


class Nursery:
    """The living workers, each watched through a pidfd."""

    def __init__(self, channel: Channel[ToForkParent]) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._pidfds: dict[int, int] = {}

    def serve(self) -> None:
        """Until the launcher goes away."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._channel:
                    self._reap(key.data)
                    continue
                messages = self._channel.receive()
                if messages is None:
                    return
                for message in messages:
                    if isinstance(message, Fork):
                        self._fork(message.spec)
                    elif isinstance(message, Signal) and message.pid in self._pidfds:
                        signal.pidfd_send_signal(self._pidfds[message.pid], message.number)

    def _fork(self, spec: WorkerSpec) -> None:
        files, self._channel.files = self._channel.files, []
        if len(files) != _FILES_PER_WORKER:
            raise ProtocolError(
                f"a worker needs {_FILES_PER_WORKER} files, {len(files)} came with the request"
            )
        signal.pthread_sigmask(
            signal.SIG_BLOCK, _OURS
        )  # none may reach the child while the handlers are ours
        pid = os.fork()
        if pid == 0:
            self._be_worker(spec, files)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OURS)
        for file in files:
            os.close(file)
        self._pidfds[pid] = os.pidfd_open(pid)
        self._selector.register(self._pidfds[pid], selectors.EVENT_READ, pid)
        self._channel.send(Forked(pid))

    def _be_worker(self, spec: WorkerSpec, files: list[int]) -> NoReturn:
        """In the child: let go of what is the parent's, then live."""
        try:
            for number in _OURS:  # until `live` listens to them
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _OURS)
            worker.die_with_parent(signal.SIGKILL)
            os.setpgid(0, 0)
            self._selector.close()
            self._channel.close()
            for pidfd in self._pidfds.values():
                os.close(pidfd)
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
        self._channel.send(Exited(pid, os.waitstatus_to_exitcode(status)))

    def end(self) -> None:
        """Leave nothing running."""
        for pid in self._pidfds:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.killpg(pid, signal.SIGKILL)


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
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise GyrostatError(
            f"the fork parent has {threads} OS threads after importing, but only with one is forking sound; "
            "a library starts threads when imported: see that OPENBLAS_NUM_THREADS=1 are set"
        )
    gc.collect()
    gc.freeze()  # so that the collector does not touch, and thereby copy, what children share with us


def main() -> None:
    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
    if "--die-with-parent" in sys.argv:
        worker.die_with_parent(signal.SIGTERM)
    channel: Channel[ToForkParent] = Channel(socket.socket(fileno=int(sys.argv[1])), ToForkParent)
    await_greeting(channel)
    preload()
    nursery = Nursery(channel)
    try:
        greet(channel)
        nursery.serve()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the launcher went away while we told it something
    finally:
        nursery.end()


if __name__ == "__main__":
    main()
