"""The life of one worker process, from its first line to its exit code.

`live` is what both kinds of worker run: the one forked from `forkparent`, where everything is imported
already, and the cold one, a fresh interpreter (`python -m gyrostat.job.processes.worker FD`). In order: take on the
job's environment, listen to signals, enter the engine's session, run the user's program as `__main__`, finish
the session, leave.

Signals. SIGUSR1 asks for a checkpoint at the next boundary. SIGTERM asks this worker to leave a job that others go on
with: the coordinator is told, and it works on until it is let go. SIGINT, and SIGTERM to a worker that is alone, ask a job
that checkpoints to do so at the next boundary and stop; in one that does not they do what they do to any Python program.
`Terminate` is how the launcher asks all workers for that. The last word of a worker names the signal that asked for the stop.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
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

from gyrostat.core.errors import GyrostatError, PeerLost, UsageError
from gyrostat.job.diagnostics import stacks
from gyrostat.job.diagnostics.black_box import BlackBox
from gyrostat.job.processes.messenger import Messenger
from gyrostat.job.processes.protocol import (
    BeginRecovery,
    Cancel,
    Channel,
    FailureKind,
    Ping,
    Prepare,
    Program,
    SetFence,
    Terminate,
    ToWorker,
    WorkerSpec,
)

_PR_SET_PDEATHSIG = 1
_LAST_WORDS_S = 60.0
_PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep


def live(spec: WorkerSpec, channel: Channel[ToWorker]) -> NoReturn:
    """Be the worker that `spec` describes, and exit."""
    code = 1
    try:
        messenger = Messenger(
            channel,
            spec.worker_id,
            spec.agent,
            _open_box(spec.box),
            agent_timeout_s=spec.agent_timeout_s,
            on_orphaned=_set_orphaned,
        )
        if spec.shows_stacks and spec.box is not None:
            stacks.answer_at(Path(f"{spec.box}.stacks"))
        _take_on(spec)
        exits = Exits()
        if not spec.assignment.reference:
            # They inherit the mask: signals are the script's thread's, which may block or wait for them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            for name, work, args in (
                ("gyrostat-listener", _listen, (messenger, exits)),
                ("gyrostat-leaver", exits.tell, (messenger,)),
            ):
                threading.Thread(target=work, args=args, name=name, daemon=True).start()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        code = _run(spec, messenger, exits)
        messenger.settle(_LAST_WORDS_S)
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)


class Exits:
    """What SIGTERM means: this worker is to leave, or, once the launcher has said so, the job is to end."""

    def __init__(self) -> None:
        self._wanted: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.job_ends = False
        self.asked_by: int | None = None
        """The signal by which this worker was asked to stop the job."""

    def leave(self) -> None:
        """Safe in a signal handler: a message would need a lock that the interrupted code may hold."""
        self._wanted.put(None)

    def tell(self, messenger: Messenger) -> None:
        """In a thread of its own."""
        while True:
            self._wanted.get()
            messenger.leaving()

    def end_job(self, *, failed: bool) -> None:
        """Called by the listening thread. What handles the signal, a handler of the script's maybe, runs in the main one.
        `failed`: nobody asked for it, but another worker has failed."""
        self.job_ends = True
        if not failed:
            self.asked_by = signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)


def leave(code: int) -> NoReturn:
    """End this process as the interpreter would, short of tearing it down.

    Threads that are not daemons are waited for and atexit handlers run. What comes after that in a normal
    exit, the destructors of modules and of C++ statics, is skipped: beside threads of gloo it can hang.
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
    """Have the kernel send us `number` when the thread that started us ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _take_on(spec: WorkerSpec) -> None:
    """The job's directory and environment."""
    os.chdir(spec.cwd)
    os.environ.clear()
    os.environ.update(spec.env)
    # Made anew: the fork parent's streams were made for other files, and the launcher shows whole lines.
    sys.stdout = sys.__stdout__ = _lines_to(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _lines_to(2)  # type: ignore[misc]

    import numpy

    # As in a fresh interpreter. Otherwise all workers would inherit the fork parent's state, and a script that draws before
    # it seeds would look reproducible until the next run. (Python's own generator reseeds itself after a fork.)
    numpy.random.seed()


def _open_box(path: str | None) -> BlackBox | None:
    """A worker for whose notes there is no room works without."""
    try:
        return None if path is None else BlackBox(Path(path))
    except OSError as error:
        print(f"gyrostat: cannot note which micro-batch runs: {error}", file=sys.stderr)
        return None


def _set_orphaned(orphaned: bool) -> None:
    from gyrostat.engine.script import session

    session.set_orphaned(orphaned)


def _lines_to(file: int) -> TextIOWrapper:
    return open(file, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _run(spec: WorkerSpec, messenger: Messenger, exits: Exits) -> int:
    """The user's program within a session of the engine. Returns the exit code."""
    from gyrostat.engine.script import session

    assignment = spec.assignment
    _listen_to_signals(
        session, exits, stops=assignment.checkpoint is not None, elastic=not assignment.reference
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
        messenger.ended(stopped=False)
        return 0
    except session.JobStopRequested as stopped:
        messenger.ended(stopped=True, asked_by=exits.asked_by)
        return _exit_code(stopped)
    except session.Left as left:
        messenger.ended(stopped=False, left=True)
        return _exit_code(left)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        raise
    except BaseException as error:
        return _report(error, messenger)


def _listen(messenger: Messenger, exits: Exits) -> None:
    """What the coordinator says: that the job is to end, or, once the script has joined it, of generations to come."""
    from gyrostat.engine.script import session

    for message in messenger.messages():
        membership = session.membership()
        if isinstance(message, Terminate):
            exits.end_job(failed=message.final)
            if membership is not None and message.final:
                membership.abandon()
            continue
        if isinstance(message, Ping):
            messenger.is_here()
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
    """As `python [-m] name args…` does."""
    if program.module:
        sys.path.insert(0, os.getcwd())
        sys.argv = [program.name, *program.args]
        runpy.run_module(program.name, run_name="__main__", alter_sys=True)
    else:
        script = os.path.abspath(program.name)
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
        sys.argv = [script, *program.args]
        runpy.run_path(script, run_name="__main__")


def _exit_code(exit: SystemExit) -> int:
    """What the interpreter would make of `sys.exit(…)`: a number, success, or a message and failure."""
    if exit.code is None:
        return 0
    if isinstance(exit.code, int):
        return exit.code & 0xFF
    print(exit.code, file=sys.stderr)
    return 1


def _listen_to_signals(session: ModuleType, exits: Exits, *, stops: bool, elastic: bool) -> None:
    """`stops`: the job can checkpoint at a boundary and stop there. `elastic`: a worker can leave it."""

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
        _keep_from_children(terminate)
    signal.signal(signal.SIGINT, stop if stops else signal.default_int_handler)


def _keep_from_children(handler: Callable[[int, FrameType | None], None]) -> None:
    """Processes that the script forks die of SIGTERM, as they would without us: even of one that comes before they run."""
    masks = threading.local()

    def block() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def let_go() -> None:
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=let_go)


def _report(error: BaseException, messenger: Messenger) -> int:
    """Tell the launcher what the script raised. Returns the exit code."""
    text = tell(error)
    summary = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    messenger.failed(_kind(error), summary, text)
    if not messenger.heard:
        print(text, file=sys.stderr)
    return error.exit_code if isinstance(error, GyrostatError) else 1


def _kind(error: BaseException) -> FailureKind:
    """A lost peer stays one when the script's own clean-up raises on top of it."""
    if any(isinstance(cause, PeerLost) for cause in _causes(error)):
        return FailureKind.PEER_LOST
    return FailureKind.USAGE if isinstance(error, UsageError) else FailureKind.SCRIPT


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def tell(error: BaseException) -> str:
    """The traceback as the user wants it: own code first, without the frames that led there."""
    told = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = told
    while part is not None:
        frames = list(part.stack)
        while frames and _is_bootstrap(frames[0].filename):
            del frames[0]
        if isinstance(error, UsageError):  # the mistake is where the script called us, not in our checks
            while len(frames) > 1 and frames[-1].filename.startswith(_PACKAGE):
                del frames[-1]
        part.stack = traceback.StackSummary.from_list(frames)
        part = part.__cause__ or part.__context__
    return "".join(told.format()).rstrip()


def _is_bootstrap(filename: str) -> bool:
    return filename == "<frozen runpy>" or filename.endswith("runpy.py") or filename == __file__


def main() -> NoReturn:
    """A cold worker: a fresh interpreter that inherits its socket, and a file that says who it is."""
    die_with_parent(signal.SIGKILL)
    channel, told = map(int, sys.argv[1:])
    with open(told, "rb") as file:
        spec = msgspec.msgpack.decode(file.read(), type=WorkerSpec)
    live(spec, Channel(socket.socket(fileno=channel), ToWorker))


if __name__ == "__main__":
    main()
