"""The fork server: a process that has imported everything, from which workers are forked.

Importing torch takes seconds, forking milliseconds. Forking is safe because this process has exactly one OS thread and never
runs an operator: the first operator sets up thread pools and instruction-set pins, and that happens in the child.

`python -m gyrostat.job.processes.fork_server FD` serves one launcher through the socket FD: it forks workers on request,
forwards signals to them, and reports their exits. It ends when the launcher does, and kills its workers; if it is killed
itself, the kernel kills them. Each worker leads a process group, so processes that a script started end with the worker. The
launcher's side is `start.WorkerForkServer`. A launcher that has imported everything itself, and has one OS thread, forks its
fork server from itself (`fork`).

A rendezvous of workers on several nodes is served by one more child (`_fork_store`), which is replaced if it is killed.

With `--outlive FD SECONDS` it serves an agent and outlives it: workers train on, and the next agent connects to socket FD. If
none does in time, the workers are killed: the job goes on without them, or they have saved a checkpoint and stopped before
(`session.set_agent`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import select
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from gyrostat.core import logs
from gyrostat.core.backoff import Backoff
from gyrostat.core.errors import GyrostatError
from gyrostat.job.processes import worker
from gyrostat.job.processes.channel import Channel, ProtocolError, check_greeting, greet
from gyrostat.job.processes.protocol import (
    Children,
    Exited,
    Fork,
    Forked,
    ServeStore,
    Signal,
    ToForkServer,
    ToWorker,
    WorkerId,
    WorkerSpec,
)

logger = logging.getLogger(__name__)

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
STORE_NAME = "rendezvous"
"""The name of a process that serves a rendezvous, as `ps -c` shows it."""
_FILES_PER_WORKER = 3
_FILES_PER_STORE = 1
_STORE_DELAY = Backoff(0.05, 5.0)
_GREETING_TIMEOUT_S = 5.0
_HANDLED = (signal.SIGTERM, signal.SIGINT)


@dataclass
class _RendezvousListener:
    """A socket on which a child serves a rendezvous."""

    file: int
    pid: int | None = None
    ended: int = 0
    """How often the process that serves it has ended."""
    serve_at: float | None = None
    """When the next one is started."""


class ForkedWorkers:
    """The workers forked by this process that have not exited, each watched through a pidfd."""

    def __init__(
        self,
        channel: Channel[ToForkServer],
        successors: socket.socket | None = None,
        agent_timeout_s: float = 0.0,
    ) -> None:
        """`successors`: the socket to which the next agent connects, at most `agent_timeout_s` after this one has ended."""
        self._channel: Channel[ToForkServer] | None = channel
        self._successors, self._agent_timeout_s = successors, agent_timeout_s
        self._orphaned_until: float | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        if successors is not None:
            self._selector.register(successors, selectors.EVENT_READ)
        self._pidfds: dict[int, int] = {}
        self._worker_ids: dict[int, WorkerId] = {}
        self._exited: list[tuple[WorkerId, int]] = []
        self._run = ""
        """The run of the job to which all workers belong."""
        self._listeners: list[_RendezvousListener] = []

    def serve(self) -> None:
        """Serve until the launcher has ended, or the last agent has and no successor came in time."""
        while self._has_agent_or_waits():
            for key, _ in self._selector.select(self._seconds_to_wait()):
                if key.fileobj is self._successors:
                    self._accept_successor()
                elif key.fileobj is self._channel:
                    self._handle_requests(self._channel)
                elif key.data in self._pidfds:
                    self._reap(key.data)
            for listener in self._listeners:
                if listener.serve_at is not None and time.monotonic() >= listener.serve_at:
                    self._fork_store(listener)

    def _seconds_to_wait(self) -> float | None:
        """None: until something happens."""
        deadlines = [self._orphaned_until, *(listener.serve_at for listener in self._listeners)]
        soonest = min((deadline for deadline in deadlines if deadline is not None), default=None)
        return None if soonest is None else max(0.0, soonest - time.monotonic())

    def _has_agent_or_waits(self) -> bool:
        if self._channel is not None:
            return True
        if self._successors is None:
            return False
        assert self._orphaned_until is not None
        return time.monotonic() < self._orphaned_until

    def _handle_requests(self, channel: Channel[ToForkServer]) -> None:
        try:
            messages = channel.receive()
        except OSError:
            messages = None
        if messages is None:
            self._selector.unregister(channel)
            channel.close()
            self._channel, self._orphaned_until = None, time.monotonic() + self._agent_timeout_s
            if self._successors is not None:
                logger.info(
                    "the agent has gone; %d workers wait %g s for the next one",
                    len(self._worker_ids),
                    self._agent_timeout_s,
                )
        for message in messages or ():
            if isinstance(message, Fork):
                self._fork(channel, message.spec)
            elif isinstance(message, ServeStore):
                (file,) = _take_files(channel, _FILES_PER_STORE)
                self._listeners.append(_RendezvousListener(file))
                self._fork_store(self._listeners[-1])
            elif isinstance(message, Signal) and message.pid in self._pidfds:
                signal.pidfd_send_signal(self._pidfds[message.pid], message.number)

    def _accept_successor(self) -> None:
        """Serve the next agent, once it has sent a valid greeting."""
        assert self._successors is not None
        sock, _ = self._successors.accept()
        channel: Channel[ToForkServer] = Channel(sock, ToForkServer)
        sock.settimeout(_GREETING_TIMEOUT_S)
        try:
            await_greeting(channel)
            while self._channel is not None and select.select([self._channel], [], [], 0)[0]:
                self._handle_requests(self._channel)  # the last ones of the agent before
            greet(channel)
            channel.send(Children(self._worker_ids, self._exited, self._run))
        except (OSError, GyrostatError, SystemExit):
            channel.close()
            return
        sock.settimeout(None)
        if self._channel is not None:
            self._selector.unregister(self._channel)
            self._channel.close()
        self._channel, self._orphaned_until = channel, None
        self._selector.register(channel, selectors.EVENT_READ)
        logger.info("adopted by a new agent, with %d workers", len(self._worker_ids))

    def _fork(self, channel: Channel[ToForkServer], spec: WorkerSpec) -> None:
        files = _take_files(channel, _FILES_PER_WORKER)
        if spec.run != self._run:
            self._forget_run()
            self._run = spec.run
        pid = self._fork_child(lambda: self._run_worker(spec, files), files)
        self._worker_ids[pid] = spec.worker_id
        logger.info(
            "forked worker %d as process %d", spec.worker_id.member, pid, extra=spec.worker_id.log_fields
        )
        self._send(Forked(pid))

    def _forget_run(self) -> None:
        """End the workers of an earlier run; nobody is interested in their exits."""
        for pid in self._worker_ids:
            signal.pidfd_send_signal(self._pidfds[pid], signal.SIGKILL)
        self._worker_ids, self._exited = {}, []

    def _send(self, message: Forked | Exited) -> None:
        """An agent that has gone does not get it: `serve` is about to notice that, and its successor gets `Children`."""
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.send(message)

    def _fork_store(self, listener: _RendezvousListener) -> None:
        """This process is not a worker: its exit is not reported, another takes its place (`_store_ended`). It ends with the
        fork server, not with the agent: workers connect without one."""
        listener.serve_at = None
        listener.pid = self._fork_child(lambda: self._run_store(listener.file))

    def _store_ended(self, listener: _RendezvousListener, code: int) -> None:
        """Workers that were connected to it lose a peer; those that connect meanwhile wait for the next one, because this
        process has the listening socket, too."""
        listener.pid, listener.ended = None, listener.ended + 1
        delay = _STORE_DELAY.after(listener.ended)
        listener.serve_at = time.monotonic() + delay
        logger.warning("the rendezvous process ended with code %d; starting another one in %g s", code, delay)

    def _fork_child(self, run: Callable[[], NoReturn], files: Sequence[int] = ()) -> int:
        # No signal may reach the child while it still has this process's handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        pid = os.fork()
        if pid == 0:
            run()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        for file in files:
            os.close(file)
        self._pidfds[pid] = os.pidfd_open(pid)
        self._selector.register(self._pidfds[pid], selectors.EVENT_READ, pid)
        return pid

    def _detach(self, keep: int | None = None) -> None:
        """In a child: close the fork server's files but for `keep`, and reset its signal handlers."""
        for number in _HANDLED:  # until `run_worker` installs its own
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        worker.die_with_parent(signal.SIGKILL)
        os.setpgid(0, 0)
        self._selector.close()
        if self._channel is not None:
            self._channel.close()
        if self._successors is not None:
            self._successors.close()
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        for listener in self._listeners:
            if listener.file != keep:
                os.close(listener.file)

    def _run_store(self, file: int) -> NoReturn:
        try:
            self._detach(keep=file)
            Path("/proc/self/comm").write_text(STORE_NAME)
            from gyrostat.engine.torch_internals import rendezvous_server

            server = rendezvous_server(socket.socket(fileno=file))
            while server is not None:  # until it dies with the fork server
                signal.pause()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _run_worker(self, spec: WorkerSpec, files: list[int]) -> NoReturn:
        """In the child."""
        try:
            self._detach()
            stdout, stderr, to_launcher = files
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            os.close(stdout)
            os.close(stderr)
            worker.run_worker(spec, Channel(socket.socket(fileno=to_launcher), ToWorker))
        finally:
            os._exit(1)

    def _reap(self, pid: int) -> None:
        """Kill the rest of the exited worker's process group, then reap the worker: until then its process id cannot be
        reused.
        """
        pidfd = self._pidfds.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        worker_id = self._worker_ids.pop(pid, None)
        for listener in self._listeners:
            if listener.pid == pid:
                self._store_ended(listener, code)
        if worker_id is not None:
            logger.info(
                "worker %d (process %d) exited with code %d",
                worker_id.member,
                pid,
                code,
                extra=worker_id.log_fields,
            )
        if worker_id is not None and self._successors is not None:
            self._exited.append((worker_id, code))
        if worker_id is not None:
            self._send(Exited(pid, code))

    def end(self) -> None:
        """Kill all workers and their process groups."""
        for pid in self._pidfds:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.killpg(pid, signal.SIGKILL)


