"""Runs one job on this machine: starts its workers, listens, ends them all, and says what came of it.

`run_job` is the whole of it. `start` knows how workers are made, `watch` decides who failed and who is to be
ended, `outcome` adds up; here is only the loop that carries it out:

    1. wait until a worker says or prints something, exits, a signal arrives, or a deadline passes
    2. take in what has arrived
    3. carry out what `watch` orders

However it ends, by an exception too, no worker is left running.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from gyrostat.core.errors import UsageError
from gyrostat.core.job import Assignment, CheckpointPolicy, Determinism, Pool, Probe, Reduction
from gyrostat.core.placement import Placement
from gyrostat.job.coordinator import (
    Change,
    Coordinator,
    Done,
    End,
    GiveUp,
    Instruction,
    Refused,
    Start,
    Tell,
    changes,
)
from gyrostat.job.door import (
    Answer,
    AskCheckpoint,
    AskStatus,
    AskStop,
    Door,
    Migrate,
    Request,
    Scale,
    Status,
    Visitor,
)
from gyrostat.job.observer import Nobody, Observer, Stream
from gyrostat.job.outcome import Outcome, Tally
from gyrostat.job.output import Lines, LogFiles
from gyrostat.job.protocol import (
    Channel,
    Ended,
    Failed,
    FromWorker,
    Prepared,
    Program,
    ProtocolError,
    Ready,
    Started,
    Steps,
    Switched,
    WorkerSpec,
)
from gyrostat.job.signals import SignalQueue, caught
from gyrostat.job.start import ForkParent, WorkerSource
from gyrostat.job.tracefile import join_traces
from gyrostat.job.watch import Cause, Order, Watch

_GENERATION = 1


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What to run, and how."""

    program: Program
    placement: Placement
    virtual_workers_given: bool = True
    """False: the script may choose their number itself."""
    threads: int = 1
    reduction: Reduction | None = None
    determinism: Determinism = Determinism.ELASTIC
    pool: Pool | None = None
    """Device types of a `heterogeneous` job."""
    checkpoint: CheckpointPolicy | None = None
    reference: bool = False
    """As plain DDP: one process per virtual worker, whatever the placement says."""
    probe: Probe | None = None
    stop_after: int | None = None
    cwd: Path | None = None
    """Where workers run; here if None."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Set for the workers on top of this process's environment."""
    worker_env: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Set for single workers on top of that, such as `core.determinism.STARTED_AS` another type of CPU."""
    worker_threads: Mapping[int, int] = field(default_factory=dict)
    """For workers that are started with another number of threads."""
    check_fingerprint: bool = True
    """False: workers whose bits differ are let in. For tests."""
    log_dir: Path | None = None
    """Where what each worker prints is kept as well."""
    trace: Path | None = None
    """Where to write a trace of where time went."""
    timeout_s: float = 1800.0
    """How long a collective may wait for a silent peer."""
    name: str | None = None
    """By which others can ask the running job for something; without one nobody can."""
    schedule: Sequence[tuple[int, int]] = ()
    """(step, workers): from that step's boundary on, so many."""

    restarts: int = 0
    """How often a job that checkpoints is started again when a worker has died, through no fault of its script."""

    def after(self, outcome: Outcome) -> RunRequest:
        """The same job once more, from its newest checkpoint, on as many workers as it had."""
        assert self.checkpoint is not None
        same = (
            self
            if self.schedule or outcome.workers == self.placement.workers
            else replace(self, placement=Placement.even(outcome.virtual_workers, outcome.workers))
        )
        return replace(same, checkpoint=replace(self.checkpoint, resume=True))

    def crew(self) -> Placement:
        """The placement that is really run."""
        return (
            Placement.from_counts([1] * self.placement.virtual_workers) if self.reference else self.placement
        )

    def check(self) -> None:
        """Refuse what cannot be run, before anything is started."""
        if self.threads < 1:
            raise UsageError(f"a worker needs at least one thread, got {self.threads}")
        if (self.pool is not None) != (self.determinism is Determinism.HETEROGENEOUS):
            raise UsageError(
                "a pool of device types and the level `heterogeneous` need each other: "
                "--determinism heterogeneous --pool avx512,avx2"
            )
        if not self.program.module and not (self._directory() / self.program.name).is_file():
            raise UsageError(f"there is no script {self.program.name!r}; for a module use -m")

    def changes(self) -> list[Change]:
        """What the schedule asks for."""
        return changes(self.crew().workers, self.schedule)

    def spec(self, worker: int, store: str, *, joins: bool = False) -> WorkerSpec:
        """What worker number `worker` is told. Parts of the trace go beside the store.

        One that `joins` is alone until it is told which generation it belongs to.
        """
        placement = self.crew()
        if joins:
            placement = Placement.even(placement.virtual_workers, 1)
        threads = self.worker_threads.get(worker, self.threads)
        assignment = Assignment(
            placement=placement,
            worker=0 if joins else worker,
            member=worker,
            joins=joins,
            holds=tuple(change.at_step for change in self.changes() if change.at_step is not None),
            generation=_GENERATION,
            store=store,
            virtual_workers_given=self.virtual_workers_given,
            reduction=self.reduction,
            determinism=self.determinism,
            threads=threads,
            pool=self.pool,
            check_fingerprint=self.check_fingerprint,
            checkpoint=self.checkpoint,
            reference=self.reference,
            stop_after=self.stop_after,
            probe=self.probe,
            trace=None if self.trace is None else os.path.dirname(store),
            timeout_s=self.timeout_s,
        )
        env = {
            "PYTHONHASHSEED": "0",
            **os.environ,
            "RANK": str(worker),
            "LOCAL_RANK": str(worker),
            "WORLD_SIZE": str(placement.workers),
            "LOCAL_WORLD_SIZE": str(placement.workers),
            "OMP_NUM_THREADS": str(threads),
            **self.env,
            **self.worker_env.get(worker, {}),
        }
        return WorkerSpec(assignment=assignment, program=self.program, cwd=str(self._directory()), env=env)

    def _directory(self) -> Path:
        return (self.cwd or Path()).absolute()


