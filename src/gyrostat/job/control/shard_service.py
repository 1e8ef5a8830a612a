"""Shards served by a job's leader, to workers without common steps or to programs of any framework.

The queues are those of `data.shards`, each with a name; every sample is leased to one worker, done, or to do. A worker reports
the samples that it has trained and requests more in one message, `PullShard`, with a number that it counts up. Without a reply
(the leader has died) it sends the message again with the same number, and gets the same reply: no shard is given out twice.

`ShardService` is pure. It is part of the leader's record, which is kept before any reply is sent, so queues survive the leader.
One record serves all requests of a turn of the leader's loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from gyrostat.core.errors import GyrostatError
from gyrostat.data.shards.messages import AskShard, EpochOver, Shard, ShardReport, WaitForShard

if TYPE_CHECKING:
    from gyrostat.data.shards.queues import Queues


Name = Annotated[str, msgspec.Meta(max_length=256)]
_MOST_QUEUES = 256
_MOST_ANSWERED = 4096
"""Workers per queue whose last answer is remembered."""


class OpenShards(msgspec.Struct, frozen=True, tag=True):
    """Serve queues under this name. Idempotent; refused if the name is in use with other values."""

    queues: Name
    samples: int
    shard_size: int
    seed: int = 0
    shuffle: bool = True
    grain: int = 1
    lease_seconds: float = 60.0


class PullShard(msgspec.Struct, frozen=True, tag=True):
    """The samples that a worker has trained since its last request; requests more."""

    queues: Name
    worker: Name
    number: int
    """Of this worker's request: one more than that of the last, or the same if that was not answered."""
    epoch: int | None
    """The epoch of the requested shard; None: no shard is requested."""
    term: int = 0
    offsets: Annotated[tuple[tuple[int, int], ...], msgspec.Meta(max_length=10_000)] = ()
    """(lease, samples) of each shard that it holds, as in `data.shards.messages.Report`."""
    leaves: bool = False
    """The worker leaves: its samples that are not reported return to the queue."""


class Pulled(msgspec.Struct, frozen=True, tag=True):
    """The reply to `PullShard`."""

    accepted: bool
    """The report is valid. If not, the update that was made with these samples must be dropped."""
    reason: str = ""
    shard: Shard | None = None
    wait: bool = False
    """No shard is free now, but one may return."""
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
        """The reason of a refusal; None: the queues are open."""
        known = self._opened.get(request.queues)
        if known is not None:
            return None if known == request else f"{request.queues!r} is open with other values: {known}"
        if len(self._opened) >= _MOST_QUEUES:
            return f"a job serves at most {_MOST_QUEUES} queues"
        try:
            queues = _make(request)
        except GyrostatError as error:
            return str(error)
        self._opened[request.queues], self._queues[request.queues] = request, queues
        self._answered[request.queues] = {}
        return None

    def pull(self, request: PullShard, now: float) -> Pulled:
        """Handle one worker's request."""
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
        answered.pop(request.worker, None)
        answered[request.worker] = request.number, answer
        while len(answered) > _MOST_ANSWERED:
            answered.pop(next(iter(answered)))
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
        """As it was; the leases of shards begin again."""
        service = ShardService()
        for name, kept in record.items():
            service.open(kept.opened)
            service._queues[name].restore(kept.state, now=now)
            service._answered[name] = dict(kept.answered)
        return service


def _make(request: OpenShards) -> Queues:
    # These import NumPy, which would delay every command.
    from gyrostat.data.shards.layout import ShardLayout
    from gyrostat.data.shards.queues import Queues

    return Queues(
        ShardLayout.of_indices(request.samples, request.shard_size),
        seed=request.seed,
        shuffle=request.shuffle,
        grain=request.grain,
        lease_seconds=request.lease_seconds,
    )
