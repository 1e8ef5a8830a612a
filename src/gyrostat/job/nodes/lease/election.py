"""One agent's part in the election: candidate, leading or following. Pure; `campaign` carries it out.

Events in, instructions out, time as an argument:

    election.handle(LeaseSeen(LeaseView(None, 7)), now)   →  []              and `wake` is the time of the next call
    election.handle(TimePassed(), now)                    →  [Acquire()]
    election.handle(Won(lease), now)                      →  [Lead(8)]

The rules:

1. When the lease is vacant, an agent tries to acquire it after a random delay of some milliseconds, so that of many agents only
   a few try, and the others see the winner first.
2. A leader renews after about a third of the lease's time. It stops leading a tenth of that time before the lease can have
   expired for any other agent, even if a reply is outstanding: times count from before the request was sent.
3. Views may arrive late, from the watch and from replies. Each has a number; a view older than the newest known is ignored.
4. The watch only saves time: an agent without news reads the lease itself at intervals.
5. A reply that arrives too late (`Won` or `Renewed` after the agent stopped leading) makes the agent release the lease.
6. A reply whose number is smaller than one that was known when the request was sent means that the store has lost its data:
   restored from a backup, or emptied. Tokens would begin again, and nobody knows what the last leader had decided. The agent
   leaves the election and says so.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from gyrostat.core.errors import Misuse
from gyrostat.job.nodes.lease.base import Lease, LeaseView


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How fast the loss of a leader is noticed, and the cost of that."""

    ttl: float = 5.0
    """Seconds after its last renewal at which a lease expires. etcd grants 2 at least."""
    agents: int = 8
    """The approximate number of agents: candidates spread over 2 ms each. A wrong number only costs a little time."""

    def __post_init__(self) -> None:
        if not 0.05 <= self.ttl <= 3600:
            raise Misuse(f"a lease lasts between 0.05 and 3600 seconds, got ttl={self.ttl!r}")
        if self.agents < 1:
            raise Misuse(f"a job has at least one agent, got agents={self.agents!r}")

    @property
    def stagger(self) -> float:
        """Candidates wait a random time up to this before they try to acquire."""
        return min(0.002 * self.agents, self.ttl / 10)

    @property
    def margin(self) -> float:
        """A leader stops leading this long before its lease expires: clocks may differ in speed by a tenth."""
        return self.ttl / 10

    @property
    def retry(self) -> float:
        """Seconds between requests to a store that does not answer."""
        return self.ttl / 10

    @property
    def look(self) -> float:
        """Seconds for which an agent relies on the watch before it reads the lease itself."""
        return 2 * self.ttl


_NEVER = float("inf")


class Role(StrEnum):
    CANDIDATE = "candidate"
    LEADING = "leading"
    FOLLOWING = "following"
    GONE = "gone"


@dataclass(frozen=True)
class TimePassed:
    """No event, but time has passed."""


@dataclass(frozen=True)
class LeaseSeen:
    """From the watch, from `current`, or from a refused `acquire` (`answer`: it is the reply to a request)."""

    view: LeaseView
    answer: bool = False


@dataclass(frozen=True)
class Won:
    lease: Lease


@dataclass(frozen=True)
class Renewed:
    lease: Lease


@dataclass(frozen=True)
class LeaseRefused:
    """The store replied that the lease with this token is not in force."""

    token: int


@dataclass(frozen=True)
class Unreachable:
    why: str


@dataclass(frozen=True)
class LeaveElection:
    """This agent leaves the election."""


Event = TimePassed | LeaseSeen | Won | Renewed | LeaseRefused | Unreachable | LeaveElection


@dataclass(frozen=True)
class Look:
    """Read the lease from the store."""


@dataclass(frozen=True)
class Acquire:
    pass


@dataclass(frozen=True)
class Renew:
    lease: Lease


@dataclass(frozen=True)
class Release:
    """Without waiting for a reply."""

    lease: Lease


@dataclass(frozen=True)
class Lead:
    token: int


@dataclass(frozen=True)
class Follow:
    holder: str


@dataclass(frozen=True)
class LeadershipLost:
    """This agent led, and stops leading now."""

    why: str


@dataclass(frozen=True)
class StoreLost:
    """The store has lost its data, so this job has no leader any more."""

    why: str


Instruction = Look | Acquire | Renew | Release | Lead | Follow | LeadershipLost | StoreLost


