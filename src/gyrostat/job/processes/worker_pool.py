"""The worker processes of one machine: starts them, receives their messages and output, signals them, reports their exits.

A `WorkerPool` does not interpret messages. An event loop (`control.event_loop`) polls it, and it calls a `WorkerListener` with
each message, output line and exit. A `WorkerId` names each worker: the attempt of the job it belongs to, and its number there.
`close` leaves no worker running, also after an exception.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from gyrostat.core.evidence import Evidence
from gyrostat.job.diagnostics import stacks
from gyrostat.job.diagnostics.black_box import read as read_black_box
from gyrostat.job.diagnostics.memory import KernelLog, OutOfMemory
from gyrostat.job.processes.channel import Channel, ProtocolError
from gyrostat.job.processes.output import LineSplitter, LogFiles, OutputStream, Tail
from gyrostat.job.processes.protocol import (
    Failed,
    FromWorker,
    Ping,
    Rejoin,
    Stacks,
    WorkerId,
    WorkerSpec,
)
from gyrostat.job.processes.start import WorkerSource
from gyrostat.job.processes.unix_socket import bind_at

logger = logging.getLogger(__name__)

_READ_FILES_S = 0.25
_LAST_LINES = 20


class WorkerListener(Protocol):
    """Receives the events of a worker pool. Called in the thread of the event loop that polls it."""

    def received(self, worker_id: WorkerId, message: FromWorker) -> None:
        """A worker sent a message."""

    def printed(self, worker_id: WorkerId, stream: OutputStream, line: str) -> None:
        """A worker printed a line."""

    def exited(self, worker_id: WorkerId, code: int, evidence: Evidence) -> None:
        """A worker has exited, and all its messages and output were delivered.

        `code`: its exit code, or the negated signal that killed it.
        """


class _Worker:
    """A worker's process, its channel, and its two pipes if it does not print into a file."""

    def __init__(self, worker_id: WorkerId) -> None:
        self.worker_id = worker_id
        self.pid = 0
        self.channel: Channel[FromWorker] | None = None
        """None: it has not yet reconnected after its previous agent ended."""
        self.undelivered: list[msgspec.Struct] = []
        """Messages that wait until it has."""
        self.pipes: dict[int, tuple[OutputStream, LineSplitter]] = {}
        self.tail: Tail | None = None
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.stacks: stacks.StackFile | None = None
        """Where its stacks are written; None: they were not requested."""

    def start(self, spec: WorkerSpec, source: WorkerSource, file: int | None) -> None:
        """Its output goes to `file`, or through pipes if that is None."""
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, FromWorker)
        ends = [theirs.fileno()]
        out = err = file
        if out is None or err is None:
            (read_out, out), (read_err, err) = os.pipe(), os.pipe()
            self.pipes = {
                read_out: (OutputStream.STDOUT, LineSplitter()),
                read_err: (OutputStream.STDERR, LineSplitter()),
            }
            ends += [out, err]
        try:
            self.pid = source.start(spec, out, err, theirs)
        except BaseException:
            self.close()
            raise
        finally:
            theirs.detach()
            for end in ends:
                os.close(end)
        for pipe in self.pipes:
            os.set_blocking(pipe, False)

    def close(self) -> None:
        for pipe in self.pipes:
            os.close(pipe)
        self.pipes.clear()
        if self.channel is not None:
            self.channel.close()
        if self.tail is not None:
            list(self.tail.close())


