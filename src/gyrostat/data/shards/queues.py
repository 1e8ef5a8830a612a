"""TODO and DOING: the queues of one epoch after the other, and every decision about them. Pure; time is an argument.

TODO is a position in a random order of shard numbers, which is computed and not stored (`../bijection.py`), and the ranges that
were returned. DOING is the ranges that workers hold, with the samples they have reported. What a worker has not reported is
returned when it leaves, dies, or its lease expires. So every sample is at any time in exactly one of TODO, DOING and done.

The state is plain data for JSON. Saved and restored together with the parameters that the reported samples went into, it keeps
"exactly once" true for the restored parameters: later reports are forgotten together with their updates.

A network may repeat requests: the service in front keeps its last replies, and returns the same one to a repeated request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec

from gyrostat.core.errors import ForeignCheckpoint, MalformedState, Misuse, UsageError
from gyrostat.data.bijection import Bijection
from gyrostat.data.shards.layout import ShardLayout
from gyrostat.data.shards.messages import (
    Answer,
    AskShard,
    EpochOver,
    LeaveShards,
    ReportVerdict,
    Request,
    ReturnedShards,
    Shard,
    ShardReport,
    WaitForShard,
)
from gyrostat.data.shards.speed import Speeds, portion

FORMAT = 1


@dataclass(slots=True)
class _Held:
    """A range of samples that a worker holds."""

    worker: str
    start: int
    stop: int
    expires: float
    offset: int = 0
    """Samples reported, from `start` on."""


class _State(TypedDict):
    """The result of `to_state`, and the argument of `restore`."""

    layout: dict[str, Any]
    epoch: int
    next_shard: int
    next_lease: int
    todo: int
    returned: list[tuple[int, int]]
    doing: list[tuple[int, str, int, int, int]]
    workers: list[str]


class Queues:
    """Hands out the shards of a dataset, epoch after epoch."""

    def __init__(
        self,
        layout: ShardLayout,
        *,
        seed: int = 0,
        shuffle: bool = True,
        grain: int = 1,
        lease_seconds: float = 60.0,
        term: int = 0,
    ) -> None:
        """`grain`: shards are divided only at multiples of it, such as a batch size.

        `lease_seconds`: how long a worker may be silent. `term`: see `Shard`; restored queues need a new one.
        """
        if not isinstance(grain, int) or grain < 1:
            raise UsageError(f"grain must be a whole number of at least 1, got {grain!r}")
        if not lease_seconds > 0:
            raise UsageError(f"lease_seconds must be more than 0, got {lease_seconds!r}")
        self.layout, self.seed, self.shuffle, self.term = layout, seed, shuffle, term
        self._grain, self._lease_seconds = grain, lease_seconds
        self._speeds = Speeds()
        self._next_lease = 0
        self._first_expiry = float("inf")
        self.begin_epoch(0)

    # Counts.

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def todo(self) -> int:
        """Samples that no worker holds."""
        return self._todo

    @property
    def doing(self) -> int:
        """Samples that workers hold and have not reported."""
        return sum(held.stop - held.start - held.offset for held in self._held.values())

    @property
    def done(self) -> int:
        """Samples reported."""
        return self.layout.samples - self.todo - self.doing

    @property
    def next_start(self) -> int:
        """The first sample of what the next request gets. TODO must not be empty."""
        if self._returned:
            return self._returned[0][0]
        return self.layout.bounds(self._shard_number())[0]

    @property
    def first_left(self) -> int:
        """Of shards in their own order: the first sample that is not reported."""
        starts = [start for start, _ in self._returned]
        starts += [held.start + held.offset for held in self._held.values()]
        if self._next_shard < self.layout.shards:
            starts.append(self.layout.bounds(self._shard_number())[0])
        return min(starts, default=self.layout.samples)

    @property
    def over(self) -> bool:
        """Every sample of the epoch has been reported."""
        return self._todo == 0 and not self._held

    # Requests.

    def answer(self, request: Request, now: float) -> Answer:
        """The reply to any request."""
        match request:
            case AskShard():
                return self.ask(request, now)
            case ShardReport():
                return self.report(request, now)
            case LeaveShards():
                self.release(request.worker, "left")
                return None

    def ask(self, request: AskShard, now: float) -> Shard | WaitForShard | EpochOver:
        """The next shard for a worker. A request for the next epoch begins it, if this one is over."""
        self.expire(now)
        if request.epoch < self._epoch:
            return EpochOver(request.epoch)
        if request.epoch > self._epoch:
            if request.epoch > self._epoch + 1 or not self.over:
                raise Misuse(
                    f"worker {request.worker!r} asks for epoch {request.epoch}, but epoch {self._epoch} is not over: "
                    f"{self.todo + self.doing} samples of it are left"
                )
            self.begin_epoch(request.epoch)
        self._speeds.join(request.worker, now)
        if self._todo == 0:
            self._speeds.wait(request.worker)
            if not self._held:
                return EpochOver(request.epoch)
            holders = sorted({held.worker for held in self._held.values()})
            return WaitForShard(
                f"the last {self.doing} samples of epoch {self._epoch} are with {', '.join(holders)}"
            )
        self._speeds.begin(request.worker, now)
        start, stop = self._take(self._portion_for(request.worker))
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        self._hold(lease, _Held(request.worker, start, stop, now + self._lease_seconds))
        source, first = self.layout.place(start)
        return Shard(lease, self.term, self._epoch, source, first, first + stop - start)

    def report(self, request: ShardReport, now: float) -> ReportVerdict:
        """Record a worker's offsets, all or none. A refused report changes nothing."""
        why = self._refusal(request)
        if why is not None:
            return ReportVerdict(False, why)
        samples = 0
        for lease, offset in request.offsets:
            held = self._held[lease]
            samples += offset - held.offset
            held.offset, held.expires = offset, now + self._lease_seconds
            if held.start + offset == held.stop:
                del self._held[lease]
        self._speeds.join(request.worker, now)
        self._speeds.report(request.worker, samples, now)
        return ReportVerdict(True)

    def renew(self, worker: str, now: float) -> None:
        """A worker makes progress, without a report: its leases begin anew."""
        for held in self._held.values():
            if held.worker == worker:
                held.expires = now + self._lease_seconds

    def rate(self, worker: str) -> float | None:
        """Samples per second of a worker, as measured by its reports."""
        return self._speeds.rate(worker)

    def release(self, worker: str, reason: str) -> list[ReturnedShards]:
        """A worker has left or died: return the samples that it holds and has not reported."""
        self._speeds.leave(worker)
        return [
            self._give_back(lease, reason)
            for lease in [lease for lease, held in self._held.items() if held.worker == worker]
        ]

    def expire(self, now: float) -> list[ReturnedShards]:
        """Return samples whose lease has expired. `ask` does this first; the result is for the log."""
        if now < self._first_expiry:
            return []
        silent = [lease for lease, held in self._held.items() if held.expires <= now]
        returned = []
        for lease in silent:
            self._speeds.leave(self._held[lease].worker)
            returned.append(self._give_back(lease, f"silent for {self._lease_seconds:g} s"))
        self._first_expiry = min((held.expires for held in self._held.values()), default=float("inf"))
        return returned

    def begin_epoch(self, epoch: int) -> None:
        """Put all samples into TODO, in a new order; the rest of the epoch before is dropped."""
        self._epoch = epoch
        self._order = Bijection(self.layout.shards, self.seed, epoch)
        self._next_shard = 0
        self._returned: deque[tuple[int, int]] = deque()
        self._todo = self.layout.samples
        self._held: dict[int, _Held] = {}
        self._first_expiry = float("inf")

    # TODO and DOING.

    def _portion_for(self, worker: str) -> int:
        start, stop = self._returned[0] if self._returned else self.layout.bounds(self._shard_number())
        return portion(
            available=stop - start,
            todo=self._todo,
            workers=len(self._speeds),
            share=self._speeds.share(worker),
            grain=self._grain,
        )

    def _shard_number(self) -> int:
        return self._order[self._next_shard] if self.shuffle else self._next_shard

    def _take(self, samples: int) -> tuple[int, int]:
        """At most `samples` samples of the next returned range, or else of the next shard."""
        if self._returned:
            start, stop = self._returned.popleft()
        else:
            start, stop = self.layout.bounds(self._shard_number())
            self._next_shard += 1
        if stop - start > samples:
            self._returned.appendleft((start + samples, stop))
            stop = start + samples
        self._todo -= stop - start
        return start, stop

    def _hold(self, lease: int, held: _Held) -> None:
        self._held[lease] = held
        self._first_expiry = min(self._first_expiry, held.expires)

    def _give_back(self, lease: int, reason: str) -> ReturnedShards:
        held = self._held.pop(lease)
        start = held.start + held.offset
        self._returned.append((start, held.stop))
        self._todo += held.stop - start
        return ReturnedShards(held.worker, lease, held.stop - start, reason)

    def _refusal(self, request: ShardReport) -> str | None:
        """Why a report is refused; None if it is accepted."""
        if request.term != self.term:
            return f"of term {request.term}; this is term {self.term}, restored from a saved state: load that and ask again"
        for lease, offset in request.offsets:
            held = self._held.get(lease)
            if held is None or held.worker != request.worker:
                return (
                    f"shard {lease} is not with {request.worker!r} (any more); drop this update and ask again"
                )
            if not held.offset <= offset <= held.stop - held.start:
                return f"offset {offset} in shard {lease}: it has {held.stop - held.start}, and {held.offset} were reported"
        return None

    # To plain data and back.

    def to_state(self) -> dict[str, Any]:
        """Everything but time and measured speeds, as data for JSON."""
        return {
            "layout": self._layout_state(),
            "epoch": self._epoch,
            "next_shard": self._next_shard,
            "next_lease": self._next_lease,
            "todo": self._todo,
            "returned": [[start, stop] for start, stop in self._returned],
            "doing": [
                [lease, held.worker, held.start, held.stop, held.offset] for lease, held in self._held.items()
            ],
            "workers": self._speeds.workers,
        }

    def restore(self, state: Mapping[str, Any], *, now: float) -> None:
        """Restore what `to_state` returned. Leases begin anew; call `release` for workers that have gone."""
        saved = self._checked(state)
        self.begin_epoch(saved["epoch"])
        self._next_shard, self._next_lease = saved["next_shard"], saved["next_lease"]
        self._todo = saved["todo"]
        self._returned.extend(saved["returned"])
        self._speeds = Speeds()
        for worker in saved["workers"]:
            self._speeds.join(worker, now)
        for lease, worker, start, stop, offset in saved["doing"]:
            self._hold(lease, _Held(worker, start, stop, now + self._lease_seconds, offset))

    def roll_back(self, state: Mapping[str, Any], *, term: int, now: float) -> None:
        """Go back to what `to_state` returned, together with the parameters: reports since then are forgotten, all shards that
        workers hold return to TODO, and reports of earlier terms are refused."""
        assert term > self.term, f"term {term} does not follow term {self.term}"
        next_lease = self._next_lease
        self.restore(state, now=now)
        self.term, self._next_lease = term, max(next_lease, self._next_lease)
        for worker in {held.worker for held in self._held.values()}:
            self.release(worker, "rolled back")

    def _layout_state(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "samples": self.layout.samples,
            "shard_size": self.layout.shard_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "digest": self.layout.identity,
        }

    def _checked(self, state: Mapping[str, Any]) -> _State:
        try:
            saved = msgspec.convert(state, _State)
        except msgspec.ValidationError as error:
            raise MalformedState(f"this is not the state of shard queues: {error}") from error
        mine = self._layout_state()
        differs = [name for name in mine if saved["layout"].get(name) != mine[name]]
        if differs:
            differences = ", ".join(
                f"{name} = {saved['layout'].get(name)!r} (here {mine[name]!r})" for name in differs
            )
            raise ForeignCheckpoint(
                f"these shard queues were saved for other data: {differences}; give the same dataset, "
                "shard_size, seed and shuffle, or start anew in another directory"
            )
        held = sum(stop - start for _, _, start, stop, _ in saved["doing"])
        if (
            not sum(stop - start for start, stop in saved["returned"])
            <= saved["todo"]
            <= mine["samples"] - held
        ):
            raise MalformedState(
                f"the shard queues do not add up: {saved['todo']} samples to do, {held} held by workers; use another save"
            )
        return saved