class Election:
    """One agent's part. At most one of Look, Acquire and Renew is outstanding; the next event of a reply belongs to it."""

    def __init__(self, me: str, timing: Timing, random: random.Random) -> None:
        self.me = me
        self.role = Role.CANDIDATE
        self._timing = timing
        self._random = random
        self._lease: Lease | None = None
        self._former: Lease | None = None
        self._known: LeaseView | None = None
        self._asked = False
        self._known_when_asked = -1
        self._due = -_NEVER
        self._trouble = ""

    @property
    def token(self) -> int | None:
        """The token of the lease if this agent leads."""
        return self._lease.token if self._lease else None

    @property
    def leads_until(self) -> float:
        """This agent may act as leader before this time, not from then on."""
        return -_NEVER if self._lease is None else self._until(self._lease)

    @property
    def wake(self) -> float:
        """When to handle a `TimePassed` if no other event occurs."""
        if self.role is Role.GONE:
            return _NEVER
        due = _NEVER if self._asked else self._due
        return min(due, self.leads_until) if self._lease else due

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """The one mutator."""
        if isinstance(event, Won | Renewed | LeaseRefused | Unreachable) or (
            isinstance(event, LeaseSeen) and event.answer
        ):
            self._asked = False
        done: list[Instruction] = []
        match event:
            case LeaseSeen(view, answer=True) if view.as_of < self._known_when_asked:
                return self._store_lost(view.as_of)
            case LeaseSeen(view):
                done = self._see(view, now)
            case Won(lease) if lease.token <= self._known_when_asked:
                return [Release(lease), *self._store_lost(lease.token)]
            case Won(lease):
                done = self._win(lease, now)
            case Renewed(lease):
                done = self._extend(lease, now)
            case LeaseRefused(token) if token == self.token:
                done = self._stop_leading("the store reports that its lease is not in force", now)
            case Unreachable(why):
                self._trouble = why
                self._due = self._soon(now)
            case LeaveElection():
                return self._leave()
        return done + self._due_actions(now)

    def _see(self, view: LeaseView, now: float) -> list[Instruction]:
        known = self._known
        if self.role is Role.GONE or (known is not None and view.order < known.order):
            return []
        self._known = view
        if self._lease is not None:
            if view.lease is not None and view.lease.token == self._lease.token:
                return []
            return self._stop_leading(_why_deposed(view), now) + self._see(view, now)
        if view.lease is None:
            self.role = Role.CANDIDATE
            self._due = min(self._due, now + self._random.uniform(0, self._timing.stagger))
            return []
        self._due = now + self._timing.look * self._random.uniform(0.75, 1.25)
        if view.lease.holder == self.me:
            return self._see_own(view.lease)
        known_token = known.lease.token if known is not None and known.lease is not None else None
        if self.role is Role.FOLLOWING and known_token == view.lease.token:
            return []
        self.role = Role.FOLLOWING
        return [Follow(view.lease.holder)]

    def _see_own(self, lease: Lease) -> list[Instruction]:
        """A lease with our name although we do not lead: `Won` is about to arrive, or we gave it up, or an earlier process had
        it."""
        self.role = Role.CANDIDATE
        if self._former is not None and self._former.token == lease.token:
            former, self._former = self._former, None
            return [Release(former)]
        return []

    def _win(self, lease: Lease, now: float) -> list[Instruction]:
        if self.role is Role.GONE or self._is_outdated(lease) or now >= self._until(lease):
            self._due = self._soon(now)
            return [Release(lease)]
        if self._known is None or self._known.order < (lease.token, False):
            self._known = LeaseView(lease, lease.token)
        self.role, self._lease, self._trouble = Role.LEADING, lease, ""
        self._renew_later(lease, now)
        return [Lead(lease.token)]

    def _is_outdated(self, lease: Lease) -> bool:
        """The store has already shown a later view."""
        known = self._known
        if known is None or known.order < (lease.token, False):
            return False
        return known.lease is None or known.lease.token != lease.token

    def _extend(self, lease: Lease, now: float) -> list[Instruction]:
        if self.role is Role.GONE:
            return []
        if lease.token != self.token:
            self._former = None
            return [Release(lease)]
        self._lease, self._trouble = lease, ""
        self._renew_later(lease, now)
        return []

    def _leave(self) -> list[Instruction]:
        lease, self._lease, self.role = self._lease, None, Role.GONE
        return [] if lease is None else [LeadershipLost("it leaves"), Release(lease)]

    def _store_lost(self, number: int) -> list[Instruction]:
        if self.role is Role.GONE:
            return []
        led, self._lease, self.role = self._lease, None, Role.GONE
        why = f"it is at revision {number} and was at {self._known_when_asked} before"
        return [*([] if led is None else [LeadershipLost("its store has lost its data")]), StoreLost(why)]

    def _stop_leading(self, why: str, now: float) -> list[Instruction]:
        self._former, self._lease, self.role = self._lease, None, Role.CANDIDATE
        self._due = now
        return [LeadershipLost(why)]

    def _due_actions(self, now: float) -> list[Instruction]:
        """What is due now, whatever the event was."""
        done: list[Instruction] = []
        if self.role is Role.GONE:
            return done
        if self._lease is not None and now >= self.leads_until:
            done += self._stop_leading(f"it could not renew its lease in time{self._because()}", now)
        if self._asked:
            return done
        if self._due == _NEVER:
            self._due = self._soon(now)
        if now >= self._due:
            self._asked, self._due = True, _NEVER
            self._known_when_asked = -1 if self._known is None else self._known.as_of
            done.append(self._next_request())
        return done

    def _next_request(self) -> Instruction:
        if self._lease is not None:
            return Renew(self._lease)
        vacant = self._known is not None and self._known.lease is None
        return Acquire() if vacant else Look()

    def _renew_later(self, lease: Lease, now: float) -> None:
        assert lease.expires is not None
        self._due = now + (lease.expires - now) / 3 * self._random.uniform(0.85, 1.15)

    def _until(self, lease: Lease) -> float:
        assert lease.expires is not None
        return lease.expires - self._timing.margin

    def _soon(self, now: float) -> float:
        return now + self._timing.retry * self._random.uniform(0.75, 1.25)

    def _because(self) -> str:
        return f": {self._trouble}" if self._trouble else ""


def _why_deposed(view: LeaseView) -> str:
    return (
        "its lease is gone from the store"
        if view.lease is None
        else f"{view.lease.holder} holds the lease now"
    )
