"""The worker processes of this machine: started, listened to, signalled, and in the end all gone.

A `WorkerPool` knows nothing of what the job is about. It is polled by a `loop`, and tells its ears what workers say and print
and
how they exit. Each worker has a seat: which start of the job it belongs to, and its number in it.
However its owner ends, by an exception too, `close` leaves no worker running.
"""

from __future__ import annotations

import contextlib
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
from gyrostat.job.diagnostics.black_box import read as read_box
from gyrostat.job.diagnostics.memory import KernelLog, OutOfMemory
from gyrostat.job.processes.channel import Channel, ProtocolError
from gyrostat.job.processes.output import LineSplitter, LogFiles, OutputStream, Tail
from gyrostat.job.processes.protocol import (
    Failed,
    FromWorker,
    Rejoin,
    Stacks,
    WorkerId,
    WorkerSpec,
)
from gyrostat.job.processes.start import WorkerSource
from gyrostat.job.processes.unix_socket import bind_at

_LOOK_AGAIN_S = 0.25
_LAST_LINES = 20


class WorkerListener(Protocol):
    """Hears what happens in a crew. Called from the loop that polls it."""

    def heard(self, worker_id: WorkerId, message: FromWorker) -> None:
        """A worker reported something."""

    def printed(self, worker_id: WorkerId, stream: OutputStream, line: str) -> None:
        """A worker printed a line."""

    def exited(self, worker_id: WorkerId, code: int, evidence: Evidence) -> None:
        """A worker has gone, and all it said has been heard: its exit code, or the negated signal that killed it."""


