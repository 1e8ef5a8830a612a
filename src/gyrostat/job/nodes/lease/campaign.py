"""An agent's part in the election, carried out: two threads around the pure `election`, and the store's watch.

One thread sends requests, one after another. The other hands in the time: it never waits for the store, so a leader stops
leading in time even while a request hangs. What happens (an answer, a view of the watch, a tick) is decided and carried out on
the spot by the thread that brought it, one at a time; handing it on would cost every takeover another wake-up per agent.

So callbacks come from any of these threads, never two at once, and have to return quickly: they wake up whoever does the work
(an event loop by `loop.call_soon_threadsafe`). After `on_lead(token)` comes `on_lost(why)` before any other of them.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
from collections.abc import Callable
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
    TimePassed,
    Timing,
    Unreachable,
    Won,
)

_Request = Look | Acquire | Renew | Release


class Campaign:
    """Runs from `start` (or entering `with`) to `close`, which hands a lease over at once."""

    def __init__(
        self,
        store: LeaseStore,
        holder: str,
        *,
        on_lead: Callable[[int], None],
        on_follow: Callable[[str], None],
        on_lost: Callable[[str], None],
        on_trouble: Callable[[str], None] = lambda why: None,
        timing: Timing | None = None,
    ) -> None:
        """`holder` is what followers are told: where this agent can be reached. No two agents have the same.
        `on_trouble` hears why the store did not do something, when that changes."""
        self._store = store
        self._holder = holder
        self._on_lead, self._on_follow, self._on_lost, self._on_trouble = (
            on_lead,
            on_follow,
            on_lost,
            on_trouble,
        )
        self._timing = timing or Timing()
        self._one_at_a_time = threading.Lock()
        self._election = Election(holder, self._timing, random.Random())
        self._term: tuple[int, float] | None = None
        self._trouble = ""
        self._failure: BaseException | None = None
        self._alarm = float("-inf")
        """When the ticking thread wakes up by itself."""
        self._earlier: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Wakes it up to look again when."""
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._watch: LeaseWatch | None = None
        self._threads = (
            threading.Thread(target=self._tick, name="lease-time", daemon=True),
            threading.Thread(target=self._send_all, name="lease-requests", daemon=True),
        )

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        self._watch = self._store.watch(lambda view: self._happen(LeaseSeen(view)))

    def close(self) -> None:
        """Leave, releasing the lease if it is ours. Raises what a callback raised."""
        self._happen(LeaveElection())
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
        """Of the lease by which this agent leads at this very moment, by the clock. A write is checked by the store besides."""
        term = self._term
        return term[0] if term is not None and clock() < term[1] else None

    def _happen(self, event: Event) -> None:
        """Decide, and carry out. A callback that raises ends this agent's part."""
        with self._one_at_a_time:
            try:
                self._carry_out(self._election.handle(event, clock()))
                self._tell_trouble(event)
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
                    self._on_lead(token)
                case Follow(holder):
                    self._on_follow(holder)
                case LeadershipLost(why):
                    self._on_lost(why)
                case _:
                    self._requests.put(instruction)

    def _tell_trouble(self, event: Event) -> None:
        if isinstance(event, Unreachable) and event.why != self._trouble:
            self._trouble = event.why
            self._on_trouble(event.why)
        elif isinstance(event, Won | Renewed) or (isinstance(event, LeaseSeen) and event.answer):
            self._trouble = ""

    def _tick(self) -> None:
        while self._election.role is not Role.GONE:
            with self._one_at_a_time:
                self._alarm = self._election.wake
            wait = min(max(self._alarm - clock(), 0.0), threading.TIMEOUT_MAX)
            try:
                self._earlier.get(timeout=wait)
            except queue.Empty:
                self._happen(TimePassed())

    def _send_all(self) -> None:
        try:
            self._send_until_told()
        except BaseException as failure:
            self._failure = self._failure or failure
            self._happen(LeaveElection())

    def _send_until_told(self) -> None:
        """And then still what the last answers led to: a lease that came too late is released."""
        ending = False
        while not (ending and self._requests.empty()):
            request = self._requests.get()
            if request is None:
                ending = True
            elif (answer := self._send(request)) is not None:
                self._happen(answer)

    def _send(self, request: _Request) -> Event | None:
        if isinstance(request, Release):
            with contextlib.suppress(LeaseError):  # It ends by itself, only later.
                self._store.release(request.lease)
            return None
        try:
            return self._answer(request)
        except Deposed:
            assert isinstance(request, Renew)
            return LeaseRefused(request.lease.token)
        except LeaseError as error:
            return Unreachable(str(error))

    def _answer(self, request: Look | Acquire | Renew) -> Event:
        match request:
            case Look():
                return LeaseSeen(self._store.current(), answer=True)
            case Renew(lease):
                return Renewed(self._store.renew(lease))
            case Acquire():
                got = self._store.acquire(self._holder, self._timing.ttl)
                return Won(got) if isinstance(got, Lease) else LeaseSeen(got, answer=True)
