"""`RemoteServers`: a job's servers and its leader, over sockets, for one worker.

An exchange goes to every server that owns slots, and is repeated (`protocol.delivery`) until each slot has answered: servers
may move slots, die or be stopped meanwhile. The leader sends every new map on its own; a server that a map does not have any
more is not waited for. Only one thread may use it.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable, Mapping

import numpy as np

from gyrostat.core.errors import GyrostatError, UsageError
from gyrostat.data.shards.messages import EpochOver, Shard
from gyrostat.ps.client.partition import Gathered, SlotPart, WholeExchange
from gyrostat.ps.client.port import Pull, PulledValues, TermOver, WholeUpdate, WorkerProgress
from gyrostat.ps.protocol.data_spec import DataSpec
from gyrostat.ps.protocol.delivery import Delivery
from gyrostat.ps.protocol.evaluation import EvaluationKey
from gyrostat.ps.protocol.exchange import BatchRange, ExchangeReply, ExchangeStatus
from gyrostat.ps.protocol.slot_map import SlotMap
from gyrostat.ps.store.hashing import Rows
from gyrostat.ps.store.ledger import Flags
from gyrostat.ps.store.spec import StoreSpec
from gyrostat.ps.wire.codec import ExchangeCodec
from gyrostat.ps.wire.connection import PsConnection, connect
from gyrostat.ps.wire.control import (
    Answered,
    AskDigest,
    AskProgress,
    CloseWorker,
    EvaluateNext,
    EvaluateReport,
    EvaluateResults,
    FromWorker,
    LogMetrics,
    NewMap,
    NextShard,
    OpenJob,
    RenewShards,
    ReportShard,
    RequestRefused,
    SaveJob,
    control_numbers,
    from_leader,
    send_control,
)
from gyrostat.ps.wire.frames import FrameKind, MalformedFrame, PsFrame
from gyrostat.ps.wire.handshake import PeerIdentity, PeerRole

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
_RENEW_SECONDS = 1.0


class LeaderLost(GyrostatError):
    """The job's leader has ended, and with it the job."""


