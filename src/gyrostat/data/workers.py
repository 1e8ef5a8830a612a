"""The processes that make batches: `num_workers` of them, shared by all virtual workers of this worker.

A task belongs to one process, and a process runs its tasks in the order of submission, so the state that a task builds on is
in its process. A process that is killed is replaced: its open tasks are submitted again, from the state after its last reply,
which is known here. A task during which three processes in a row died raises an error.

Data workers are children of this process. The kernel ends them with it; they leave signals to the job to it; and they
exchange messages with it over an unnamed socket (`wire.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.multiprocessing

from gyrostat.data import torch_internals
from gyrostat.data.virtual_data_worker import BatchRecipe, BatchReply, BatchRequest, DataWorker
from gyrostat.data.wire import BatchWire, Frame, pack

_MAX_DEATHS = 3
_MAX_IN_FLIGHT = 32
_MAX_IN_FLIGHT_BYTES = 96 << 10
"""Requests beyond these wait here: if the socket were full, both ends could wait for each other."""
_EXIT_TIMEOUT_S = 1.0
_PR_SET_PDEATHSIG = 1


@dataclass(eq=False)
class Task:
    """A request to one process."""

    process: int
    request: Callable[[bool], BatchRequest]
    """Makes the request; its argument is True if the process does not know this task's virtual data worker yet."""
    data_worker: tuple[int, int] | None = None
    """The virtual worker and the number of its data worker; None for an evaluation."""
    reply: BatchReply | None = None
    deaths: int = 0
    wanted: bool = True
    """False: the reply is not needed any more."""
    received: Callable[[BatchReply], None] | None = None
    """Called with the reply."""


@dataclass
class _Process:
    process: Any
    wire: BatchWire
    known: set[tuple[int, int]] = field(default_factory=set)
    in_flight: deque[tuple[Task, int]] = field(default_factory=deque)
    waiting: deque[Task] = field(default_factory=deque)

    def may_send(self) -> bool:
        in_socket = sum(size for _, size in self.in_flight)
        return len(self.in_flight) < _MAX_IN_FLIGHT and in_socket < _MAX_IN_FLIGHT_BYTES


