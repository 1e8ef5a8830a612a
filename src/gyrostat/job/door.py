"""The door of a running job: a Unix socket by which other processes of the same user ask it for something.

Requests and answers are frames of msgspec, as everywhere in this room. A request that changes something is answered when it
is done; one that comes while another is under way is answered "busy" at once; one that is asked twice, with the same id, is
carried out once and answered twice. Sockets live in a directory that only this user may enter, so that whoever can open one
may also ask. `Door` is the job's side, for a loop that polls; `Caller` is the other side, and waits.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import secrets
import socket
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from gyrostat.core.errors import UsageError
from gyrostat.job.protocol import Channel

NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SUFFIX = ".socket"
_ASKED_BEFORE = 1024
"""So many answers are remembered."""


class Scale(msgspec.Struct, frozen=True, tag=True):
    """Run on so many workers."""

    request: str
    workers: int


class Migrate(msgspec.Struct, frozen=True, tag=True):
    """Replace these workers by new ones, in one switch."""

    request: str
    members: tuple[int, ...]


class AskStatus(msgspec.Struct, frozen=True, tag=True):
    pass


class AskCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Checkpoint at the next boundary."""


class AskStop(msgspec.Struct, frozen=True, tag=True):
    """Checkpoint at the next boundary, and end there."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """What came of a request."""

    done: bool
    text: str
    step: int = 0
    workers: int = 0
    pause_ms: float = 0.0
    prepare_ms: float = 0.0


class Status(msgspec.Struct, frozen=True, tag=True):
    """How a job is."""

    name: str
    program: str
    pid: int
    virtual_workers: int
    workers: int
    members: tuple[int, ...]
    generation: int
    phase: str
    step: int
    loss: float | None
    throughput: float | None
    """Samples per second of the last few seconds."""


Request = Scale | Migrate | AskStatus | AskCheckpoint | AskStop
Reply = Answer | Status


def runtime_directory() -> Path:
    """Where sockets are; only this user may enter it."""
    base = os.environ.get("GYROSTAT_RUNTIME_DIR") or os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base) / "gyrostat" if base else Path(f"/tmp/gyrostat-{os.getuid()}")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(
            f"{path} must be a directory that only you may enter (owner {os.getuid()}, mode 700); remove it, or set "
            "GYROSTAT_RUNTIME_DIR to another place"
        )
    return path


def running() -> list[str]:
    """The names of jobs whose door can be found, though they may have been killed."""
    return sorted(path.name.removesuffix(_SUFFIX) for path in runtime_directory().glob(f"*{_SUFFIX}"))


def check_name(name: str) -> None:
    if not NAMES.fullmatch(name):
        raise UsageError(
            f"a job's name is made of up to 64 letters, digits, dots, dashes and underscores; got {name!r}"
        )


class Visitor:
    """Somebody at the door."""

    def __init__(self, sock: socket.socket) -> None:
        self.channel: Channel[Request] = Channel(sock, Request)

    def answer(self, reply: Reply) -> None:
        with contextlib.suppress(OSError):  # gone meanwhile
            self.channel.send(reply)


class Door:
    """The job's side. Its owner polls `listener` and the visitors' channels."""

    def __init__(self, name: str) -> None:
        check_name(name)
        self.name = name
        self._path = runtime_directory() / f"{name}{_SUFFIX}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if _answers(self._path):
            self.listener.close()
            raise UsageError(
                f"a job named {name!r} is running already; give this one another name: --name NAME"
            )
        self._path.unlink(missing_ok=True)  # left behind by a job that was killed
        self.listener.bind(str(self._path))
        self.listener.listen()
        self.listener.setblocking(False)
        self._answers: dict[str, Answer] = {}
        self._waiting: dict[str, list[Visitor]] = {}

    def fileno(self) -> int:
        return self.listener.fileno()

    def welcome(self) -> Visitor | None:
        try:
            sock, _ = self.listener.accept()
        except (BlockingIOError, ConnectionError):
            return None
        return Visitor(sock)

    def is_new(self, request: str, visitor: Visitor) -> bool:
        """Whether to carry the request out. If it was asked before, its answer is, or will be, the same."""
        if request in self._answers:
            visitor.answer(self._answers[request])
            return False
        waiting = self._waiting.setdefault(request, [])
        waiting.append(visitor)
        return len(waiting) == 1

    def answer(self, request: str | None, answer: Answer) -> None:
        """What came of a request; of a schedule's nobody is told."""
        if request is None:
            return
        # "busy" is no outcome: who asks again is heard again
        if answer.done or not answer.text.endswith("retry"):
            self._answers[request] = answer
        while len(self._answers) > _ASKED_BEFORE:
            self._answers.pop(next(iter(self._answers)))
        for visitor in self._waiting.pop(request, []):
            visitor.answer(answer)

    def close(self) -> None:
        for request in list(self._waiting):
            self.answer(request, Answer(False, "the job has ended"))
        self._path.unlink(missing_ok=True)
        self.listener.close()


def _answers(path: Path) -> bool:
    """Whether somebody is behind that door."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


class Caller:
    """A connection to a running job, by its name."""

    def __init__(self, name: str) -> None:
        check_name(name)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(runtime_directory() / f"{name}{_SUFFIX}"))
        except OSError:
            sock.close()
            raise UsageError(_unknown(name)) from None
        self.name = name
        self._channel: Channel[Reply] = Channel(sock, Reply)

    def scale(self, workers: int, request: str | None = None) -> Answer:
        """Run on so many workers; returns when they train, or when it is clear that they will not."""
        return self._change(Scale(request or secrets.token_hex(8), workers))

    def migrate(self, members: tuple[int, ...], request: str | None = None) -> Answer:
        """Replace these workers by new ones, in one switch."""
        return self._change(Migrate(request or secrets.token_hex(8), members))

    def status(self) -> Status:
        reply = self._ask(AskStatus())
        assert isinstance(reply, Status)
        return reply

    def checkpoint(self) -> Answer:
        return self._change(AskCheckpoint())

    def stop(self) -> Answer:
        return self._change(AskStop())

    def _change(self, request: Request) -> Answer:
        reply = self._ask(request)
        assert isinstance(reply, Answer)
        return reply

    def _ask(self, request: Request) -> Reply:
        try:
            self._channel.send(request)
            while not (replies := self._channel.receive()):
                if replies is None:
                    raise UsageError(f"the job {self.name!r} ended before it answered")
        except (BrokenPipeError, ConnectionResetError):
            raise UsageError(f"the job {self.name!r} ended before it answered") from None
        return replies[0]

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _unknown(name: str) -> str:
    names = [other for other in running() if other != name]
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"no job named {name!r} is running; did you mean {near[0]!r}?"
    known = f"running: {', '.join(names)}" if names else "no job of yours is running on this machine"
    return f"no job named {name!r} is running; {known}"
