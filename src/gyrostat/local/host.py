"""The host of a job: a process that runs it through `job.launcher` and outlives the daemon.

It is forked by `host_fork_server`, where everything is imported, forks a fork server for the job's workers, writes `ready`,
and waits on its standard input for one command: `{"directory": …, "attempt": …}`. So a submitted job begins to train within
a fraction of a second. If its standard input ends instead, the daemon has ended or does not need it, and it ends too.

    1. lock the job's directory       (or leave the job to the process that has it)
    2. check that the attempt is due  (or end)
    3. run it until it ends, or is stopped through its control socket
    4. write the result, and release the lock
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gyrostat.cluster.attempt import AttemptResult, unstarted
from gyrostat.core.errors import GyrostatError, UsageError
from gyrostat.core.events import Event, EventKind
from gyrostat.core.placement import Placement
from gyrostat.core.plural import plural
from gyrostat.core.roles import ProcessRole
from gyrostat.job.control.device_assignment import DeviceAssignment, counts_by_pace
from gyrostat.job.control.instructions import SurvivorsGoOn
from gyrostat.job.control.observer import NullObserver
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.control.run_request import ServerSettings
from gyrostat.job.control.worker_tracker import DEATHS, FailureCause, JobFailure
from gyrostat.job.diagnostics.stragglers import Straggler
from gyrostat.job.diagnostics.watchdog import Standstill
from gyrostat.job.launcher import RunRequest, run_job
from gyrostat.job.processes.confined import check_program
from gyrostat.job.processes.output import OutputStream
from gyrostat.job.processes.protocol import FromWorker, Logged, NotCheckpointed, Program, Started, StepReports
from gyrostat.job.processes.start import WorkerForkServer
from gyrostat.local.curves import Curves, Point
from gyrostat.local.environment import set_runtime_directory
from gyrostat.local.host_files import (
    CHECKPOINTS,
    LOGS,
    HostOrder,
    holding,
    is_due,
    read_order,
    register_host,
    write_result,
)
from gyrostat.local.incidents import Incident, IncidentKind, encode_incident, incidents_file
from gyrostat.local.rotating_log import RotatingFile
from gyrostat.local.tensorboard import EventFile

logger = logging.getLogger(__name__)
_LAST_LINES = 20
_AGAIN_S = 2.0


class HostCommand(msgspec.Struct, frozen=True):
    """The line on standard input."""

    directory: str
    attempt: int


def main() -> None:
    with WorkerForkServer.forked() as parent:
        parent.wait_until_ready()
        if (command := _await_command()) is not None:
            host(Path(command.directory), command.attempt, parent)


def _await_command() -> HostCommand | None:
    """None: the daemon does not need this host, or has ended."""
    try:
        print("ready", flush=True)
        line = sys.stdin.buffer.readline()
    except ConnectionError:
        return None
    return msgspec.json.decode(line, type=HostCommand) if line else None


def host(directory: Path, attempt: int, parent: WorkerForkServer) -> None:
    """Run an attempt of a job, unless another process does or did."""
    with holding(directory) as ours:
        order = read_order(directory)
        if not ours or order is None or not is_due(directory, order, attempt):
            return
        try:
            register_host(directory, attempt, parent.pid)
            recorder = OutputRecorder(directory)
        except OSError as error:
            _store_result(directory, unstarted(attempt, f"its host could not begin: {error}"))
            return
        logger.info("attempt %d begins in process %d", attempt, os.getpid(), extra={"job": order.job})
        try:
            outcome = run_job(
                _request(directory, order), parent=parent, observer=recorder, forward_signals=True
            )
            result = _result(attempt, outcome, recorder)
        except GyrostatError as error:
            result = _failed(attempt, str(error), recorder, retriable=not isinstance(error, UsageError))
        except Exception as error:
            for line in traceback.format_exc().splitlines():
                recorder.log(line)
            result = _failed(attempt, f"its host failed: {error!r}", recorder, retriable=True)
        recorder.close()
        logger.info(
            "attempt %d ended: %s", attempt, result.reason, extra={"job": order.job, "step": result.step}
        )
        _store_result(directory, result)


def _store_result(directory: Path, result: AttemptResult) -> None:
    """Write the result; while the disk is full, wait for room."""
    while True:
        try:
            write_result(directory, result)
            return
        except OSError as error:
            print(f"{directory}: the result cannot be written yet: {error}", file=sys.stderr, flush=True)
            time.sleep(_AGAIN_S)


class OutputRecorder(NullObserver):
    """Writes what workers print, what the script logs and how workers die to files."""

    def __init__(self, job: Path) -> None:
        """`job`: its directory."""
        directory = job / LOGS
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._output = RotatingFile(directory / "output.log")
        self._metrics = RotatingFile(directory / "metrics.jsonl")
        self._host = RotatingFile(directory / "host.log")
        self._incidents = RotatingFile(incidents_file(job), largest=sys.maxsize)
        self._board = EventFile(directory / "tensorboard")
        self._curves, self._points = Curves(), RotatingFile(directory / "curves.jsonl")

    def printed(self, worker: int, stream: OutputStream, line: str) -> None:
        self.last_lines.append(line)
        self._output.write(f"[{worker}] {line}")

    def heard(self, worker: int, message: FromWorker) -> None:
        if isinstance(message, Logged):
            self._output.write(f"[job] {message}")
            entry = {"step": message.step, "metrics": message.metrics}
            self._metrics.write(msgspec.json.encode(entry).decode())
            self._board.scalars(message.step, message.metrics)
        elif isinstance(message, Started):
            self._board.began(message.step)
        elif isinstance(message, StepReports):
            self._write_points(self._curves.add(message.steps, time.time(), time.monotonic()))
        elif isinstance(message, NotCheckpointed):
            self.log(message.reason)

    def noticed(self, straggler: Straggler) -> None:
        self.log(str(straggler))

    def stood_still(self, found: Standstill) -> None:
        for line in (str(found), *found.stack_lines()):
            self.log(line)

    def worker_died(self, worker: int, how: str, step: int, evidence: Sequence[str]) -> None:
        self._incident(IncidentKind.WORKER_DIED, f"worker {worker} {how}, after step {step}", evidence)

    def recovered(self, done: SurvivorsGoOn) -> None:
        self._incident(
            IncidentKind.RECOVERED,
            f"{done.after} of {done.before} workers went on after step {done.step}; they stood still for "
            f"{done.paused * 1e3:.0f} ms and repeated {plural(done.redone, 'micro-batch', 'micro-batches')}",
        )

    def happened(self, event: Event) -> None:
        """Of a job with parameter servers. How a worker died has been reported by `worker_died`."""
        if event.role is not ProcessRole.SERVER:
            self.log(event.reason)
        elif event.kind is EventKind.FAILURE:
            self._incident(IncidentKind.SERVER_DIED, event.reason, event.evidence)
        else:
            self._incident(IncidentKind.SERVERS, event.reason, event.evidence)

    def died(self, failure: JobFailure, wait: float, checkpoint: int | None) -> None:
        self._job_failed(failure)
        where = "the beginning" if checkpoint is None else f"the checkpoint of step {checkpoint}"
        self._incident(IncidentKind.RESTARTING, f"in {wait:g} s, from {where}: {failure}")

    def over(self, outcome: Outcome) -> None:
        if outcome.failure is not None:
            self._job_failed(outcome.failure)

    def _job_failed(self, failure: JobFailure) -> None:
        """The others have not recovered from it."""
        if failure.cause in DEATHS:
            self._incident(IncidentKind.WORKER_DIED, str(failure), failure.evidence.describe())

    def _incident(self, kind: IncidentKind, text: str, evidence: Sequence[str] = ()) -> None:
        """The event has what fits into a line; `host.log` has the last output, too."""
        for line in (f"{kind}: {text}", *(f"    {line}" for line in evidence)):
            self.log(line)
        known = [line for line in evidence if line.startswith(("out of memory", "it was running"))]
        self._incidents.write(encode_incident(Incident(kind, "; ".join((text, *known)))))

    def log(self, line: str) -> None:
        self._host.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {line}")

    def close(self) -> None:
        self._write_points(self._curves.rest(time.time(), time.monotonic()))
        for file in (self._output, self._metrics, self._host, self._board, self._points, self._incidents):
            file.close()

    def _write_points(self, points: list[Point]) -> None:
        for point in points:
            self._points.write(msgspec.json.encode(point).decode())


def _request(directory: Path, order: HostOrder) -> RunRequest:
    spec = order.spec
    set_runtime_directory(order.sockets)
    program = Program(name=spec.script, module=spec.module, args=spec.args, beneath=order.beneath)
    check_program(program, spec.workdir)  # a clear error for its owner; every worker checks what it opens
    role = spec.server_role
    counts = counts_by_pace(spec.virtual_workers, order.slots) if role is None else None
    workers = len(order.slots) if role is None else 1
    return RunRequest(
        program=program,
        placement=Placement.even(spec.virtual_workers, workers)
        if counts is None
        else Placement.from_counts(counts),
        servers=None if role is None else ServerSettings(role=role, workers=len(order.slots)),
        options=spec.training_options(directory / CHECKPOINTS),
        failures=spec.failure_policy(),
        device_assignment=DeviceAssignment(order.slots),
        cwd=Path(spec.workdir),
        env=spec.env,
        name=order.job,
    )


def _result(attempt: int, outcome: Outcome, recorder: OutputRecorder) -> AttemptResult:
    failure = outcome.failure
    if failure is not None and failure.traceback:
        for line in failure.traceback.splitlines():
            recorder.printed(failure.worker, OutputStream.STDERR, line)
    if failure is not None or outcome.diverged is not None:
        reason = str(failure) if failure is not None else str(outcome.diverged)
    elif outcome.stopped_by is not None and outcome.digest is None:
        reason = f"stopped after step {outcome.steps}"
    else:
        reason = f"finished after step {outcome.steps}"
    stopped = failure is None and outcome.stopped_by is not None and outcome.digest is None
    return AttemptResult(
        attempt=attempt,
        finished=outcome.ok and not stopped,
        stopped=stopped,
        exit_code=outcome.exit_code,
        reason=reason,
        step=outcome.steps,
        started=outcome.began,
        retriable=outcome.diverged is None and not _is_bad_input(failure),
        digest=outcome.digest,
        loss=next((loss for loss in reversed(outcome.losses) if loss is not None), None),
        last_lines=tuple(recorder.last_lines),
    )


def _failed(attempt: int, reason: str, recorder: OutputRecorder, *, retriable: bool) -> AttemptResult:
    recorder.log(reason)
    return AttemptResult(
        attempt=attempt,
        finished=False,
        stopped=False,
        exit_code=1 if retriable else 2,
        reason=reason,
        step=0,
        started=False,
        retriable=retriable,
        last_lines=tuple(recorder.last_lines),
    )


def _is_bad_input(failure: JobFailure | None) -> bool:
    """It would fail in the same way again."""
    if failure is None or failure.cause not in (FailureCause.RAISED, FailureCause.REFUSED):
        return False
    return failure.exit_code == UsageError.exit_code
