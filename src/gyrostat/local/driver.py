"""Brings one job to the devices that the scheduler has decided on, and keeps it there: one thread per job.

It compares the devices that the job should have (the target) with those that its workers are on, and makes the one move
that leads from here to there (`next_move`): start the job, have it take or leave devices through its control socket, have
it checkpoint and stop. A newer target replaces an older one: there is no queue of moves, and the same target twice changes
nothing. Results go to the cluster as messages (`driver_messages`).

Other threads send commands and read two properties; all state is written by the driver's own thread. Nothing of it has to
survive: the next daemon finds the job's directory, its lock and its control socket (`adopt`).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from gyrostat.cluster.attempt import not_taken, unstarted
from gyrostat.cluster.eviction import GRACE_S, EvictionStep, LeaveDeadlines, next_eviction
from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.next_move import DriverMove, next_move
from gyrostat.cluster.occupancy import Occupancy
from gyrostat.core.devices import Devices
from gyrostat.core.phase import JobPhase, ReconfigurationPhase, transition
from gyrostat.job.control.device_assignment import Slot
from gyrostat.job.control.requests import (
    AskStop,
    Occupy,
    Reply,
    RequestResult,
    ScaleRoles,
    Status,
    Vacate,
)
from gyrostat.job.processes.confined import Beneath
from gyrostat.local.attempts import Attempts
from gyrostat.local.driver_messages import (
    DriverMessage,
    DriverTrouble,
    HostGone,
    JobBlocked,
    JobEvicted,
    JobMoved,
    MoveFailed,
    ServersScaled,
    StatusSeen,
)
from gyrostat.local.driver_phase import DRIVER_TRANSITIONS, DriverPhase
from gyrostat.local.host_pool import HostPool
from gyrostat.local.job_connection import JobConnection, PolledFile, WakeUp, readable
from gyrostat.local.move_retries import MoveRetries

logger = logging.getLogger(__name__)
_TROUBLE_S = 1.0
_TRAINS = (DriverPhase.TRAINING, DriverPhase.MOVING)


@dataclass(frozen=True)
class _Command:
    """The job should have these devices."""

    devices: Devices
    within: float
    """Seconds in which it has to leave all others (`cluster.eviction`)."""
    restart: bool
    """It has ended, and should run again."""


class Driver:
    """One job. `close` ends the thread; the job goes on."""

    def __init__(
        self,
        job: str,
        directory: Path,
        sockets: Path,
        *,
        spec: Callable[[], JobSpec],
        beneath: Beneath = (),
        attempt: int,
        slot: Callable[[int], Slot],
        occupancy: Occupancy,
        pool: HostPool,
        begin: Callable[[int], None],
        post: Callable[[DriverMessage], None],
    ) -> None:
        """`attempt`: the last one that was begun. `begin` records the next one durably, before a host may have it."""
        self.job = job
        self._attempts = Attempts(
            job,
            directory,
            sockets,
            spec=spec,
            beneath=beneath,
            slot=slot,
            last=attempt,
            record=begin,
            pool=pool,
        )
        self._connection = JobConnection(sockets / "gyrostat", job)
        self._retries = MoveRetries()
        self._occupancy, self._post = occupancy, post
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._target: _Command | None = None
        self._phase = DriverPhase.WAITING
        self._actual: Devices = ()
        self._deadlines = LeaveDeadlines()
        self._trouble: str | None = None
        """The last failure, until it works again."""
        self._closing = threading.Event()
        self._wake_up = WakeUp()
        self._thread = threading.Thread(target=self._run, name=f"driver {job}", daemon=True)

    # For other threads.

    def start(self) -> None:
        self._thread.start()

    def adopt(self) -> None:
        """(Before `start`) a host has the job already: find out which devices its workers are on."""
        self._enter(DriverPhase.STARTING)
        status = self._connection.query()
        devices = status.devices if status is not None else ()
        self._actual = tuple(sorted(devices)) or self._attempts.ordered_devices()
        self._occupancy.mark(self.job, self._actual)

    @property
    def actual(self) -> Devices:
        """The devices its workers are on, as far as known."""
        return self._actual

    @property
    def hosted(self) -> bool:
        """Whether a host has it, or will."""
        return self._phase.hosted

    def retarget(self, devices: Devices, *, within: float = GRACE_S, restart: bool = False) -> None:
        """It should have these, and leave all others in `within` seconds. `restart`: it has ended, and should run again."""
        self._commands.put(_Command(devices, within, restart))
        self.wake()

    def wake(self) -> None:
        """Devices may have become free: look again."""
        self._wake_up.wake()

    def close(self) -> None:
        self._closing.set()
        self.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._wake_up.close()
        self._connection.close()

    # The thread: make a move, wait, receive.

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._receive(self._advance())
                self._trouble = None
            except Exception as error:
                self._report_trouble(error)
                readable([self._wake_up.waiting], _TROUBLE_S)

    def _receive(self, wait: float | None) -> None:
        """Wait for a command, for replies of the job, or until it is time to look again."""
        files: list[PolledFile] = [self._wake_up.waiting]
        if self._connection.channel is not None:
            files.append(self._connection.channel)
        found = readable(files, wait)
        if self._wake_up.waiting in found:
            self._wake_up.clear()
        if self._connection.channel in found:
            for reply in self._connection.receive():
                self._handle(reply)

    def _report_trouble(self, error: Exception) -> None:
        """Once per kind: the same failure comes again with every try."""
        before, self._trouble = self._trouble, repr(error)
        if self._trouble != before:
            logger.error("the driver failed, and tries again", exc_info=error, extra={"job": self.job})
            with contextlib.suppress(Exception):
                self._post(DriverTrouble(self.job, f"its driver failed, and tries again: {error!r}"))

    def _enter(self, phase: DriverPhase) -> None:
        """The only place that changes the phase."""
        before, self._phase = self._phase, transition(self._phase, phase, DRIVER_TRANSITIONS)
        if phase is not before:
            logger.info(
                "driver %s after %s, attempt %d",
                phase,
                before,
                self._attempts.number,
                extra={"job": self.job},
            )

    def _advance(self) -> float | None:
        """Make the next move. Returns after how many seconds to look again at the latest; None: when woken."""
        self._take_commands()
        target = self._target
        if self._phase.hosted and self._connection.channel is None:
            if self._phase is DriverPhase.MOVING:  # its answer is lost: its status will show the devices
                self._enter(DriverPhase.TRAINING)
            if (ended := self._attempts.find_end()) is not None:
                self._report_end(ended)
        if target is None or self._phase in (DriverPhase.RELEASED, DriverPhase.ENDED):
            return self._poll()
        if self._phase.hosted:
            self._evict(target)
        if self._phase is DriverPhase.WAITING and not target.devices:
            self._enter(DriverPhase.RELEASED)
            self._post(HostGone(self.job, self._attempts.number, None, began=False))
        elif self._can_move(target.devices):
            self._move(target)
        return self._poll()

    def _take_commands(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._obey(self._commands.get_nowait())

    def _obey(self, command: _Command) -> None:
        self._target = command
        if self._phase is DriverPhase.RELEASED or (command.restart and self._phase is DriverPhase.ENDED):
            self._enter(DriverPhase.WAITING)

    def _can_move(self, devices: Devices) -> bool:
        """A job that does not train can only be stopped."""
        if self._phase in (DriverPhase.WAITING, DriverPhase.STOPPING) or not devices:
            return True
        ready = self._retries.pause(time.monotonic()) == 0.0 and self._connection.channel is not None
        return self._phase is DriverPhase.TRAINING and ready

    def _move(self, target: _Command) -> None:
        wanted = () if self._phase is DriverPhase.STOPPING else target.devices
        joining = [device for device in wanted if device not in self._actual]
        move = next_move(
            wanted=wanted,
            actual=self._actual,
            hosted=self._phase.hosted,
            can_join=self._occupancy.acquire(self.job, joining),
        )
        match move:
            case DriverMove.NOTHING:
                self._report_holders(target.devices)
            case DriverMove.START:
                self._start(wanted)
            case DriverMove.STOP:
                self._stop()
            case DriverMove.OCCUPY:
                self._occupy(wanted)
            case DriverMove.LEAVE:
                self._occupy(tuple(device for device in self._actual if device in wanted))

    def _start(self, devices: Devices) -> None:
        self._attempts.record_next()
        self._actual, self._retries, self._deadlines = devices, MoveRetries(), LeaveDeadlines()
        self._enter(DriverPhase.STARTING)
        try:
            self._attempts.begin(devices)
        except OSError as error:
            reason = f"its host could not be started: {error}"
            self._report_end(self._attempts.end(unstarted(self._attempts.number, reason)))

    def _stop(self) -> None:
        if self._attempts.cancel():
            self._report_end(self._attempts.end(not_taken(self._attempts.number)))
        elif self._phase is not DriverPhase.STOPPING and self._connection.send(AskStop()):
            self._enter(DriverPhase.STOPPING)

    def _occupy(self, devices: Devices) -> None:
        if self._connection.send(Occupy(secrets.token_hex(8), self._attempts.slots(devices))):
            self._retries.requested = devices
            self._enter(DriverPhase.MOVING)

    def _evict(self, target: _Command) -> None:
        """Take devices from it that it has not left in time (`cluster.eviction`)."""
        now, keeps = time.monotonic(), () if self._phase is DriverPhase.STOPPING else target.devices
        occupied = sorted({*self._actual, *self._retries.requested})
        leaving = tuple(device for device in occupied if device not in keeps)
        self._deadlines.update(leaving, target.within, now)
        if (first := self._deadlines.first()) is None:
            return
        eviction = next_eviction(
            now=now,
            deadline=first[0],
            grace=first[1],
            leaving=leaving,
            staying=tuple(device for device in occupied if device in keeps),
            trains=self._phase in _TRAINS,
        )
        if eviction.step is EvictionStep.END_WORKERS and self._retries.vacated != leaving:
            self._retries.vacated = leaving
            self._report_eviction(leaving, eviction.reason)
            self._connection.send(Vacate(leaving))
        elif eviction.step is EvictionStep.KILL_HOST:
            self._kill(leaving, eviction.reason)

    def _kill(self, leaving: Devices, reason: str) -> None:
        if self._attempts.cancel():
            self._report_end(self._attempts.end(not_taken(self._attempts.number)))
            return
        if self._attempts.killed is None:
            self._report_eviction(leaving, reason)
        self._attempts.kill(reason)

    def _report_holders(self, devices: Devices) -> None:
        """Which jobs have yet to leave the devices on which this one waits to be started."""
        if not self._phase.hosted and (holders := self._occupancy.holders(self.job, devices)):
            self._post(JobBlocked(self.job, tuple(holders)))

    def _report_eviction(self, devices: Devices, reason: str) -> None:
        logger.warning("%s", reason, extra={"job": self.job})
        self._post(JobEvicted(self.job, devices, reason))

    def _report_end(self, ended: HostGone) -> None:
        self._connection.close()
        self._attempts.reported()
        self._actual, self._retries = (), MoveRetries()
        self._occupancy.release(self.job)
        self._enter(DriverPhase.ENDED)
        self._post(ended)

    # The job's replies.

    def _poll(self) -> float | None:
        if not self._phase.hosted:
            return None
        now = time.monotonic()
        seconds = self._connection.poll(now)
        pause = self._retries.pause(now) if self._phase is DriverPhase.TRAINING else 0.0
        return min(seconds, pause) if pause else seconds

    def _handle(self, reply: Reply) -> None:
        if isinstance(reply, Status):
            self._handle_status(reply)
        elif isinstance(reply, RequestResult) and self._phase is DriverPhase.MOVING:
            self._handle_move(reply)

    def _handle_status(self, status: Status) -> None:
        """Only a job that trains without change states which devices it is on: one that restarts has no workers, and keeps
        its devices."""
        if self._phase is DriverPhase.STARTING and status.phase is JobPhase.TRAINING:
            self._enter(DriverPhase.TRAINING)
            self._connection.poll_soon()
        elif self._phase is DriverPhase.TRAINING and status.phase is not JobPhase.TRAINING:
            self._enter(DriverPhase.STARTING)
        if self._phase is DriverPhase.TRAINING and status.is_steady:
            self._check_move(status.devices)
            self._settle(tuple(sorted(status.devices)))
            self._scale_servers(status)
        elif self._phase in _TRAINS and status.reconfiguration is ReconfigurationPhase.RECOVERING:
            # Its members are the survivors: the devices of the others are free.
            self._actual = tuple(sorted(status.devices))
            self._occupancy.release(self.job, keep=(*self._actual, *self._retries.requested))
        self._post(StatusSeen(self.job, status))

    def _scale_servers(self, status: Status) -> None:
        """Its owner wants another number of parameter servers than it has."""
        wanted, now = self._attempts.spec.servers, time.monotonic()
        if status.servers is None or len(status.servers) == wanted or self._retries.pause(now):
            return
        if self._connection.send(ScaleRoles(secrets.token_hex(8), servers=wanted)):
            self._retries.requested, self._retries.servers = self._actual, wanted
            self._enter(DriverPhase.MOVING)

    def _handle_move(self, result: RequestResult) -> None:
        """A move that was refused is tried again."""
        before, devices, now = self._actual, self._retries.requested, time.monotonic()
        servers, self._retries.servers = self._retries.servers, None
        self._enter(DriverPhase.TRAINING)
        self._connection.poll_soon()
        self._retries.requested = ()
        if result.done and servers is not None:
            self._post(ServersScaled(self.job, result.text))
        elif result.done:
            self._retries.moved(devices, now)
            self._settle(devices)
            self._post(JobMoved(self.job, before, devices, result.pause_ms))
        elif result.retryable:
            if self._retries.busy(now):
                self._post(MoveFailed(self.job, result.text))
        else:
            self._retries.refused(now)
            self._post(MoveFailed(self.job, result.text))

    def _check_move(self, occupied: Devices) -> None:
        """Compare what it reported after its last move with the devices that its workers are on."""
        if (wrong := self._retries.check(occupied)) is not None:
            logger.error("%s", wrong, extra={"job": self.job})
            self._post(DriverTrouble(self.job, wrong))

    def _settle(self, devices: Devices) -> None:
        """Its workers are on these now."""
        self._retries.requested = ()
        if devices != self._actual:
            self._actual = devices
            self._occupancy.mark(self.job, devices)
        self._occupancy.release(self.job, keep=devices)