def run_job(
    request: RunRequest,
    *,
    parent: WorkerSource | None = None,
    observer: Observer | None = None,
    forward_signals: bool = False,
) -> Outcome:
    """Run a job to its end, good or bad; `Outcome.check` raises if it was bad.

    `parent` is a fork parent that is running already (it serves one job at a time); without one, one is
    started and ended. `forward_signals` takes over SIGINT, SIGTERM, SIGHUP and SIGUSR1 of this process
    meanwhile.
    """
    request.check()
    observer = observer or Nobody()
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(caught()) if forward_signals else None
        source = parent if parent is not None else stack.enter_context(ForkParent())
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="gyrostat-"))
        crew = request.crew()
        tally = Tally(crew.virtual_workers, crew.workers, time.monotonic())
        for attempt in itertools.count():
            runtime = Path(directory) / f"attempt-{attempt}"
            runtime.mkdir()
            with _Run(request, source, observer, signals, runtime, tally, again=attempt > 0) as run:
                run.start()
                outcome = run.until_over()
            if attempt == request.restarts or not _is_worth_another(outcome, request):
                break
            assert outcome.failure is not None
            tally.died(outcome.failure, time.monotonic())
            observer.died(outcome.failure)
            request = request.after(outcome)
        if request.trace is not None:
            join_traces(runtime, request.trace)
    observer.over(outcome)
    return outcome


def _is_worth_another(outcome: Outcome, request: RunRequest) -> bool:
    """A worker that died, and not its script, can be had again; and a job that checkpoints loses nothing by it."""
    died = outcome.failure is not None and outcome.failure.cause in (
        Cause.KILLED,
        Cause.VANISHED,
        Cause.PEER_LOST,
    )
    return died and request.checkpoint is not None and outcome.stopped_by is None


