"""The life of one worker process, from its first line to its exit code.

`live` is what both kinds of worker run: the one forked from `forkparent`, where everything is imported
already, and the cold one, a fresh interpreter (`python -m gyrostat.job.worker FD`). In order: take on the
job's environment, listen to signals, enter the engine's session, run the user's program as `__main__`, finish
the session, leave.

Signals. SIGUSR1 asks for a checkpoint at the next boundary. SIGTERM and SIGINT, in a job that checkpoints,
ask it to checkpoint and stop there; in one that does not they do what they do to any Python program.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from types import FrameType, ModuleType
from typing import NoReturn

import msgspec

from gyrostat.core.errors import GyrostatError, PeerLost, UsageError
from gyrostat.job.messenger import Messenger
from gyrostat.job.protocol import (
    Cancel,
    Channel,
    FailureKind,
    Prepare,
    Program,
    SetFence,
    ToWorker,
    WorkerSpec,
)

_PR_SET_PDEATHSIG = 1
_LAST_WORDS_S = 60.0
_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep


def live(spec: WorkerSpec, channel: Channel[ToWorker]) -> NoReturn:
    """Be the worker that `spec` describes, and exit."""
    code = 1
    try:
        messenger = Messenger(channel, spec.seat, spec.agent)
        _take_on(spec)
        if not spec.assignment.reference:
            # It inherits the mask: signals are the script's thread's, which may block or wait for them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            threading.Thread(target=_listen, args=(messenger,), name="gyrostat-listener", daemon=True).start()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        code = _run(spec, messenger)
        messenger.settle(_LAST_WORDS_S)
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)


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


def _lines_to(file: int) -> TextIOWrapper:
    return open(file, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _run(spec: WorkerSpec, messenger: Messenger) -> int:
    """The user's program within a session of the engine. Returns the exit code."""
    from gyrostat.engine import session

    _listen_to_signals(session, stops_at_boundary=spec.assignment.checkpoint is not None)
    try:
        session.enter(spec.assignment, messenger)
        try:
            run_program(spec.program)
        except (session.Stopped, session.Left):
            raise
        except SystemExit as exit:
            if code := _exit_code(exit):
                return code
            session.finish(exit)
        else:
            session.finish()
        messenger.ended(stopped=False)
        return 0
    except session.Stopped as stopped:
        messenger.ended(stopped=True)
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


def _listen(messenger: Messenger) -> None:
    """What the coordinator says of generations to come. Nothing is said before the script has joined the job."""
    from gyrostat.engine import session

    for message in messenger.messages():
        membership = session.membership()
        if membership is None:
            continue
        match message:
            case Prepare(plan=plan):
                membership.prepare(plan)
            case SetFence(generation=generation, not_before=step):
                membership.set_fence(generation, step)
            case Cancel(generation=generation):
                membership.cancel(generation)


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


def _listen_to_signals(session: ModuleType, *, stops_at_boundary: bool) -> None:
    def checkpoint(number: int, frame: FrameType | None) -> None:
        session.request_checkpoint()

    def stop(number: int, frame: FrameType | None) -> None:
        session.request_stop()

    signal.signal(signal.SIGUSR1, checkpoint)
    signal.signal(signal.SIGTERM, stop if stops_at_boundary else signal.SIG_DFL)
    signal.signal(signal.SIGINT, stop if stops_at_boundary else signal.default_int_handler)


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