def _take_files(channel: Channel[ToForkServer], count: int) -> list[int]:
    files, channel.files = channel.files, []
    if len(files) != count:
        raise ProtocolError(f"this request needs {count} files; received {len(files)}")
    return files


def await_greeting(channel: Channel[ToForkServer]) -> None:
    """Wait for the launcher's Hello and check its version."""
    while not (messages := channel.receive()):
        if messages is None:
            raise SystemExit(0)
    check_greeting(messages[0])
    if len(messages) > 1:
        raise ProtocolError("the launcher sent a request before it received our Hello")


def preload() -> None:
    """Import what workers need, and check that forking is safe afterwards."""
    for name in PRELOAD:
        importlib.import_module(name)
    check_threads()
    gc.collect()
    gc.freeze()  # the collector would write to, and so copy, pages that children share with this process


def check_threads() -> None:
    """Raise unless this process has one OS thread: a fork copies only the calling thread, and locks of the others stay held."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise GyrostatError(
            f"the fork server has {threads} OS threads, but forking is safe only with one; a library starts threads when "
            "it is imported: set OPENBLAS_NUM_THREADS=1 and OMP_NUM_THREADS=1"
        )


def fork() -> tuple[int, socket.socket]:
    """Fork a fork server from this process, which has imported everything. Returns its process id, and the socket to it."""
    check_threads()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _run_forked(theirs)
    theirs.close()
    return pid, ours


def _run_forked(to_launcher: socket.socket) -> NoReturn:
    """In the child of `fork`: of the launcher's files it keeps only standard error, for error messages."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, _exit)
        worker.die_with_parent(signal.SIGTERM)
        os.setsid()
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        channel: Channel[ToForkServer] = Channel(to_launcher, ToForkServer)
        await_greeting(channel)
        _serve(channel)
        code = 0
    except SystemExit:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        worker.exit_process(code)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def _serve(
    channel: Channel[ToForkServer], successors: socket.socket | None = None, agent_timeout_s: float = 0.0
) -> None:
    """Fork workers until the launcher has ended."""
    logs.configure_from_environment()
    workers = ForkedWorkers(channel, successors, agent_timeout_s)
    logger.info("fork server is ready (process %d)", os.getpid())
    try:
        with contextlib.suppress(OSError):  # the launcher ended meanwhile: `serve` notices that
            greet(channel)
        workers.serve()
    finally:
        workers.end()
        logger.info("fork server ends (process %d)", os.getpid())


def main() -> None:
    signal.signal(signal.SIGTERM, _exit)
    if "--die-with-parent" in sys.argv:
        worker.die_with_parent(signal.SIGTERM)
    successors, agent_timeout_s = None, 0.0
    if "--outlive" in sys.argv:
        listener, seconds = sys.argv[sys.argv.index("--outlive") + 1 :][:2]
        successors, agent_timeout_s = socket.socket(fileno=int(listener)), float(seconds)
    channel: Channel[ToForkServer] = Channel(socket.socket(fileno=int(sys.argv[1])), ToForkServer)
    await_greeting(channel)
    preload()
    _serve(channel, successors, agent_timeout_s)


if __name__ == "__main__":
    main()