class _Worker:
    """A started worker, as seen from here: its process, its channel and its two pipes."""

    def __init__(self, index: int, spec: WorkerSpec, source: WorkerSource) -> None:
        self.index = index
        ours, theirs = socket.socketpair()
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        self.channel: Channel[FromWorker] = Channel(ours, FromWorker)
        self.pipes = {out: (Stream.STDOUT, Lines()), err: (Stream.STDERR, Lines())}
        try:
            self.pid = source.start(spec, out_end, err_end, theirs)
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()
            os.close(out_end)
            os.close(err_end)
        os.set_blocking(out, False)
        os.set_blocking(err, False)

    def tell(self, message: msgspec.Struct) -> None:
        with contextlib.suppress(OSError):  # then it has gone, and we shall hear of that
            self.channel.send(message)

    def close(self) -> None:
        for pipe in self.pipes:
            os.close(pipe)
        self.pipes.clear()
        self.channel.close()


class _Run:
    """The loop. A context: leaving it kills what still runs."""

    def __init__(
        self,
        request: RunRequest,
        source: WorkerSource,
        observer: Observer,
        signals: SignalQueue | None,
        runtime: Path,
        tally: Tally,
        *,
        again: bool,
    ) -> None:
        self._request = request
        self._source = source
        self._observer = observer
        self._signals = signals
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, _Worker] = {}
        placement = request.crew()
        self._tally = tally
        self._watch = Watch(list(range(placement.workers)), checkpoints=request.checkpoint is not None)
        self._coordinator = Coordinator(
            placement.virtual_workers,
            tuple(range(placement.workers)),
            store=lambda generation: f"{runtime}/store-{generation}",
            schedule=request.changes(),
        )
        self._logs = LogFiles(request.log_dir, append=again) if request.log_dir else None
        self._door = Door(request.name) if request.name else None

    def start(self) -> None:
        self._selector.register(self._source, selectors.EVENT_READ)
        if self._door is not None:
            self._selector.register(self._door, selectors.EVENT_READ, self._door)
        if self._signals is not None:
            self._selector.register(self._signals, selectors.EVENT_READ)
        for index in self._watch.crew:
            self._start_worker(index, joins=False)
        self._take_exits()  # those that came while others were started have been read, and wake nobody up

    def _start_worker(self, index: int, *, joins: bool) -> None:
        spec = self._request.spec(index, self._coordinator.store(_GENERATION), joins=joins)
        if self._logs:
            self._logs.open(index)
        worker = _Worker(index, spec, self._source)
        self._workers[worker.pid] = worker
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        for pipe in worker.pipes:
            self._selector.register(pipe, selectors.EVENT_READ, worker)

    def until_over(self) -> Outcome:
        while not self._watch.over:
            wish = self._observer.ticked()
            for key, _ in self._selector.select(self._patience(wish)):
                if isinstance(key.data, _Worker):
                    self._read(key.data, key.fileobj)
                elif isinstance(key.data, Door):
                    self._open_door(key.data)
                elif isinstance(key.data, Visitor):
                    self._hear_out(key.data)
            self._take_exits()
            now = time.monotonic()
            for number in self._signals.take() if self._signals else ():
                self._obey(self._watch.asked(number, now))
            self._obey(self._watch.orders(now))
        return self._tally.outcome(
            now=time.monotonic(),
            exit_codes=self._watch.codes,
            failure=self._watch.failure(),
            stopped=self._watch.stopped,
            stopped_by=self._watch.stopped_by,
        )

    def _patience(self, wish: float | None) -> float | None:
        """How long to wait at most: the observer's wish, or the watch's deadline if that is sooner."""
        deadline = self._watch.deadline()
        waits = [] if wish is None else [wish]
        if deadline is not None:
            waits.append(max(0.0, deadline - time.monotonic()))
        return min(waits, default=None)

    def _read(self, worker: _Worker, ready: object) -> None:
        """One piece of what there is, so that a worker that never pauses cannot keep us from the others."""
        if isinstance(ready, int):
            self._read_pipe(worker, ready)
            return
        messages = worker.channel.receive(wait=False)
        if messages is None:
            self._selector.unregister(worker.channel)
        for message in messages or ():
            self._hear(worker.index, message)

    def _hear(self, index: int, message: FromWorker) -> None:
        now = time.monotonic()
        self._tally.add(index, message, now)
        if isinstance(message, Failed):
            if self._logs:
                self._logs.write(index, message.traceback)
            if self._coordinator.is_newcomer(index):
                self._carry_out(self._coordinator.gone(index, f"raised {message.summary}", now))
            else:
                self._watch.failed(index, message, now)
        elif isinstance(message, Ended):
            self._watch.ended(index, message)
            if not message.left:
                self._carry_out(self._coordinator.over())
        elif isinstance(message, Started):
            self._obey(self._watch.began())
        self._carry_out(self._coordinate(index, message, now))
        self._observer.heard(index, message)

    def _coordinate(self, index: int, message: FromWorker, now: float) -> list[Instruction]:
        """What the coordinator makes of what a worker says."""
        match message:
            case Started(alike=alike, step=step, virtual_workers=number):
                return self._coordinator.started(alike, step, number or self._tally.virtual_workers, now)
            case Steps(steps=steps):
                self._coordinator.stepped(steps[-1].step)
            case Ready(alike=alike):
                return self._coordinator.ready(index, alike, now)
            case Prepared(generation=generation):
                return self._coordinator.prepared(index, generation)
            case Switched(generation=generation, step=step, paused=paused, why_all=why_all):
                return self._coordinator.switched(index, generation, step, paused, now, why_all)
        return []

    def _carry_out(self, instructions: list[Instruction]) -> None:
        now = time.monotonic()
        for instruction in instructions:
            match instruction:
                case Start(member=member):
                    self._start_worker(member, joins=True)
                case Tell(member=member, message=message):
                    for worker in self._workers.values():
                        if worker.index == member:
                            worker.tell(message)
                case End(member=member):
                    for worker in self._workers.values():
                        if worker.index == member:
                            self._source.signal(worker.pid, signal.SIGKILL)
                case Done() as done:
                    self._watch.joined(done.joined)
                    if done.joined or done.before != done.after:
                        self._tally.resized(done, now)
                        self._observer.resized(done)
                    text = f"{done.after} workers since step {done.step}"
                    times = done.paused * 1e3, done.prepared * 1e3
                    self._tell_door(done.change, Answer(True, text, done.step, done.after, *times))
                case Refused(change=change, reason=reason):
                    if not reason.endswith("retry"):
                        self._tally.refused(change, reason, now)
                        self._observer.refused(change, reason)
                    workers = len(self._coordinator.members)
                    self._tell_door(change, Answer(False, reason, self._tally.step, workers))
                case GiveUp(reason=reason):
                    self._watch.gave_up(reason, now)

    def _open_door(self, door: Door) -> None:
        visitor = door.welcome()
        if visitor is not None:
            self._selector.register(visitor.channel, selectors.EVENT_READ, visitor)

    def _hear_out(self, visitor: Visitor) -> None:
        """Somebody asks for something."""
        try:
            requests = visitor.channel.receive(wait=False)
        except (ProtocolError, OSError) as error:
            visitor.answer(Answer(False, str(error)))
            requests = None
        if requests is None:
            self._selector.unregister(visitor.channel)
            visitor.channel.close()
        for request in requests or ():
            self._serve(request, visitor)

    def _serve(self, request: Request, visitor: Visitor) -> None:
        now, coordinator = time.monotonic(), self._coordinator
        match request:
            case AskStatus():
                visitor.answer(self._status())
            case AskCheckpoint() | AskStop() if self._request.checkpoint is None:
                visitor.answer(
                    Answer(
                        False, "the job has nowhere to checkpoint: it was started without --checkpoint-dir"
                    )
                )
            case AskCheckpoint():
                self._obey(self._watch.asked(signal.SIGUSR1, now))
                visitor.answer(Answer(True, "asked for, at the next boundary", self._tally.step))
            case AskStop():
                self._obey(self._watch.asked(signal.SIGTERM, now))
                visitor.answer(Answer(True, "asked for, at the next boundary", self._tally.step))
            case Scale(request=name, workers=workers) if self._is_new(name, visitor):
                change = Change(workers=workers, reason="asked for", request=name)
                self._carry_out(coordinator.asked(change, now))
            case Migrate(request=name, members=members) if self._is_new(name, visitor):
                change = Change(
                    workers=len(coordinator.members), reason="asked to migrate", request=name, without=members
                )
                self._carry_out(coordinator.asked(change, now))

    def _is_new(self, name: str, visitor: Visitor) -> bool:
        assert self._door is not None
        return self._door.is_new(name, visitor)

    def _status(self) -> Status:
        coordinator, tally = self._coordinator, self._tally
        return Status(
            name=self._request.name or "",
            program=self._request.program.name,
            pid=os.getpid(),
            virtual_workers=tally.virtual_workers,
            workers=len(coordinator.members),
            members=coordinator.members,
            generation=coordinator.generation,
            phase=str(coordinator.phase) if coordinator.training else "starting",
            step=tally.step,
            loss=tally.steps[-1].loss if tally.steps else None,
            throughput=tally.rate(),
        )

    def _tell_door(self, change: Change, answer: Answer) -> None:
        if self._door is not None:
            self._door.answer(change.request, answer)

    def _read_pipe(self, worker: _Worker, pipe: int) -> bool:
        """Read once; close the pipe at its end. False when there is nothing more for now."""
        stream, lines = worker.pipes[pipe]
        try:
            data = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return False
        for line in lines.feed(data):
            self._print(worker.index, stream, line)
        if not data:
            self._close_pipe(worker, pipe)
        return bool(data)

    def _close_pipe(self, worker: _Worker, pipe: int) -> None:
        stream, lines = worker.pipes.pop(pipe)
        self._selector.unregister(pipe)
        os.close(pipe)
        for line in lines.end():
            self._print(worker.index, stream, line)

    def _print(self, index: int, stream: Stream, line: str) -> None:
        if self._logs:
            self._logs.write(index, line)
        self._observer.printed(index, stream, line)

    def _take_exits(self) -> None:
        """What a worker said before it went is all in its pipes by now: read that first, it counts."""
        for exited in self._source.exits():
            worker = self._workers.pop(exited.pid, None)
            if worker is None:
                continue  # of an earlier job of the same fork parent
            for message in worker.channel.drain():
                self._hear(worker.index, message)
            for pipe in list(worker.pipes):
                while self._read_pipe(worker, pipe):
                    pass
            for pipe in list(worker.pipes):  # somebody it started holds the other end
                self._close_pipe(worker, pipe)
            with contextlib.suppress(KeyError):
                self._selector.unregister(worker.channel)
            worker.close()
            now = time.monotonic()
            if worker.index not in self._watch.crew:
                how = (
                    f"was killed by signal {-exited.code}"
                    if exited.code < 0
                    else f"exited with {exited.code}"
                )
                self._carry_out(self._coordinator.gone(worker.index, how, now))
            if worker.index in self._watch.crew:
                self._watch.exited(worker.index, exited.code, now)

    def _obey(self, orders: list[Order]) -> None:
        for order in orders:
            for worker in self._workers.values():
                if worker.index in order.workers:
                    self._source.signal(worker.pid, order.signal)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            self._selector.close()
            if self._door is not None:
                self._door.close()
            if self._logs:
                self._logs.close()
