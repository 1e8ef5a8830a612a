"""Shards served by a job's leader, to whoever pulls: workers without common steps, or programs of any framework.

The queues are those of `data.shards`, under a name; every sample is with one worker, or done, or to do. A worker reports what
it has trained and asks for more in one request, `PullShard`, with a number that it counts up. If it hears nothing (a leader has
died) it asks again with the same number, and gets the answer that it would have got: nothing is handed out twice.

`ShardService` is pure; it is part of the leader's record, which is kept before anything is answered. So queues survive the
leader.
All requests of one turn of the leader's loop are kept together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from gyrostat.core.errors import GyrostatError
from gyrostat.data.shards.messages import AskShard, EpochOver, Shard, ShardReport, WaitForShard

if TYPE_CHECKING:
    from gyrostat.data.shards.queues import Queues


class OpenShards(msgspec.Struct, frozen=True, tag=True):
    """Serve queues under this name. Asked again with the same values, nothing happens; with others, it is refused."""

    queues: str
    samples: int
    shard_size: int
    seed: int = 0
    shuffle: bool = True
    grain: int = 1
    lease_seconds: float = 60.0


class PullShard(msgspec.Struct, frozen=True, tag=True):
    """What a worker has trained since its last request, and whether it wants more."""

    queues: str
    worker: str
    number: int
    """Of this worker's request: one more than that of the last, or the same if that was not answered."""
    epoch: int | None
    """A shard of this epoch is wanted; None: none is."""
    term: int = 0
    offsets: tuple[tuple[int, int], ...] = ()
    """(lease, samples) of each shard that it holds, as in `data.shards.messages.Report`."""
    leaves: bool = False
    """It goes: what it holds and has not reported goes back."""


class Pulled(msgspec.Struct, frozen=True, tag=True):
    """What came of it."""

    accepted: bool
    """The report holds. If not, the update that it was made with must be dropped, and nothing is handed out."""
    reason: str = ""
    shard: Shard | None = None
    wait: bool = False
    """Nothing now, but some may come back."""
    epoch_over: bool = False


class QueuesRecord(msgspec.Struct, frozen=True):
    opened: OpenShards
    state: dict[str, Any]
    answered: dict[str, tuple[int, Pulled]]


class ShardService:
    """All queues of a job."""

    def __init__(self) -> None:
        self._opened: dict[str, OpenShards] = {}
        self._queues: dict[str, Queues] = {}
        self._answered: dict[str, dict[str, tuple[int, Pulled]]] = {}

    def open(self, request: OpenShards) -> str | None:
        """Why it cannot be; None: it is."""
        known = self._opened.get(request.queues)
        if known is not None:
            return None if known == request else f"{request.queues!r} is open with other values: {known}"
        try:
            queues = _make(request)
        except GyrostatError as error:
            return str(error)
        self._opened[request.queues], self._queues[request.queues] = request, queues
        self._answered[request.queues] = {}
        return None

    def pull(self, request: PullShard, now: float) -> Pulled:
        """One worker's turn."""
        queues = self._queues.get(request.queues)
        if queues is None:
            return Pulled(False, f"there are no queues named {request.queues!r}: open them first")
        answered = self._answered[request.queues]
        number, answer = answered.get(request.worker, (-1, Pulled(True)))
        if request.number == number:
            return answer
        if request.number < number:
            return Pulled(False, f"request {request.number} comes after {number}, which is answered already")
        answer = self._answer(queues, request, now)
        answered[request.worker] = request.number, answer
        return answer

    def _answer(self, queues: Queues, request: PullShard, now: float) -> Pulled:
        queues.expire(now)
        if request.offsets:
            verdict = queues.report(ShardReport(request.worker, request.term, request.offsets), now)
            if not verdict.accepted:
                return Pulled(False, verdict.reason)
        if request.leaves:
            queues.release(request.worker, "left")
        if request.epoch is None:
            return Pulled(True)
        try:
            answer = queues.ask(AskShard(request.worker, request.epoch), now)
        except GyrostatError as error:
            return Pulled(False, str(error))
        match answer:
            case Shard():
                return Pulled(True, shard=answer)
            case WaitForShard(reason=reason):
                return Pulled(True, reason, wait=True)
            case EpochOver():
                return Pulled(True, epoch_over=True)

    def record(self) -> dict[str, QueuesRecord]:
        return {
            name: QueuesRecord(opened, self._queues[name].to_state(), self._answered[name])
            for name, opened in self._opened.items()
        }

    @staticmethod
    def restore(record: dict[str, QueuesRecord], now: float) -> ShardService:
        """As it was; whoever holds a shard has its lease anew."""
        backend = ShardService()
        for name, kept in record.items():
            backend.open(kept.opened)
            backend._queues[name].restore(kept.state, now=now)
            backend._answered[name] = dict(kept.answered)
        return backend


def _make(request: OpenShards) -> Queues:
    # They need NumPy, which every command would have to wait for.
    from gyrostat.data.shards.layout import ShardLayout
    from gyrostat.data.shards.queues import Queues

    return Queues(
        ShardLayout.of_indices(request.samples, request.shard_size),
        seed=request.seed,
        shuffle=request.shuffle,
        grain=request.grain,
        lease_seconds=request.lease_seconds,
    )