class WorkerPool:
    """Registers its files with the event loop's selector; the loop calls `take_exits` after every iteration. Not thread-safe.

    With `rejoin_socket`, a path, workers outlive this process: they connect to its successor there.
    """

    def __init__(
        self,
        source: WorkerSource,
        selector: selectors.BaseSelector,
        events: WorkerListener,
        black_boxes: Path,
        logs: LogFiles | None = None,
        rejoin_socket: Path | None = None,
    ) -> None:
        """`black_boxes`: the directory of the workers' black boxes."""
        self._source, self._selector, self._events, self._logs = source, selector, events, logs
        self._black_boxes, self._out_of_memory, self._kernel = black_boxes, OutOfMemory.here(), KernelLog()
        self._workers: dict[int, _Worker] = {}
        self._unidentified: set[Channel[FromWorker]] = set()
        self._listener: socket.socket | None = None
        selector.register(source, selectors.EVENT_READ, self.take_exits)
        if rejoin_socket is not None:
            rejoin_socket.unlink(missing_ok=True)
            self._listener = bind_at(rejoin_socket)
            self._listener.listen()
            self._listener.setblocking(False)
            selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def start(self, worker_id: WorkerId, spec: WorkerSpec) -> None:
        """Workers that may outlive this process print into files, since their pipes may have no reader."""
        file = None
        if self._logs:
            file = self._logs.open(worker_id.member, append=worker_id.attempt > 0)
        worker = _Worker(worker_id)
        if self._logs and spec.agent is not None:
            worker.tail = Tail(self._logs.path(worker_id.member))
        spec = msgspec.structs.replace(spec, worker_id=worker_id, black_box=str(self._black_box(worker_id)))
        worker.start(spec, self._source, file if spec.agent is not None else None)
        self._workers[worker.pid] = worker
        logger.info(
            "worker %d started as process %d", worker_id.member, worker.pid, extra=worker_id.log_fields
        )
        self._listen_to(worker)
        for pipe in worker.pipes:
            self._selector.register(pipe, selectors.EVENT_READ, partial(self._read_pipe, worker, pipe))

    def adopt(self, living: Mapping[int, WorkerId]) -> None:
        """Take over the workers of the previous agent; each connects to `rejoin_socket` by itself."""
        for pid, worker_id in living.items():
            self._workers[pid] = worker = _Worker(worker_id)
            worker.pid = pid
            if self._logs:
                self._logs.open(worker_id.member, append=True)
                worker.tail = Tail(self._logs.path(worker_id.member))

    def disown(self) -> None:
        """Kill all workers; nothing more is heard of them."""
        for pid, worker in list(self._workers.items()):
            self._source.signal(pid, signal.SIGKILL)
            for pipe in list(worker.pipes):
                self._close_pipe(worker, pipe)
            self._close_channel(worker)
            del self._workers[pid]
            worker.close()

    def _black_box(self, worker_id: WorkerId) -> Path:
        return self._black_boxes / f"box-{worker_id.attempt}-{worker_id.member}"

    def _stacks(self, worker_id: WorkerId) -> Path:
        return Path(f"{self._black_box(worker_id)}.stacks")

    def living(self) -> list[WorkerId]:
        return [worker.worker_id for worker in self._workers.values()]

    def _listen_to(self, worker: _Worker) -> None:
        assert worker.channel is not None
        self._selector.register(worker.channel, selectors.EVENT_READ, partial(self._read_channel, worker))

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError, ConnectionError):
            sock, _ = self._listener.accept()
            channel: Channel[FromWorker] = Channel(sock, FromWorker)
            self._unidentified.add(channel)
            self._selector.register(channel, selectors.EVENT_READ, partial(self._identify, channel))

    def _identify(self, channel: Channel[FromWorker]) -> None:
        """The first messages on a new connection: `Rejoin` names the worker, its lasting messages follow."""
        try:
            messages = channel.receive(wait=False)
        except (OSError, ProtocolError):
            messages = None
        known = None
        for message in messages or ():
            if isinstance(message, Rejoin):
                known = self._find(message.worker_id)
                if known is not None:
                    self._selector.unregister(channel)
                    self._unidentified.discard(channel)
                    self._close_channel(known)
                    known.channel = channel
                    self._listen_to(known)
                    undelivered, known.undelivered = known.undelivered, []
                    for waiting in undelivered:
                        self.send(known.worker_id, waiting)
            elif known is not None:
                self._deliver(known, message)
        if messages is None:
            self._selector.unregister(channel)
            self._unidentified.discard(channel)
            channel.close()

    def _close_channel(self, worker: _Worker) -> None:
        if worker.channel is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(worker.channel)
            worker.channel.close()
            worker.channel = None

    def send(self, worker_id: WorkerId, message: msgspec.Struct) -> None:
        """A worker that has not reconnected yet gets it when it has; a ping would be out of date."""
        worker = self._find(worker_id)
        if worker is not None and worker.channel is None and not isinstance(message, Ping):
            worker.undelivered.append(message)
        if worker is not None and worker.channel is not None:
            with contextlib.suppress(OSError):  # it has exited; `take_exits` reports that
                worker.channel.send(message)

    def signal(self, worker_id: WorkerId, number: int) -> None:
        if worker := self._find(worker_id):
            if number == stacks.SIGNAL:
                worker.stacks = stacks.StackFile(self._stacks(worker_id))
            self._source.signal(worker.pid, number)

    def _find(self, worker_id: WorkerId) -> _Worker | None:
        return next((worker for worker in self._workers.values() if worker.worker_id == worker_id), None)

    def _read_channel(self, worker: _Worker) -> None:
        """Read once, so that a worker that sends all the time does not starve the others."""
        if worker.channel is None:
            return
        messages = worker.channel.receive(wait=False)
        if messages is None:
            self._selector.unregister(worker.channel)
        for message in messages or ():
            self._deliver(worker, message)

    def read_files(self) -> float | None:
        """Deliver what workers have printed into files, and the stacks that were requested. Returns the seconds until the next
        call; None if no worker writes files."""
        asked = [(worker, worker.stacks) for worker in self._workers.values() if worker.stacks is not None]
        for worker, file in asked:
            if (text := file.read()) is not None:
                worker.stacks = None
                self._deliver(worker, Stacks(text))
        tails = [(worker, worker.tail) for worker in self._workers.values() if worker.tail is not None]
        for worker, tail in tails:
            for line in tail.read():
                self._deliver_line(worker, OutputStream.STDOUT, line)
        return _READ_FILES_S if tails or asked else None

    def take_exits(self) -> None:
        """Report workers that have exited, after all that they sent and printed before."""
        for exited in self._source.exits():
            worker = self._workers.pop(exited.pid, None)
            if worker is None:
                continue  # of an earlier job of the same fork server
            for message in worker.channel.drain() if worker.channel is not None else ():
                self._deliver(worker, message)
            for pipe in list(worker.pipes):
                while self._read_pipe(worker, pipe):
                    pass
            for pipe in list(worker.pipes):  # a process that the worker started holds the other end
                self._close_pipe(worker, pipe)
            self._close_channel(worker)
            if worker.tail is not None:
                for line in worker.tail.close():
                    self._deliver_line(worker, OutputStream.STDOUT, line)
                worker.tail = None
            worker.close()
            if self._logs:
                self._logs.exited(worker.worker_id.member, exited.code)
            logger.info(
                "worker %d exited with code %d",
                worker.worker_id.member,
                exited.code,
                extra=worker.worker_id.log_fields,
            )
            self._events.exited(worker.worker_id, exited.code, self._evidence(worker, exited.code))

    def _evidence(self, worker: _Worker, code: int) -> Evidence:
        """The evidence that an exited worker left behind; its files are deleted."""
        box = self._black_box(worker.worker_id)
        running = read_black_box(box)
        box.unlink(missing_ok=True)
        self._stacks(worker.worker_id).unlink(missing_ok=True)
        out_of_memory = None
        if code == -signal.SIGKILL:
            out_of_memory = self._kernel.killed(worker.pid) or self._out_of_memory.since_last_call()
        return Evidence(running=running, lines=tuple(worker.last_lines), out_of_memory=out_of_memory)

    def close(self) -> None:
        """Kill the remaining workers, and wait until they have exited."""
        for worker in self._workers.values():
            self._source.signal(worker.pid, signal.SIGKILL)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._source, selectors.EVENT_READ)
                while self._workers:
                    for exited in self._source.exits():
                        if exited.pid in self._workers:
                            self._workers.pop(exited.pid).close()
                    if self._workers:
                        selector.select()
        finally:
            for worker in self._workers.values():
                worker.close()
            for channel in self._unidentified:
                channel.close()
            self._kernel.close()
            if self._listener is not None:
                self._listener.close()
            if self._logs:
                self._logs.close()

    def _deliver(self, worker: _Worker, message: FromWorker) -> None:
        if isinstance(message, Failed) and self._logs:
            self._logs.write(worker.worker_id.member, message.traceback)
        if isinstance(message, Stacks) and self._logs:
            self._logs.write(worker.worker_id.member, message.text)
        self._events.received(worker.worker_id, message)

    def _read_pipe(self, worker: _Worker, pipe: int) -> bool:
        """Read once; close the pipe at end of file. False when there is no more data for now."""
        if pipe not in worker.pipes:
            return False  # closed in this iteration, when its worker exited
        stream, lines = worker.pipes[pipe]
        try:
            data = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return False
        for line in lines.feed(data):
            self._print(worker, stream, line)
        if not data:
            self._close_pipe(worker, pipe)
        return bool(data)

    def _close_pipe(self, worker: _Worker, pipe: int) -> None:
        stream, lines = worker.pipes.pop(pipe)
        self._selector.unregister(pipe)
        os.close(pipe)
        for line in lines.end():
            self._print(worker, stream, line)

    def _print(self, worker: _Worker, stream: OutputStream, line: str) -> None:
        if self._logs:
            self._logs.write(worker.worker_id.member, line)
        self._deliver_line(worker, stream, line)

    def _deliver_line(self, worker: _Worker, stream: OutputStream, line: str) -> None:
        worker.last_lines.append(line)
        self._events.printed(worker.worker_id, stream, line)
