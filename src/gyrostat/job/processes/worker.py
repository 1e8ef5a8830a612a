"""One worker process, from its start to its exit code.

`run_worker` is the main function of both kinds of worker: one that was forked by the fork server (`fork_server`), which has
imported everything already, and a cold one, a fresh interpreter (`python -m gyrostat.job.processes.worker FD`). In order: set
the job's environment, install signal handlers, enter the engine's session, run the user's program as `__main__`, finish the
session, exit.

Threads: the main thread runs the script; `gyrostat-listener` handles messages of the agent; `gyrostat-leaver` reports SIGTERM.

Signals. SIGUSR1 requests a checkpoint at the next boundary. SIGTERM asks this worker to leave a job that the other workers
continue: it reports that to the coordinator and trains on until it is released. SIGINT, and SIGTERM to the only worker, make a
job with checkpoints save one at the next boundary and stop; without checkpoints they have their usual effect on a Python
program. The launcher sends `Terminate` to all workers for the same purpose. `WorkerEnded` names the signal that caused it. A
worker of a job with parameter servers leaves after the batch that it runs, whichever of these signals it gets.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import queue
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from pathlib import Path
from types import FrameType, ModuleType
from typing import NoReturn

import msgspec

from gyrostat.core import logs
from gyrostat.core.errors import ForeignCheckpoint, GyrostatError, OtherFingerprint, PeerLost, UsageError
from gyrostat.core.logs import note
from gyrostat.core.phase import AgentPresence
from gyrostat.job import environment
from gyrostat.job.diagnostics import stacks
from gyrostat.job.diagnostics.black_box import BlackBox
from gyrostat.job.processes import confined
from gyrostat.job.processes.agent_connection import AgentConnection
from gyrostat.job.processes.channel import Channel
from gyrostat.job.processes.messenger import Messenger
from gyrostat.job.processes.protocol import (
    BeginRecovery,
    Cancel,
    Failed,
    FailureKind,
    Ping,
    Prepare,
    Program,
    SetFence,
    Terminate,
    ToWorker,
    WorkerEnded,
    WorkerLeaving,
    WorkerSpec,
)

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_SEND_TIMEOUT_S = 60.0
_LONGEST_SUMMARY = 2_000
_LONGEST_TRACEBACK = 32_000
_PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep


def run_worker(spec: WorkerSpec, channel: Channel[ToWorker]) -> NoReturn:
    """Run the worker that `spec` describes in this process, and exit."""
    code = 1
    try:
        connection = AgentConnection(
            channel,
            spec.worker_id,
            spec.agent,
            agent_timeout_s=spec.agent_timeout_s,
            on_agent=_set_agent,
        )
        messenger = Messenger(connection, _open_black_box(spec.black_box))
        if spec.shows_stacks and spec.black_box is not None:
            stacks.dump_on_signal(Path(f"{spec.black_box}.stacks"))
        _set_environment(spec)
        logs.configure_from_environment()
        fields = spec.worker_id.log_fields
        how = "starts, to join a running job" if spec.assignment.joins else "starts"
        logger.info("worker %d %s", spec.worker_id.member, how, extra=fields)
        exits = Exits()
        if not spec.assignment.options.reference:
            # These threads inherit the mask: only the script's thread gets signals, and it may block or wait for them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            for name, work, args in (
                ("gyrostat-listener", _listen, (connection, exits)),
                ("gyrostat-leaver", exits.report, (connection,)),
            ):
                threading.Thread(target=work, args=args, name=name, daemon=True).start()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        code = _run(spec, messenger, connection, exits)
        connection.wait_until_sent(_SEND_TIMEOUT_S)
        logger.info("worker %d exits with code %d", spec.worker_id.member, code, extra=fields)
    except BaseException:
        traceback.print_exc()
    finally:
        exit_process(code)


class Exits:
    """The meaning of SIGTERM: this worker leaves the job, or, once the launcher has sent `Terminate`, the job ends."""

    def __init__(self) -> None:
        self._leave_requests: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.job_ends = False
        self.asked_by: int | None = None
        """The signal that asked this worker to stop the job."""

    def leave(self) -> None:
        """Safe in a signal handler: sending a message here would need a lock that the interrupted code may hold."""
        self._leave_requests.put(None)

    def report(self, connection: AgentConnection) -> None:
        """Report requests to leave; runs in a thread of its own."""
        while True:
            self._leave_requests.get()
            connection.send(WorkerLeaving())

    def end_job(self, *, failed: bool) -> None:
        """Called in the listener thread. The signal handler, possibly the script's own, runs in the main thread.

        `failed`: the job ends because another worker failed, not because a user asked for it.
        """
        self.job_ends = True
        if not failed:
            self.asked_by = signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)


def exit_process(code: int) -> NoReturn:
    """Exit as the interpreter would, without tearing it down.

    Waits for threads that are not daemons, and runs atexit handlers. The rest of a normal exit, the destructors of modules and
    of C++ statics, is skipped: it can hang while threads of gloo run.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def die_with_parent(number: int) -> None:
    """Have the kernel send signal `number` to this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _set_environment(spec: WorkerSpec) -> None:
    """Set the job's directory, environment variables and standard streams."""
    confined.enter_directory(spec.cwd, spec.program.beneath)
    environment.set_variables(spec.env)
    # New streams: those of the fork server belong to other files, and the launcher shows whole lines.
    sys.stdout = sys.__stdout__ = _line_buffered(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _line_buffered(2)  # type: ignore[misc]

    import numpy

    # As in a fresh interpreter. Otherwise all workers inherit the fork server's state, and a script that draws before it
    # seeds looks reproducible until the next run. (Python's own generator reseeds itself after a fork.)
    numpy.random.seed()


def _open_black_box(path: str | None) -> BlackBox | None:
    """None if the file cannot be created: the worker trains without a black box."""
    try:
        return None if path is None else BlackBox(Path(path))
    except OSError as error:
        note(f"no black box for this worker, so a crash report will not name its micro-batch: {error}")
        return None


def _set_agent(agent: AgentPresence) -> None:
    from gyrostat.engine.script import session

    session.set_agent(agent)


def _line_buffered(file: int) -> TextIOWrapper:
    return open(file, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _run(spec: WorkerSpec, messenger: Messenger, connection: AgentConnection, exits: Exits) -> int:
    """Run the user's program in a session of the engine. Returns the exit code."""
    from gyrostat.engine.script import session
    from gyrostat.engine.script.checks import leftover_of_ddp

    assignment = spec.assignment
    _install_signal_handlers(
        session,
        exits,
        stops=assignment.options.checkpoint is not None or assignment.servers is not None,
        elastic=not assignment.options.reference,
    )
    try:
        session.enter(spec.assignment, messenger)
        try:
            run_program(spec.program)
        except (session.JobStopRequested, session.Left):
            raise
        except SystemExit as exit:
            if code := _exit_code(exit):
                return code
            session.finish(exit)
        else:
            session.finish()
        connection.send(WorkerEnded(stopped=False))
        return 0
    except session.JobStopRequested as stopped:
        connection.send(WorkerEnded(stopped=True, asked_by=exits.asked_by))
        return _exit_code(stopped)
    except session.Left as left:
        connection.send(WorkerEnded(stopped=False, left=True))
        return _exit_code(left)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        raise
    except BaseException as error:
        leftover = None if assignment.options.reference else leftover_of_ddp(error)
        return _report(leftover or error, connection)


def _listen(connection: AgentConnection, exits: Exits) -> None:
    """Handle the agent's messages, in the listener thread. Before the script has called gyrostat.init, only `Terminate` and
    `Ping` have an effect."""
    from gyrostat.engine.script import session

    for message in connection.messages():
        membership = session.membership()
        if isinstance(message, Terminate):
            exits.end_job(failed=message.final)
            if membership is not None and message.final:
                membership.abandon()
            continue
        if isinstance(message, Ping):
            connection.answer_ping()
            continue
        if membership is None:
            continue
        match message:
            case Prepare(plan=plan):
                membership.prepare(plan)
            case SetFence(generation=generation, not_before=step):
                membership.set_fence(generation, step)
            case Cancel(generation=generation):
                membership.cancel(generation)
            case BeginRecovery(plan=plan):
                membership.recover(plan)


def run_program(program: Program) -> None:
    """Run it in this process, as `python [-m] name args…` does."""
    if program.module:
        sys.path.insert(0, os.getcwd())
        sys.argv = [program.name, *program.args]
        runpy.run_module(program.name, run_name="__main__", alter_sys=True)
    elif program.beneath:
        script = os.path.abspath(program.name)
        sys.argv = [script, *program.args]
        confined.run_script(script, program.beneath)
    else:
        script = os.path.abspath(program.name)
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
        sys.argv = [script, *program.args]
        runpy.run_path(script, run_name="__main__")


def _exit_code(exit: SystemExit) -> int:
    """The exit code that the interpreter would use for this `sys.exit(…)`; prints its message if it has one."""
    if exit.code is None:
        return 0
    if isinstance(exit.code, int):
        return exit.code & 0xFF
    print(exit.code, file=sys.stderr)
    return 1


def _install_signal_handlers(session: ModuleType, exits: Exits, *, stops: bool, elastic: bool) -> None:
    """`stops`: the job can save a checkpoint at a boundary and stop there, or this worker of a job with parameter servers can
    leave after a batch. `elastic`: a worker can leave the job."""

    def checkpoint(number: int, frame: FrameType | None) -> None:
        session.request_checkpoint()

    def stop(number: int, frame: FrameType | None) -> None:
        exits.asked_by = exits.asked_by or number
        session.request_stop()

    def terminate(number: int, frame: FrameType | None) -> None:
        if not exits.job_ends and session.has_others():
            exits.leave()
        elif stops:
            if not exits.job_ends:
                exits.asked_by = exits.asked_by or number
            session.request_stop()
        else:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGUSR1, checkpoint)
    if elastic or stops:
        signal.signal(signal.SIGTERM, terminate)
        _reset_in_children(terminate)
    signal.signal(signal.SIGINT, stop if stops else signal.default_int_handler)


def _reset_in_children(handler: Callable[[int, FrameType | None], None]) -> None:
    """SIGTERM ends processes that the script forks, as it would without gyrostat: even one that arrives before they run."""
    masks = threading.local()

    def block() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def reset() -> None:
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset)