class RemoteServers:
    """One worker's connection to its job; implements `ParameterServers`."""

    def __init__(self, address: tuple[str, int], token: bytes, worker: str) -> None:
        self._token, self._identity = token, PeerIdentity(PeerRole.WORKER, worker)
        self._selector = selectors.DefaultSelector()
        self._leader = self._connect(address, self._heard_leader, self._leader_lost)
        self._servers: dict[str, PsConnection] = {}
        self._map: SlotMap | None = None
        self._answers: dict[int, tuple[Answered | RequestRefused, bytes]] = {}
        self._lost_leader: str | None = None
        self._numbers = 0
        self._job: _Job | None = None
        self._current: _CurrentExchange | None = None
        self._shards = _HeldShards()
        self._progress = WorkerProgress()
        self._renewed = time.monotonic()
        self._waited: dict[str, tuple[float, int]] = {}
        """By server, since then: seconds of exchanges, and their number."""
        self._ask(AskProgress(self._next_number()))

    @property
    def progress(self) -> WorkerProgress:
        return self._progress

    def open(self, spec: StoreSpec, data: DataSpec) -> None:
        self._ask(OpenJob(self._next_number(), spec, data))
        self._job = _Job(spec, data)

    def begin_dense(self, values: Mapping[int, Rows]) -> None:
        self._opened.initial |= {tensor: np.array(each, np.float32) for tensor, each in values.items()}
        self._exchange_all(
            _CurrentExchange(self._opened.spec, None, Pull(), None, begin=self._opened.initial)
        )

    def exchange(self, push: WholeUpdate | None, pull: Pull) -> PulledValues:
        current = _CurrentExchange(self._opened.spec, push, pull, None)
        self._exchange_all(current)
        self._renew()
        return current.gathered.values()

    def which_applied(self, batches: BatchRange) -> Flags:
        current = _CurrentExchange(self._opened.spec, None, Pull(), batches)
        self._exchange_all(current)
        return current.gathered.applied(batches.count)

    # The leader.

    def next_shard(self, epoch: int) -> Shard | EpochOver:
        shard = self._shards.take_offered()
        if shard is None:
            answer, _ = self._ask(NextShard(self._next_number(), epoch))
            if answer.epoch_over:
                return EpochOver(epoch)
            shard = answer.shard
        assert shard is not None
        self._shards.add(shard)
        return shard

    def report(self, shard: Shard, samples: int) -> None:
        if samples == len(shard):
            self._shards.done(shard)
        self._ask(ReportShard(self._next_number(), shard.term, shard.lease, samples))

    def evaluate_next(self, key: EvaluationKey, items: int, part_size: int) -> range | None:
        answer, _ = self._ask(EvaluateNext(self._next_number(), key, items, part_size))
        return None if answer.part is None else range(*answer.part)

    def evaluate_report(self, key: EvaluationKey, part: range, result: bytes) -> None:
        self._ask(EvaluateReport(self._next_number(), key, part.start, part.stop), result)

    def evaluate_results(self, key: EvaluationKey) -> list[bytes]:
        answer, data = self._ask(EvaluateResults(self._next_number(), key))
        results, start = [], 0
        for length in answer.results:
            results.append(data[start : start + length])
            start += length
        return results

    def save(self) -> None:
        self._ask(SaveJob(self._next_number()))

    def digest(self) -> str:
        answer, _ = self._ask(AskDigest(self._next_number()))
        return answer.digest

    def log(self, metrics: Mapping[str, float]) -> None:
        send_control(self._leader, LogMetrics(dict(metrics)))

    def close(self) -> None:
        """Safe to call twice, and when the leader has gone."""
        if self._job is not None and not self._leader.closed:
            with contextlib.suppress(GyrostatError):
                self._ask(CloseWorker(self._next_number()))
        for connection in (self._leader, *self._servers.values()):
            connection.close()
        self._selector.close()

    @property
    def _opened(self) -> _Job:
        if self._job is None:
            raise UsageError("the servers are not open: call open first")
        return self._job

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _ask(self, request: FromWorker, data: bytes = b"") -> tuple[Answered, bytes]:
        """Send a request, and wait for its answer."""
        send_control(self._leader, request, data)
        while (found := self._answers.pop(self._numbers, None)) is None:
            self._turn(None)
        answer, data = found
        if isinstance(answer, RequestRefused):
            if answer.term_over:
                self._shards.drop()
                raise TermOver(answer.reason)
            raise UsageError(answer.reason)
        told = answer.progress
        self._progress = WorkerProgress(told.updates, told.epoch, told.committed, told.is_main)
        return answer, data

    def _renew(self) -> None:
        """Tell the leader now and then that this worker makes progress."""
        now = time.monotonic()
        if now >= self._renewed + _RENEW_SECONDS:
            send_control(self._leader, RenewShards(now - self._renewed, self._waited))
            self._renewed, self._waited = now, {}

    def _heard_leader(self, _: PsConnection, frame: PsFrame) -> None:
        message = from_leader(control_numbers(frame))
        if isinstance(message, NewMap):
            self._new_map(message.map)
        else:
            self._answers[message.number] = message, bytes(frame.arrays)

    def _new_map(self, new: SlotMap) -> None:
        self._map = new
        for name in self._servers.keys() - new.addresses.keys():
            self._servers.pop(name).close()
            if self._current is not None:
                self._current.delivery.disconnected(name)

    def _leader_lost(self, _: PsConnection, reason: str) -> None:
        self._lost_leader = reason

    # Exchanges.

    def _exchange_all(self, current: _CurrentExchange) -> None:
        """Until every slot has answered."""
        self._current, term = current, self._shards.term
        try:
            self._deliver(current, term)
            while current.delivery.dropped:
                if term is not None:
                    self._shards.drop()
                    raise TermOver("parameters and shard queues have gone back to the last checkpoint")
                self._disconnect(current.delivery)
                current.restart()
                self._deliver(current, term)
        except BaseException:
            self._disconnect(current.delivery)
            raise
        finally:
            self._current = None

    def _deliver(self, current: _CurrentExchange, term: int | None) -> None:
        """Send, and send again, until all have answered or the term is over."""
        delivery, pause = current.delivery, _FIRST_PAUSE
        version = -1 if self._map is None else self._map.version
        retry_at: float | None = None
        while not delivery.done:
            if delivery.outdated:
                # The map is about to change, or a server to learn of its slots: wait for a new map, but not for long.
                if retry_at is None:
                    retry_at, pause = time.monotonic() + pause, min(2 * pause, _LONGEST_PAUSE)
                left = retry_at - time.monotonic()
                if left > 0 and self._map is not None and self._map.version == version:
                    self._turn(left)
                    continue
                retry_at = None
                delivery.outdated = False
            if self._map is not None:
                version = self._map.version
                self._send(current, self._map, term)
            if not delivery.done and not delivery.outdated:
                self._turn(None)

    def _send(self, current: _CurrentExchange, slot_map: SlotMap, term: int | None) -> None:
        """Send to servers what they have not answered yet."""
        delivery = current.delivery
        if term is not None and slot_map.term > term:
            delivery.dropped = True
            return
        begin = self._opened.initial if delivery.lacks_values else {}
        if delivery.lacks_values and not begin:
            raise UsageError("dense tensors have no values yet: call begin_dense first")
        for name, slots in delivery.to_send(slot_map).items():
            connection = self._server(name, slot_map)
            if connection is None:
                delivery.disconnected(name)
                continue
            part_term = slot_map.term if term is None else term
            part = current.part(name, slots, part_term, begin, self._progress.committed)
            encoded = self._opened.codec.encode_exchange(current.number, part.exchange)
            connection.send(FrameKind.EXCHANGE, *encoded)

    def _server(self, name: str, slot_map: SlotMap) -> PsConnection | None:
        connection = self._servers.get(name)
        if connection is not None:
            return connection

        def lost(connection: PsConnection, reason: str) -> None:
            if self._servers.get(name) is connection:
                del self._servers[name]
                if self._current is not None:
                    self._current.delivery.disconnected(name)

        def heard(connection: PsConnection, frame: PsFrame) -> None:
            self._heard_server(name, frame)

        try:
            made = self._connect(slot_map.addresses[name], heard, lost)
        except OSError:
            return None
        self._servers[name] = made
        return made

    def _heard_server(self, name: str, frame: PsFrame) -> None:
        if frame.kind is not FrameKind.REPLY:
            raise MalformedFrame(f"a {frame.kind.name} frame from a server")
        number, reply = self._opened.codec.decode_reply(frame)
        current = self._current
        if current is None or number != current.number or name not in current.delivery.waits_for:
            return
        if reply.status is ExchangeStatus.DONE:
            seconds, count = self._waited.get(name, (0.0, 0))
            self._waited[name] = seconds + current.waited(name), count + 1
            current.take(name, reply)
        current.delivery.answered(name, reply.status, reply.served.tolist())

    def _disconnect(self, delivery: Delivery) -> None:
        """Those that still owe a reply to an exchange that is over."""
        for name in delivery.waits_for:
            connection = self._servers.pop(name, None)
            if connection is not None:
                connection.close()

    def _connect(
        self,
        address: tuple[str, int],
        on_frame: Callable[[PsConnection, PsFrame], None],
        on_lost: Callable[[PsConnection, str], None],
    ) -> PsConnection:
        return connect(
            self._selector, address, self._token, self._identity, on_frame=on_frame, on_lost=on_lost
        )

    def _turn(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            key.data()
        if self._lost_leader is not None:
            raise LeaderLost(f"the leader of this job has gone: {self._lost_leader}")


class _Job:
    """What all workers bring."""

    def __init__(self, spec: StoreSpec, data: DataSpec) -> None:
        self.spec, self.data = spec, data
        self.codec = ExchangeCodec(spec)
        self.initial: dict[int, Rows] = {}
        """Initial values of dense tensors, for slots that have none (any more)."""


class _HeldShards:
    """The shards that this worker holds. All of them are of one term: if that is over, all are void."""

    def __init__(self) -> None:
        self._leases: set[int] = set()
        self._offered: Shard | None = None
        self.term: int | None = None
        """None: it holds none."""

    def add(self, shard: Shard) -> None:
        if self._leases and shard.term != self.term:
            self.drop()
            self._offered = shard
            raise TermOver("parameters and shard queues have gone back to the last checkpoint")
        self._leases.add(shard.lease)
        self.term = shard.term

    def take_offered(self) -> Shard | None:
        """A shard of a new term that came while shards of the old one were held."""
        shard, self._offered = self._offered, None
        return shard

    def done(self, shard: Shard) -> None:
        self._leases.discard(shard.lease)
        if not self._leases:
            self.term = None

    def drop(self) -> None:
        self._leases.clear()
        self.term = None


class _CurrentExchange:
    """An exchange with all slots: what is sent to whom, and what has come back."""

    _number = 0

    def __init__(
        self,
        spec: StoreSpec,
        push: WholeUpdate | None,
        pull: Pull,
        batches: BatchRange | None,
        begin: Mapping[int, Rows] | None = None,
    ) -> None:
        self._spec, self._push, self._pull, self._batches = spec, push, pull, batches
        self._begin = begin or {}
        self.restart(again=False)

    def restart(self, *, again: bool = True) -> None:
        """In another term, which the next map has."""
        _CurrentExchange._number += 1
        self.number = _CurrentExchange._number
        self.delivery = Delivery(self._spec.slots)
        self.delivery.outdated = again
        self.gathered = Gathered(self._spec, self._pull)
        self._parts: dict[str, SlotPart] = {}
        self._sent: dict[str, float] = {}

    def part(
        self, server: str, slots: list[int], term: int, begin: Mapping[int, Rows], committed: int
    ) -> SlotPart:
        whole = WholeExchange(term, self._push, self._pull, self._batches, begin or self._begin, committed)
        part = SlotPart.of(self._spec, whole, slots)
        self._parts[server], self._sent[server] = part, time.monotonic()
        return part

    def waited(self, server: str) -> float:
        """Seconds since its part was sent."""
        return time.monotonic() - self._sent[server]

    def take(self, server: str, reply: ExchangeReply) -> None:
        self.gathered.take(self._parts[server], reply)
