"""Brings one job to the devices that the scheduler has decided on, and keeps it there: a thread for each job that runs.

It looks at what should be (`wanted`) and what is, and makes the one move that leads from here to there (`next_move`): start
the job, have it take or leave devices through its door, have it checkpoint and stop. What is decided meanwhile counts at the
next look: no queue of orders has to be worked off, and applying a plan twice changes nothing. What comes of it goes to the
cluster as news.

It holds no state that matters: a daemon that is killed in the middle of a move finds the job's directory, its lock and its
door, and looks again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from gyrostat.cluster.attempt import AttemptResult, not_taken, unstarted
from gyrostat.cluster.next_move import DriverMove, next_move
from gyrostat.cluster.occupancy import Occupancy
from gyrostat.cluster.records import JobSpec
from gyrostat.core.devices import Devices
from gyrostat.core.errors import GyrostatError
from gyrostat.core.phase import JobPhase
from gyrostat.job.control.control_socket import (
    AskStatus,
    AskStop,
    Occupy,
    Reply,
    RequestResult,
    Status,
    control_socket_at,
)
from gyrostat.job.control.device_assignment import Slot
from gyrostat.job.processes.protocol import Channel, ProtocolError
from gyrostat.job.processes.unix_socket import connect_to
from gyrostat.local.host_files import (
    HostOrder,
    give_order,
    is_hosted,
    read_host,
    read_order,
    read_result,
)
from gyrostat.local.host_pool import HostPool, HostTask

LOOK_S = 0.5
"""How often a running job is asked how it is."""
_SOON_S = 0.02
_BUSY_S = 0.1
_PATIENCE_S = 30.0
_TROUBLED_S = 1.0
_SHRINK_S = 5.0
"""After so long of being too busy to leave devices that others are to have, a job is checkpointed and stopped instead."""
_STOP_S = 600.0
_log = logging.getLogger("gyrostat.driver")


@dataclass(frozen=True)
class AttemptBegan:
    """An attempt was begun."""

    job: str
    attempt: int


@dataclass(frozen=True)
class StatusSeen:
    """How a job is."""

    job: str
    status: Status


@dataclass(frozen=True)
class JobMoved:
    """It runs on other devices now."""

    job: str
    before: Devices
    after: Devices
    pause_ms: float


@dataclass(frozen=True)
class MoveFailed:
    """It could not take other devices, and trains on where it is. It will be tried again."""

    job: str
    reason: str


@dataclass(frozen=True)
class HostGone:
    """Nobody hosts it any more. No result: its host was killed."""

    job: str
    attempt: int
    result: AttemptResult | None
    began: bool = True
    """False: it was to be started, waited for devices, and is not to be started any more."""


@dataclass(frozen=True)
class DriverTrouble:
    """Something unforeseen keeps it from being driven. It will be tried again."""

    job: str
    reason: str


News: TypeAlias = AttemptBegan | StatusSeen | JobMoved | MoveFailed | HostGone | DriverTrouble


class Driver:
    """One job. `close` ends the thread; the job goes on."""

    def __init__(
        self,
        job: str,
        directory: Path,
        sockets: Path,
        *,
        spec: Callable[[], JobSpec],
        attempt: int,
        slot: Callable[[int], Slot],
        occupancy: Occupancy,
        pool: HostPool,
        tell: Callable[[News], None],
    ) -> None:
        """`attempt`: the last one that was begun."""
        self.job, self._directory, self._spec = job, directory, spec
        self._sockets = sockets
        self._slot, self._occupancy, self._pool, self._tell = slot, occupancy, pool, tell
        self._attempt = attempt
        self._first = attempt + (read_result(directory, attempt) is not None)
        """The first attempt of which nobody has heard how it ended. One that seemed to have died may still be made: its host
        was asked by a daemon that was killed, and is late."""
        self._task: HostTask | None = None
        """How this daemon gave the job to a host, if it did."""
        self._wanted: Devices = ()
        self._actual: Devices = ()
        self._hosted = False
        self._stopping = False
        self._undecided = False
        """It has ended, and nobody has said yet whether it should be started again."""
        self._called_off = False
        """It should be nowhere, and whoever said so has to hear if it already was."""
        self._kill_at: float | None = None
        self._line: Channel[Reply] | None = None
        self._pending: tuple[str, Devices] | None = None
        """An `Occupy` that is under way, and the devices it asked for."""
        self._refusals = 0
        """In a row."""
        self._busy_since: float | None = None
        """When it first answered that it is too busy to leave devices, if it has said nothing else since."""
        self._try_at = 0.0
        self._asked_at: float | None = None
        self._training = False
        self._trouble: str | None = None
        """What kept the thread from driving it when it last looked."""
        self._lock = threading.Lock()
        self._closing = False
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"driver {job}", daemon=True)

    # From other threads.

    def start(self) -> None:
        self._thread.start()

    def adopt(self) -> None:
        """(Before `start`) somebody hosts it already: find out where its workers are."""
        self._hosted = True
        order = read_order(self._directory)
        self._actual = tuple(sorted(slot.device for slot in order.slots)) if order is not None else ()
        with contextlib.suppress(OSError, GyrostatError):
            with contextlib.closing(self._connect()) as line:
                line.send(AskStatus())
                deadline = time.monotonic() + 5.0
                while _readable([line], max(0.0, deadline - time.monotonic())):
                    replies = line.receive(wait=False)
                    if replies is None:
                        break
                    for reply in replies:
                        if isinstance(reply, Status) and reply.devices:
                            self._actual = tuple(sorted(reply.devices))
                            deadline = 0.0
        self._occupancy.found(self.job, self._actual)

    @property
    def actual(self) -> Devices:
        """Where its workers are, as far as is known."""
        return self._actual

    @property
    def hosted(self) -> bool:
        """Whether a host has it, or is about to."""
        return self._hosted

    def aim(self, devices: Devices, *, within: float | None = None) -> None:
        """It should have these. `within`: if it has to stop and does not in so many seconds, it is killed."""
        with self._lock:
            self._wanted = devices
            self._called_off = not devices
            if within is not None:
                self._kill_at = time.monotonic() + within
            elif not self._stopping:  # one that was asked to stop still has to, before it goes on
                self._kill_at = None
        self.ring()

    def go_on(self, devices: Devices) -> None:
        """It ended, and should be started again, on these."""
        with self._lock:
            self._undecided = False
        self.aim(devices)

    def ring(self) -> None:
        """Look again."""
        with contextlib.suppress(OSError):
            self._ringer.send(b"!")

    def close(self) -> None:
        self._closing = True
        self.ring()
        if self._thread.is_alive():
            self._thread.join()
        for each in (self._bell, self._ringer):
            each.close()
        self._hang_up()

    # The thread: look, make a move, wait.

    def _run(self) -> None:
        while not self._closing:
            try:
                self._hear(self._look())
                self._trouble = None
            except Exception as error:
                self._complain(error)
                _readable([self._bell], _TROUBLED_S)

    def _hear(self, wait: float | None) -> None:
        """Until somebody rings, the job answers, or it is time to look again."""
        files: list[_File] = [self._bell]
        if self._line is not None:
            files.append(self._line)
        readable = _readable(files, wait)
        if self._bell in readable:
            with contextlib.suppress(BlockingIOError):
                self._bell.recv(4096)
        if self._line is not None and self._line in readable:
            self._listen(self._line)

    def _complain(self, error: Exception) -> None:
        """Once for each kind of trouble: it comes again with every look."""
        said, self._trouble = self._trouble, repr(error)
        if self._trouble != said:
            _log.error("driver of %s", self.job, exc_info=error)
            with contextlib.suppress(Exception):
                self._tell(DriverTrouble(self.job, f"it cannot be driven at present, tried again: {error!r}"))

    def _look(self) -> float | None:
        """Make the next move, and say when to look again at the latest."""
        with self._lock:
            wanted, kill_at = () if self._undecided else self._wanted, self._kill_at
        if self._hosted and (ended := self._has_ended()) is not None:
            self._tell_end(ended)
            return None
        if not wanted and not self._hosted:
            self._tell_called_off()
            return None
        joining = [device for device in wanted if device not in self._actual]
        if self._pending is not None and wanted:
            return self._call()
        if not self._hosted or not wanted:
            able = True
        elif self._stopping:
            able, wanted = True, ()
        else:
            able = self._training and self._line is not None and time.monotonic() >= self._try_at
        if not able:
            return self._call()  # it has not begun to train, and is asked when it has
        move = next_move(
            wanted=wanted,
            actual=self._actual,
            hosted=self._hosted,
            can_join=self._occupancy.sit(self.job, joining if wanted else ()),
        )
        if move is DriverMove.START:
            self._start(wanted)
        elif move is DriverMove.STOP:
            self._stop(kill_at)
        elif move in (DriverMove.OCCUPY, DriverMove.LEAVE) and self._too_busy_to_leave(wanted):
            with self._lock:
                self._kill_at = kill_at = time.monotonic() + _STOP_S
            self._stop(kill_at)
        elif move in (DriverMove.OCCUPY, DriverMove.LEAVE):
            self._occupy(
                wanted if move is DriverMove.OCCUPY else tuple(d for d in self._actual if d in wanted)
            )
        return self._call() if self._hosted else None

    def _start(self, devices: Devices) -> None:
        self._attempt += 1
        self._tell(AttemptBegan(self.job, self._attempt))
        slots = tuple(self._slot(device) for device in devices)
        order = HostOrder(
            job=self.job, attempt=self._attempt, spec=self._spec(), slots=slots, sockets=str(self._sockets)
        )
        self._actual, self._hosted, self._stopping, self._training = devices, True, False, False
        try:
            give_order(self._directory, order)
            self._task = self._pool.send(self._directory, self._attempt)
        except OSError as error:
            reason = f"its host could not be started: {error}"
            self._tell_end(HostGone(self.job, self._attempt, unstarted(self._attempt, reason)))

    def _stop(self, kill_at: float | None) -> None:
        if self._task is not None and self._pool.call_off(self._task):
            self._tell_end(HostGone(self.job, self._attempt, not_taken(self._attempt)))
            return
        if not self._stopping and self._line is not None and self._send(AskStop()):
            self._stopping, self._pending = True, None
        if kill_at is not None and time.monotonic() >= kill_at:
            host = read_host(self._directory)
            if host is not None and is_hosted(self._directory):
                host.host.end(patience=5.0)

    def _too_busy_to_leave(self, wanted: Devices) -> bool:
        """Whether others have waited long enough for what it is to leave."""
        if self._busy_since is None or set(self._actual) <= set(wanted):
            return False
        return time.monotonic() - self._busy_since >= _SHRINK_S

    def _occupy(self, devices: Devices) -> None:
        request = secrets.token_hex(8)
        if self._send(Occupy(request, tuple(self._slot(device) for device in devices))):
            self._pending = request, devices

    def _tell_called_off(self) -> None:
        with self._lock:
            called_off, self._called_off = self._called_off and not self._undecided, False
        if called_off:
            self._tell(HostGone(self.job, self._attempt, None, began=False))

    def _tell_end(self, ended: HostGone) -> None:
        self._hang_up()
        self._hosted = self._stopping = self._training = False
        self._pending, self._actual, self._task = None, (), None
        self._first, self._refusals, self._busy_since = self._attempt + 1, 0, None
        self._occupancy.leave(self.job)
        with self._lock:
            self._undecided, self._kill_at = True, None
        self._tell(ended)

    def _has_ended(self) -> HostGone | None:
        """Whether the host has let go of the job."""
        if self._line is not None or is_hosted(self._directory):
            return None
        host = read_host(self._directory)
        attempt = max(self._attempt, host.attempt if host is not None else 0)
        while attempt >= self._first:
            if (result := read_result(self._directory, attempt)) is not None:
                return HostGone(self.job, self._attempt, result)
            attempt -= 1
        taken = host is not None and host.attempt == self._attempt
        given_up = self._task is None or self._task.over
        if taken or given_up:
            return HostGone(self.job, self._attempt, None)
        return None  # no host has taken it yet

    # The door.

    def _call(self) -> float:
        """See that we are connected and know how the job is. Returns when to look again."""
        if self._line is None:
            with contextlib.suppress(OSError):
                self._line = self._connect()
                self._asked_at = None
            if self._line is None or not self._send(AskStatus(after_a_step=True)):
                return _SOON_S
        now = time.monotonic()
        if self._asked_at is None or now - self._asked_at >= LOOK_S:
            self._asked_at = now
            self._send(AskStatus())
        return min(LOOK_S, self._try_at - now) if self._training and self._try_at > now else LOOK_S

    def _connect(self) -> Channel[Reply]:
        return Channel(connect_to(control_socket_at(self._sockets / "gyrostat", self.job)), Reply)

    def _send(self, request: AskStatus | AskStop | Occupy) -> bool:
        assert self._line is not None
        try:
            self._line.send(request)
        except OSError:
            self._hang_up()
            return False
        return True

    def _listen(self, line: Channel[Reply]) -> None:
        try:
            replies = line.receive(wait=False)
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            replies = None
        if replies is None:
            self._hang_up()
            return
        for reply in replies:
            if isinstance(reply, Status):
                self._saw(reply)
            elif isinstance(reply, RequestResult) and self._pending is not None:
                self._answered(reply)

    def _saw(self, status: Status) -> None:
        training = status.phase is JobPhase.TRAINING
        if training and not self._training:
            self._asked_at = None
        self._training = training
        if status.is_steady and self._pending is None and not self._stopping:
            self._settle(tuple(sorted(status.devices)))
        self._tell(StatusSeen(self.job, status))

    def _answered(self, answer: RequestResult) -> None:
        """What came of `Occupy`. If it was refused, it is tried again after a while."""
        assert self._pending is not None
        (_, devices), before, self._pending = self._pending, self._actual, None
        self._asked_at = None
        if answer.done:
            self._refusals, self._busy_since = 0, None
            self._settle(devices)
            self._tell(JobMoved(self.job, before, devices, answer.pause_ms))
            return
        busy = answer.retryable
        if not busy or set(before) <= set(devices):
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = time.monotonic()
        self._refusals += not busy
        self._try_at = time.monotonic() + (_BUSY_S if busy else min(2.0**self._refusals, _PATIENCE_S))
        if not busy:
            self._tell(MoveFailed(self.job, answer.text))

    def _settle(self, devices: Devices) -> None:
        """Its workers are on these now."""
        if devices != self._actual:
            self._actual = devices
            self._occupancy.found(self.job, devices)
        self._occupancy.leave(self.job, keep=devices)

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line, self._pending = None, None


_File: TypeAlias = socket.socket | Channel[Reply]


def _readable(files: Sequence[_File], wait: float | None) -> list[_File]:
    """Those that have something, by then. Unlike `select`, for any number of open files."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    found = {number for number, _ in poll.poll(None if wait is None else math.ceil(wait * 1000))}
    return [file for file in files if file.fileno() in found]