def _report(error: BaseException, connection: AgentConnection) -> int:
    """Send the launcher what the script raised. Returns the exit code."""
    text, kind = format_traceback(error), _kind(error)
    summary = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if kind is FailureKind.REFUSED:
        text = summary = str(error)
    connection.send(Failed(kind, shortened(summary, _LONGEST_SUMMARY), shortened(text, _LONGEST_TRACEBACK)))
    if not connection.delivers:
        print(text, file=sys.stderr)
    return error.exit_code if isinstance(error, GyrostatError) else 1


def shortened(text: str, length: int) -> str:
    """Without the middle, if it is longer: a message to the leader must not be too large for the network."""
    if len(text) <= length:
        return text
    return f"{text[: length // 2]} … ({len(text) - length} characters left out) … {text[-(length // 2) :]}"


def _kind(error: BaseException) -> FailureKind:
    """A lost peer is the cause even if the script's own clean-up raised another error after it."""
    if any(isinstance(cause, PeerLost) for cause in _causes(error)):
        return FailureKind.PEER_LOST
    if isinstance(error, ForeignCheckpoint | OtherFingerprint):
        return FailureKind.REFUSED
    return FailureKind.USAGE if isinstance(error, UsageError) else FailureKind.SCRIPT


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def format_traceback(error: BaseException) -> str:
    """The traceback without gyrostat's own frames above the script."""
    formatted = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = formatted
    while part is not None:
        frames = list(part.stack)
        while frames and _is_bootstrap(frames[0].filename):
            del frames[0]
        if isinstance(error, UsageError):  # the mistake is in the script's call, not in our checks
            while len(frames) > 1 and frames[-1].filename.startswith(_PACKAGE):
                del frames[-1]
        part.stack = traceback.StackSummary.from_list(frames)
        part = part.__cause__ or part.__context__
    return "".join(formatted.format()).rstrip()


def _is_bootstrap(filename: str) -> bool:
    return filename in ("<frozen runpy>", __file__, confined.__file__) or filename.endswith("runpy.py")


def main() -> NoReturn:
    """A cold worker: a fresh interpreter that inherits two files, its socket and its `WorkerSpec`."""
    die_with_parent(signal.SIGKILL)
    channel, spec_file = map(int, sys.argv[1:])
    with open(spec_file, "rb") as file:
        spec = msgspec.msgpack.decode(file.read(), type=WorkerSpec)
    run_worker(spec, Channel(socket.socket(fileno=channel), ToWorker))


if __name__ == "__main__":
    main()
