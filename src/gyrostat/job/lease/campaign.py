"""An agent's part in the election, carried out: two threads around the pure `election`, and the store's watch.

One thread decides and calls back; it never waits for the store, so a leader stops leading in time even while a request hangs.
The other sends requests, one after another, and hands in the answers as events.

Callbacks come from the deciding thread, one at a time, and have to return quickly: they wake up whoever does the work (an event
loop by `loop.call_soon_threadsafe`). After `on_lead(token)` neither `on_lead` nor `on_follow` comes before `on_lost(why)` has.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
from collections.abc import Callable
from types import TracebackType

from gyrostat.core.errors import Deposed, LeaseError
from gyrostat.job.lease.base import Lease, LeaseStore, clock
from gyrostat.job.lease.election import (
    Acquire,
    Election,
    Event,
    Follow,
    Instruction,
    Lead,
    Leave,
    Look,
    Lost,
    Refused,
    Release,
    Renew,
    Renewed,
    Seen,
    Tick,
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
        self._election = Election(holder, self._timing, random.Random())
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._reign: tuple[int, float] | None = None
        self._trouble = ""
        self._failure: BaseException | None = None
        self._threads = (
            threading.Thread(target=self._decide, name="lease-election", daemon=True),
            threading.Thread(target=self._ask, name="lease-requests", daemon=True),
        )

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Leave, releasing the lease if it is ours. Raises what a callback raised."""
        self._events.put(Leave())
        for thread in self._threads:
            thread.join()
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
        reign = self._reign
        return reign[0] if reign is not None and clock() < reign[1] else None

    def _decide(self) -> None:
        watch = self._store.watch(lambda view: self._events.put(Seen(view)))
        try:
            event: Event = Tick()
            while not isinstance(event, Leave):
                self._carry_out(self._election.handle(event, clock()))
                self._tell_trouble(event)
                event = self._next_event()
        except BaseException as failure:
            self._failure = failure
        finally:
            self._resign()
            watch.close()

    def _next_event(self) -> Event:
        wait = self._election.wake - clock()
        try:
            return self._events.get(timeout=min(max(wait, 0.0), threading.TIMEOUT_MAX))
        except queue.Empty:
            return Tick()

    def _resign(self) -> None:
        """Stop leading, release what we hold, and what an answer still to come may bring."""
        self._reign = None
        for instruction in self._election.handle(Leave(), clock()):
            if isinstance(instruction, Release):
                self._requests.put(instruction)
            elif isinstance(instruction, Lost):
                self._tell_lost(instruction.why)
        self._requests.put(None)
        self._threads[1].join()
        while not self._events.empty():
            for instruction in self._election.handle(self._events.get(), clock()):
                assert isinstance(instruction, Release)
                self._send(instruction)

    def _tell_lost(self, why: str) -> None:
        try:
            self._on_lost(why)
        except BaseException as failure:
            self._failure = self._failure or failure

    def _carry_out(self, instructions: list[Instruction]) -> None:
        token = self._election.token
        self._reign = None if token is None else (token, self._election.leads_until)
        for instruction in instructions:
            match instruction:
                case Lead(token):
                    self._on_lead(token)
                case Follow(holder):
                    self._on_follow(holder)
                case Lost(why):
                    self._on_lost(why)
                case _:
                    self._requests.put(instruction)

    def _tell_trouble(self, event: Event) -> None:
        if isinstance(event, Unreachable) and event.why != self._trouble:
            self._trouble = event.why
            self._on_trouble(event.why)
        elif isinstance(event, Won | Renewed) or (isinstance(event, Seen) and event.answer):
            self._trouble = ""

    def _ask(self) -> None:
        try:
            while (request := self._requests.get()) is not None:
                if (answer := self._send(request)) is not None:
                    self._events.put(answer)
        except BaseException as failure:
            self._failure = failure
            self._events.put(Leave())

    def _send(self, request: _Request) -> Event | None:
        if isinstance(request, Release):
            with contextlib.suppress(LeaseError):  # It ends by itself, only later.
                self._store.release(request.lease)
            return None
        try:
            return self._answer(request)
        except Deposed:
            assert isinstance(request, Renew)
            return Refused(request.lease.token)
        except LeaseError as error:
            return Unreachable(str(error))

    def _answer(self, request: Look | Acquire | Renew) -> Event:
        match request:
            case Look():
                return Seen(self._store.current(), answer=True)
            case Renew(lease):
                return Renewed(self._store.renew(lease))
            case Acquire():
                got = self._store.acquire(self._holder, self._timing.ttl)
                return Won(got) if isinstance(got, Lease) else Seen(got, answer=True)
