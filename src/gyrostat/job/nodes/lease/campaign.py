"""Carries out an agent's part in the election: two threads around the pure `election`, and the store's watch.

The thread `lease-requests` sends requests, one after another. The thread `lease-time` passes the time to the election: it never
waits for the store, so a leader stops leading in time even while a request hangs. The thread that brings an event (a reply, a
view of the watch, a tick) also handles it, one event at a time; passing it to another thread would add a wake-up per agent to
every takeover.

So callbacks are called from any of these threads, never concurrently, and must return quickly: they wake up the thread that
does the work (an event loop by `loop.call_soon_threadsafe`). After `on_lead(token)`, the next callback is `on_lost(why)`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from gyrostat.core.errors import Deposed, LeaseError
from gyrostat.job.nodes.lease.base import Lease, LeaseStore, LeaseWatch, clock
from gyrostat.job.nodes.lease.election import (
    Acquire,
    Election,
    Event,
    Follow,
    Instruction,
    Lead,
    LeadershipLost,
    LeaseRefused,
    LeaseSeen,
    LeaveElection,
    Look,
    Release,
    Renew,
    Renewed,
    Role,
    StoreLost,
    TimePassed,
    Timing,
    Unreachable,
    Won,
)

logger = logging.getLogger(__name__)

_LATE = 0.25
"""A renewal is late if less than this fraction of the time to live was left."""
_Request = Look | Acquire | Renew | Release


@dataclass(frozen=True, kw_only=True)
class _Callbacks:
    on_lead: Callable[[int], None]
    on_follow: Callable[[str], None]
    on_lost: Callable[[str], None]
    on_trouble: Callable[[str], None]
    on_store_lost: Callable[[str], None]


class Campaign:
    """Runs from `start` (or entering `with`) to `close`, which releases the lease."""

    def __init__(
        self,
        store: LeaseStore,
        holder: str,
        *,
        on_lead: Callable[[int], None],
        on_follow: Callable[[str], None],
        on_lost: Callable[[str], None],
        on_trouble: Callable[[str], None] = lambda why: None,
        on_store_lost: Callable[[str], None] = lambda why: None,
        timing: Timing | None = None,
    ) -> None:
        """`holder` is this agent's address, which followers receive; it is unique. `on_trouble` is called with the reason when
        the store fails, once per reason; `on_store_lost` when it has lost its data, after which there are no more callbacks."""
        self._store = store
        self._holder = holder
        self._callbacks = _Callbacks(
            on_lead=on_lead,
            on_follow=on_follow,
            on_lost=on_lost,
            on_trouble=on_trouble,
            on_store_lost=on_store_lost,
        )
        self._timing = timing or Timing()
        self._lock = threading.Lock()
        self._election = Election(holder, self._timing, random.Random())
        self._term: tuple[int, float] | None = None
        self._trouble = ""
        self._failure: BaseException | None = None
        self._alarm = float("-inf")
        """When the thread `lease-time` wakes up by itself."""
        self._earlier: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Wakes it up earlier."""
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._watch: LeaseWatch | None = None
        self._threads = (
            threading.Thread(target=self._tick, name="lease-time", daemon=True),
            threading.Thread(target=self._send_all, name="lease-requests", daemon=True),
        )

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        self._watch = self._store.watch(lambda view: self._handle(LeaseSeen(view)))

    def close(self) -> None:
        """Leave the election, and release the lease if this agent holds it. Raises what a callback raised."""
        self._handle(LeaveElection())
        self._requests.put(None)
        for thread in self._threads:
            thread.join()
        if self._watch is not None:
            self._watch.close()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def __enter__(self) -> Campaign:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def token_now(self) -> int | None:
        """The token if this agent leads now, by its clock; None otherwise. The store checks every write as well."""
        term = self._term
        return term[0] if term is not None and clock() < term[1] else None

    def _handle(self, event: Event) -> None:
        """Decide and carry out. A callback that raises makes this agent leave the election."""
        with self._lock:
            try:
                if isinstance(event, Renewed):
                    self._log_if_late()
                self._carry_out(self._election.handle(event, clock()))
                self._report_trouble(event)
            except BaseException as failure:
                self._failure = self._failure or failure
                with contextlib.suppress(BaseException):
                    self._carry_out(self._election.handle(LeaveElection(), clock()))
            if self._election.wake < self._alarm or self._election.role is Role.GONE:
                self._earlier.put(None)

    def _carry_out(self, instructions: list[Instruction]) -> None:
        token = self._election.token
        self._term = None if token is None else (token, self._election.leads_until)
        for instruction in instructions:
            match instruction:
                case Lead(token):
                    logger.info("lease acquired by %s with token %d", self._holder, token)
                    self._callbacks.on_lead(token)
                case Follow(holder):
                    logger.info("%s follows %s, which holds the lease", self._holder, holder)
                    self._callbacks.on_follow(holder)
                case LeadershipLost(why):
                    logger.info("lease lost by %s: %s", self._holder, why)
                    self._callbacks.on_lost(why)
                case StoreLost(why):
                    logger.info("lease store of %s has lost its data: %s", self._holder, why)
                    self._callbacks.on_store_lost(why)
                case _:
                    self._requests.put(instruction)

    def _log_if_late(self) -> None:
        left = self._election.leads_until - clock()
        if 0 < left < _LATE * self._timing.ttl:
            logger.info(
                "lease of %s renewed late, %.2f s before it would have stopped leading", self._holder, left
            )

    def _report_trouble(self, event: Event) -> None:
        if isinstance(event, Unreachable) and event.why != self._trouble:
            self._trouble = event.why
            logger.info("lease store failed a request of %s: %s", self._holder, event.why)
            self._callbacks.on_trouble(event.why)
        elif isinstance(event, Won | Renewed) or (isinstance(event, LeaseSeen) and event.answer):
            self._trouble = ""

    def _tick(self) -> None:
        while self._election.role is not Role.GONE:
            with self._lock:
                self._alarm = self._election.wake
            wait = min(max(self._alarm - clock(), 0.0), threading.TIMEOUT_MAX)
            try:
                self._earlier.get(timeout=wait)
            except queue.Empty:
                self._handle(TimePassed())

    def _send_all(self) -> None:
        try:
            self._send_until_closed()
        except BaseException as failure:
            self._failure = self._failure or failure
            self._handle(LeaveElection())

    def _send_until_closed(self) -> None:
        """Then send what the last replies led to: a lease that was granted too late is released."""
        ending = False
        while not (ending and self._requests.empty()):
            request = self._requests.get()
            if request is None:
                ending = True
            elif (reply := self._send(request)) is not None:
                self._handle(reply)

    def _send(self, request: _Request) -> Event | None:
        if isinstance(request, Release):
            with contextlib.suppress(LeaseError):  # It expires by itself, only later.
                self._store.release(request.lease)
            return None
        try:
            return self._request(request)
        except Deposed:
            assert isinstance(request, Renew)
            return LeaseRefused(request.lease.token)
        except LeaseError as error:
            return Unreachable(str(error))

    def _request(self, request: Look | Acquire | Renew) -> Event:
        match request:
            case Look():
                return LeaseSeen(self._store.current(), answer=True)
            case Renew(lease):
                return Renewed(self._store.renew(lease))
            case Acquire():
                got = self._store.acquire(self._holder, self._timing.ttl)
                return Won(got) if isinstance(got, Lease) else LeaseSeen(got, answer=True)