class _Worker:
    """A worker, as seen from here: its process, its channel, and its two pipes if it does not print into a file."""

    def __init__(self, worker_id: WorkerId) -> None:
        self.worker_id = worker_id
        self.pid = 0
        self.channel: Channel[FromWorker] | None = None
        """None: it will come back to us after its last agent has gone."""
        self.pipes: dict[int, tuple[OutputStream, LineSplitter]] = {}
        self.tail: Tail | None = None
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.stacks: stacks.StackFile | None = None
        """It has been asked for its stacks."""

    def start(self, spec: WorkerSpec, source: WorkerSource, file: int | None) -> None:
        """What it prints goes to `file`, or else through pipes."""
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
    """Registers what it listens to with the loop's selector; the loop calls `take_exits` after every turn.

    With `meeting_place`, the path of a socket, workers outlive this process: they find its successor there.
    """

    def __init__(
        self,
        source: WorkerSource,
        selector: selectors.BaseSelector,
        events: WorkerListener,
        boxes: Path,
        logs: LogFiles | None = None,
        meeting_place: Path | None = None,
    ) -> None:
        """`boxes`: the directory in which workers note what they run."""
        self._source, self._selector, self._events, self._logs = source, selector, events, logs
        self._boxes, self._out_of_memory, self._kernel = boxes, OutOfMemory.here(), KernelLog()
        self._workers: dict[int, _Worker] = {}
        self._strangers: set[Channel[FromWorker]] = set()
        self._listener: socket.socket | None = None
        selector.register(source, selectors.EVENT_READ, self.take_exits)
        if meeting_place is not None:
            meeting_place.unlink(missing_ok=True)
            self._listener = bind_at(meeting_place)
            self._listener.listen()
            self._listener.setblocking(False)
            selector.register(self._listener, selectors.EVENT_READ, self._welcome)

    def start(self, worker_id: WorkerId, spec: WorkerSpec) -> None:
        """Workers that may outlive us print into files, for nobody might read from their pipes."""
        file = None
        if self._logs:
            file = self._logs.open(worker_id.member, append=worker_id.attempt > 0)
        worker = _Worker(worker_id)
        if self._logs and spec.agent is not None:
            worker.tail = Tail(self._logs.path(worker_id.member))
        spec = msgspec.structs.replace(spec, box=str(self._box(worker_id)))
        worker.start(spec, self._source, file if spec.agent is not None else None)
        self._workers[worker.pid] = worker
        self._listen_to(worker)
        for pipe in worker.pipes:
            self._selector.register(pipe, selectors.EVENT_READ, partial(self._read_pipe, worker, pipe))

    def adopt(self, living: Mapping[int, WorkerId]) -> None:
        """Workers of the agent before us; each will come back by itself."""
        for pid, worker_id in living.items():
            self._workers[pid] = worker = _Worker(worker_id)
            worker.pid = pid
            if self._logs:
                self._logs.open(worker_id.member, append=True)
                worker.tail = Tail(self._logs.path(worker_id.member))

    def _box(self, worker_id: WorkerId) -> Path:
        return self._boxes / f"box-{worker_id.attempt}-{worker_id.member}"

    def _stacks(self, worker_id: WorkerId) -> Path:
        return Path(f"{self._box(worker_id)}.stacks")

    def living(self) -> list[WorkerId]:
        return [worker.worker_id for worker in self._workers.values()]

    def _listen_to(self, worker: _Worker) -> None:
        assert worker.channel is not None
        self._selector.register(worker.channel, selectors.EVENT_READ, partial(self._read_channel, worker))

    def _welcome(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError, ConnectionError):
            sock, _ = self._listener.accept()
            channel: Channel[FromWorker] = Channel(sock, FromWorker)
            self._strangers.add(channel)
            self._selector.register(channel, selectors.EVENT_READ, partial(self._recognise, channel))

    def _recognise(self, channel: Channel[FromWorker]) -> None:
        """A worker says which one it is, and then what it has said before."""
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
                    self._strangers.discard(channel)
                    self._forget_channel(known)
                    known.channel = channel
                    self._listen_to(known)
            elif known is not None:
                self._hear(known, message)
        if messages is None:
            self._selector.unregister(channel)
            self._strangers.discard(channel)
            channel.close()

    def _forget_channel(self, worker: _Worker) -> None:
        if worker.channel is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(worker.channel)
            worker.channel.close()
            worker.channel = None

    def tell(self, worker_id: WorkerId, message: msgspec.Struct) -> None:
        worker = self._find(worker_id)
        if worker is not None and worker.channel is not None:
            with contextlib.suppress(OSError):  # then it has gone, and we shall hear of that
                worker.channel.send(message)

    def signal(self, worker_id: WorkerId, number: int) -> None:
        if worker := self._find(worker_id):
            if number == stacks.SIGNAL:
                worker.stacks = stacks.StackFile(self._stacks(worker_id))
            self._source.signal(worker.pid, number)

    def _find(self, worker_id: WorkerId) -> _Worker | None:
        return next((worker for worker in self._workers.values() if worker.worker_id == worker_id), None)

    def _read_channel(self, worker: _Worker) -> None:
        """One piece of what there is, so that a worker that never pauses cannot keep us from the others."""
        if worker.channel is None:
            return
        messages = worker.channel.receive(wait=False)
        if messages is None:
            self._selector.unregister(worker.channel)
        for message in messages or ():
            self._hear(worker, message)

    def read_files(self) -> float | None:
        """What workers have printed into files, and the stacks of those that were asked for them. Returns in how many seconds
        to look again; None: there are no such workers."""
        asked = [(worker, worker.stacks) for worker in self._workers.values() if worker.stacks is not None]
        for worker, answer in asked:
            if (text := answer.look()) is not None:
                worker.stacks = None
                self._hear(worker, Stacks(text))
        tails = [(worker, worker.tail) for worker in self._workers.values() if worker.tail is not None]
        for worker, tail in tails:
            for line in tail.read():
                self._hear_line(worker, OutputStream.STDOUT, line)
        return _LOOK_AGAIN_S if tails or asked else None

    def take_exits(self) -> None:
        """What a worker said before it went is all in its pipes by now: read that first, it counts."""
        for exited in self._source.exits():
            worker = self._workers.pop(exited.pid, None)
            if worker is None:
                continue  # of an earlier job of the same fork parent
            for message in worker.channel.drain() if worker.channel is not None else ():
                self._hear(worker, message)
            for pipe in list(worker.pipes):
                while self._read_pipe(worker, pipe):
                    pass
            for pipe in list(worker.pipes):  # somebody it started holds the other end
                self._close_pipe(worker, pipe)
            self._forget_channel(worker)
            if worker.tail is not None:
                for line in worker.tail.close():
                    self._hear_line(worker, OutputStream.STDOUT, line)
                worker.tail = None
            worker.close()
            if self._logs:
                self._logs.exited(worker.worker_id.member, exited.code)
            self._events.exited(worker.worker_id, exited.code, self._evidence(worker, exited.code))

    def _evidence(self, worker: _Worker, code: int) -> Evidence:
        """What there is of a worker that has gone."""
        box = self._box(worker.worker_id)
        running = read_box(box)
        box.unlink(missing_ok=True)
        self._stacks(worker.worker_id).unlink(missing_ok=True)
        mark = None
        if code == -signal.SIGKILL:
            mark = self._kernel.killed(worker.pid) or self._out_of_memory.mark()
        return Evidence(running=running, lines=tuple(worker.last_lines), out_of_memory=mark)

    def close(self) -> None:
        """Kill what is left, and wait until it has gone."""
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
            for channel in self._strangers:
                channel.close()
            self._kernel.close()
            if self._listener is not None:
                self._listener.close()
            if self._logs:
                self._logs.close()

    def _hear(self, worker: _Worker, message: FromWorker) -> None:
        if isinstance(message, Failed) and self._logs:
            self._logs.write(worker.worker_id.member, message.traceback)
        if isinstance(message, Stacks) and self._logs:
            self._logs.write(worker.worker_id.member, message.text)
        self._events.heard(worker.worker_id, message)

    def _read_pipe(self, worker: _Worker, pipe: int) -> bool:
        """Read once; close the pipe at its end. False when there is nothing more for now."""
        if pipe not in worker.pipes:
            return False  # closed in this very turn, when its worker exited
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
        self._hear_line(worker, stream, line)

    def _hear_line(self, worker: _Worker, stream: OutputStream, line: str) -> None:
        worker.last_lines.append(line)
        self._events.printed(worker.worker_id, stream, line)