class DataWorkerPool:
    """The data workers of one loader."""

    def __init__(self, recipe: BatchRecipe, *, context: Any = None, timeout: float = 0) -> None:
        self._recipe, self._timeout = recipe, timeout
        self._context = context or torch.multiprocessing.get_context("fork")
        self._processes = [self._start() for _ in range(recipe.num_workers)]

    @property
    def pids(self) -> list[int]:
        return [process.process.pid for process in self._processes]

    def submit(self, task: Task) -> None:
        self._processes[task.process].waiting.append(task)
        self._send(task.process)

    def wait(self, task: Task) -> BatchReply:
        """The reply to a task. Replies to other tasks are received meanwhile."""
        self.receive_ready()
        deadline = time.monotonic() + self._timeout if self._timeout else None
        while task.reply is None:
            if not self._readable(task.process, deadline):
                raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
            self._receive(task.process)
        return task.reply

    def forget(self, data_workers: set[tuple[int, int]]) -> None:
        """Drop the state of these virtual data workers: the next task of each starts it anew."""
        for process in self._processes:
            process.known -= data_workers

    def close(self) -> None:
        """Close the sockets, on which the processes exit after the batch they are making; kill those that do not."""
        for process in self._processes:
            process.wire.close()
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        for process in self._processes:
            process.process.join(max(deadline - time.monotonic(), 0))
            process.process.kill()
            process.process.join()
            process.process.close()
        self._processes = []

    # Processes.

    def _start(self) -> _Process:
        mine, theirs = socket.socketpair()
        # Children of a fork server are not ours: they exit when the socket closes.
        parent = None if self._context.get_start_method() == "forkserver" else os.getpid()
        process = self._context.Process(
            target=_serve, args=(theirs, self._recipe, parent), daemon=True, name="data worker"
        )
        process.start()
        theirs.close()
        return _Process(process, BatchWire(mine))

    def _replace(self, number: int) -> None:
        """A process has died: another takes its place and its tasks."""
        dead = self._processes[number]
        dead.wire.close()
        dead.process.join(_EXIT_TIMEOUT_S)
        dead.process.kill()
        dead.process.join()
        tasks = [task for task, _ in dead.in_flight if task.wanted]
        if tasks:
            tasks[0].deaths += 1
            if tasks[0].deaths >= _MAX_DEATHS:
                raise RuntimeError(
                    f"DataLoader worker (pid {dead.process.pid}) {_cause(dead.process.exitcode)}; so did {_MAX_DEATHS - 1} "
                    "others before it, at the same batch"
                )
        self._processes[number] = self._start()
        self._processes[number].waiting.extend([*tasks, *(task for task in dead.waiting if task.wanted)])
        self._send(number)

    # Messages.

    def _send(self, number: int) -> None:
        process = self._processes[number]
        while process.waiting and process.may_send():
            task = process.waiting[0]
            if not task.wanted:
                process.waiting.popleft()
                continue
            request = task.request(task.data_worker not in process.known)
            try:
                size = process.wire.send(request)
            except OSError:
                self._replace(number)
                return
            if task.data_worker is not None:
                process.known.add(task.data_worker)
            process.in_flight.append((process.waiting.popleft(), size))

    def _receive(self, number: int) -> None:
        process = self._processes[number]
        try:
            reply: BatchReply = process.wire.receive()
        except (EOFError, ConnectionError):
            self._replace(number)
            return
        task, _ = process.in_flight.popleft()
        task.reply = reply
        if task.received is not None:
            task.received(reply)
        self._send(number)

    def receive_ready(self) -> None:
        """Receive the replies that have arrived."""
        poll = select.poll()
        for process in self._processes:
            poll.register(process.wire.fileno(), select.POLLIN)
        ready = {file for file, _ in poll.poll(0)}
        for number, process in enumerate(self._processes):
            if process.wire.fileno() in ready:
                self._receive(number)

    def _readable(self, number: int, deadline: float | None) -> bool:
        poll = select.poll()
        poll.register(self._processes[number].wire.fileno(), select.POLLIN)
        left = None if deadline is None else max(deadline - time.monotonic(), 0) * 1000
        return bool(poll.poll(left))


def _cause(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        hint = " (is shared memory, /dev/shm, full?)" if exitcode == -signal.SIGBUS else ""
        return f"is killed by signal: {signal.strsignal(-exitcode)}{hint}"
    return f"exited unexpectedly with code {exitcode}"


def _serve(sock: socket.socket, recipe: BatchRecipe, parent: int | None) -> None:
    """The main function of a data worker process."""
    if parent is not None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            return
    # A terminal sends these to the whole process group; the worker handles them. Handlers, unlike "ignore", are not
    # inherited by programs that a dataset starts.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, _ignore_signal)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    wire, worker = BatchWire(sock), DataWorker(recipe)
    outbox = _Outbox(wire)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            request = wire.receive()
            reply = worker.reply(request)
            try:
                outbox.put(pack(reply))
            except Exception:  # a batch that cannot be sent
                outbox.put(pack(BatchReply(error=torch_internals.wrap_exception(request.worker))))


class _Outbox:
    """Sends in a thread of its own: sending wakes the reader, which may take the core of the sending thread."""

    def __init__(self, wire: BatchWire) -> None:
        self._wire = wire
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        threading.Thread(target=self._send, name="outbox", daemon=True).start()

    def put(self, frame: Frame) -> None:
        self._frames.put(frame)

    def _send(self) -> None:
        while True:
            try:
                self._wire.post(self._frames.get())
            except OSError:  # the worker has gone
                os._exit(0)


def _ignore_signal(number: int, frame: Any) -> None:
    pass
