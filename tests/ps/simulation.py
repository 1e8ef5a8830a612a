"""Servers, workers, the coordinator and a network in one thread: every message is delivered, and everyone dies, when a
schedule says so.

The machines are the product's own; only sockets, files and processes are replaced. Channels keep the order of messages,
as TCP does, and are lost with either end. Each slot's content is counted: batch b of epoch e adds 1 to element (e, b) of
the slot's dense piece and to a row of the slot, whatever the bitmaps say.

In an ordered job a batch is pulled for, computed, and then pushed. With staleness 0 its gradient depends on what was pulled, so
that the result is that of `reference` only if every pull saw the right steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from gyrostat.data.shards.layout import ShardLayout
from gyrostat.data.shards.messages import AskShard, EpochOver, ReportVerdict, Shard, ShardReport, WaitForShard
from gyrostat.data.shards.queues import Queues
from gyrostat.ps.protocol.checkpoint import PsCheckpoint
from gyrostat.ps.protocol.coordinator import (
    Instruction,
    SendToServer,
    ServerCoordinator,
    ServerRecovery,
    StopServer,
    WriteManifest,
)
from gyrostat.ps.protocol.delivery import Delivery, ShardBatches
from gyrostat.ps.protocol.exchange import BatchRange, Exchange, ExchangeReply, ExchangeStatus
from gyrostat.ps.protocol.messages import ToServer
from gyrostat.ps.protocol.slot_map import SlotMap
from gyrostat.ps.protocol.slot_server import (
    Action,
    AnswerCaller,
    ForwardUpdate,
    ReadSlots,
    SendCopy,
    SlotServer,
    ToCoordinator,
    WriteSlot,
)
from gyrostat.ps.store.hashing import Keys
from gyrostat.ps.store.optimizers import SGD
from gyrostat.ps.store.slot_state import SlotState
from gyrostat.ps.store.slot_store import SlotStore, Update
from gyrostat.ps.store.spec import DenseSpec, StepOrder, StoreSpec, TableSpec

SLOTS = 4
BATCH, SHARD, SAMPLES, EPOCHS = 2, 6, 18, 2
BATCHES = SAMPLES // BATCH
WIDTH = EPOCHS * BATCHES
RANKS = 2


def spec_of(staleness: int | None) -> StoreSpec:
    order = None
    if staleness is not None:
        order = StepOrder(staleness=staleness, virtual_workers=RANKS, batches=BATCHES)
    return StoreSpec(
        slots=SLOTS,
        tables=(TableSpec(name="rows", width=WIDTH, optimizer=SGD(lr=1.0), initial_scale=0.0),),
        dense=(DenseSpec(name="model", size=SLOTS * WIDTH, optimizer=SGD(lr=1.0)),),
        order=order,
    )


# One key in every slot.
KEYS: Keys = (np.arange(SLOTS, dtype=np.uint64) << np.uint64(62)) + np.uint64(7)


@dataclass
class Worker:
    """A worker as a state machine: ask, find out what to skip, pull and push every batch, report."""

    name: str
    epoch: int = 0
    work: ShardBatches | None = None
    batches: list[int] | None = None
    """Of the shard, those still to be trained; None: not known yet."""
    delivery: Delivery | None = None
    committed: int = 0
    computed: bool = False
    """Of ordered jobs: all slots have been pulled from, and the batch is being pushed."""
    applied: np.ndarray | None = None
    map: SlotMap | None = None
    pulled: dict[int, np.ndarray] = field(default_factory=dict)
    """Of ordered jobs, by slot: what the batch is computed with."""


def gradients(staleness: int | None, epoch: int, batch: int, pulled: np.ndarray) -> np.ndarray:
    """By slot. With staleness 0 they depend on the parameters of all slots."""
    gradient = np.zeros((SLOTS, WIDTH), np.float32)
    gradient[:, epoch * BATCHES + batch] = 1
    return gradient + pulled.sum(axis=0) * np.float32(0.1) if staleness == 0 else gradient


def reference() -> dict[int, Any]:
    """The contents after all steps in order, with staleness 0."""
    spec, every = spec_of(0), np.arange(SLOTS)
    assert spec.order is not None
    store = SlotStore(spec)
    store.own(range(SLOTS))
    store.begin_dense(0, every, np.zeros((SLOTS, WIDTH), np.float32))
    for epoch in range(EPOCHS):
        for first in range(0, BATCHES, RANKS):
            pulled = store.pull_dense(0, every)
            for batch in range(first, min(first + RANKS, BATCHES)):
                each = gradients(0, epoch, batch, pulled)
                store.apply(Update(epoch, batch, every, {0: (KEYS, each)}, {0: each}))
            assert store.commit(every, spec.order.place(epoch, first)[0] + 1)
    dense, rows = -store.pull_dense(0, every), -store.pull(0, KEYS)
    return {slot: (dense[slot].tolist(), rows[slot].tolist()) for slot in range(SLOTS)}


@dataclass
class World:
    recovery: ServerRecovery
    staleness: int | None = None
    servers: dict[str, SlotServer] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    channels: dict[tuple[str, str], deque[Callable[[], None]]] = field(default_factory=dict)
    files: dict[str, SlotState] = field(default_factory=dict)
    made: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spec = spec_of(self.staleness)
        ordered = self.spec.order is not None
        queues = Queues(
            ShardLayout.of_indices(SAMPLES, BATCH if ordered else SHARD),
            grain=BATCH,
            shuffle=not ordered,
            lease_seconds=float("inf"),
        )
        self.coordinator = ServerCoordinator(SLOTS, queues, self.recovery, order=self.spec.order)
        self.add_server()
        self.add_server()
        self.add_worker()
        self.add_worker()

    # What a schedule may do.

    def choices(self) -> list[Callable[[], None]]:
        """Everything that could happen next, besides faults."""
        steps = [partial(self._step, each) for each in self.workers.values() if self._can_step(each)]
        return self.deliveries() + steps

    def deliveries(self) -> list[Callable[[], None]]:
        return [partial(self._deliver, channel) for channel, queue in sorted(self.channels.items()) if queue]

    def faults(self) -> list[Callable[[], None]]:
        known = list(self.coordinator.map.addresses)
        found = [self.add_server] if len(known) < 4 else []
        if len(known) > 1:
            found += [
                partial(fault, name)
                for name in known
                for fault in (self.kill_server, self.abandon_server, self.leave)
            ]
        return [*found, *self.worker_faults(), self.save, self.save, self.spread]

    def worker_faults(self) -> list[Callable[[], None]]:
        return [
            partial(fault, name) for name in self.workers for fault in (self.kill_worker, self.abandon_worker)
        ]

    def add_server(self) -> None:
        self._count("server joins")
        name = self._name("server")
        self.servers[name] = SlotServer(self.spec)
        self._follow(self.coordinator.server_joined(name, (name, 0)))

    def add_worker(self) -> None:
        name = self._name("worker")
        self.workers[name] = Worker(name)

    def kill_server(self, name: str) -> None:
        self._count("server deaths")
        self._forget(name)
        self._follow(self.coordinator.server_lost(name, 0.0))

    def abandon_server(self, name: str) -> None:
        """Given up, but it lives: it hears nothing from the coordinator any more, and workers and servers still talk to it."""
        self._count("servers given up")
        for channel in (("coordinator", name), (name, "coordinator")):
            self.channels.pop(channel, None)
        self._follow(self.coordinator.server_lost(name, 0.0))

    def abandon_worker(self, name: str) -> None:
        """Silent for too long: its shard is given to another, and it goes on."""
        self._count("workers given up")
        self.coordinator.worker_lost(name)

    def kill_worker(self, name: str) -> None:
        self._count("worker deaths")
        self._cut(name)
        del self.workers[name]
        self.coordinator.worker_lost(name)
        self.add_worker()

    def save(self) -> None:
        self._count("checkpoints")
        self._follow(self.coordinator.checkpoint_due())

    def spread(self) -> None:
        self._count("rebalances")
        self._follow(self.coordinator.rebalance([1.0 + (self.made + slot) % 3 for slot in range(SLOTS)]))

    def leave(self, name: str) -> None:
        self._count("server leaves")
        self._follow(self.coordinator.server_leaving(name))

    @property
    def finished(self) -> bool:
        queues = self.coordinator.queues
        return queues.epoch == EPOCHS - 1 and queues.over

    def contents(self) -> dict[int, Any]:
        """By slot: the counts of every batch, in the dense piece and in the slot's row."""
        found = {}
        for slot, owner in enumerate(self.coordinator.map.owners):
            assert owner is not None
            store = self.servers[owner].store
            assert store.commit(np.array([slot]), self.coordinator.committed)
            dense = -store.pull_dense(0, np.array([slot]))[0]
            row = -store.pull(0, KEYS[slot : slot + 1])[0]
            found[slot] = (dense.tolist(), row.tolist())
        return found

    # The network.

    def _send(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        self.channels.setdefault((source, target), deque()).append(deliver)

    def _deliver(self, channel: tuple[str, str]) -> None:
        self.channels[channel].popleft()()

    def _cut(self, name: str) -> None:
        for channel in [each for each in self.channels if name in each]:
            del self.channels[channel]

    def _forget(self, name: str) -> None:
        """A server's process has ended: those that talked to it learn it when they look."""
        self._cut(name)
        del self.servers[name]
        for worker in self.workers.values():
            self._send(name, worker.name, partial(self._disconnected, worker, name))
        for other in self.servers:
            self._send(name, other, partial(self._mirror_lost, other, name))

    def _mirror_lost(self, server: str, mirror: str) -> None:
        self._act(server, self.servers[server].mirror_lost(mirror))

    def _disconnected(self, worker: Worker, server: str) -> None:
        if worker.delivery is not None:
            worker.delivery.disconnected(server)

    # The coordinator and servers.

    def _follow(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case SendToServer(server=name, message=message):
                    self._count(type(message).__name__)
                    self._send("coordinator", name, partial(self._control, name, message))
                case WriteManifest(checkpoint=checkpoint):
                    self._send("disk", "coordinator", partial(self._manifest_written, checkpoint))
                case StopServer(server=name):
                    self._forget(name)

    def _control(self, name: str, message: ToServer) -> None:
        self._act(name, self.servers[name].control(message))

    def _manifest_written(self, checkpoint: PsCheckpoint) -> None:
        self._follow(self.coordinator.manifest_written(checkpoint))

    def _act(self, name: str, actions: list[Action]) -> None:
        for action in actions:
            self._act_once(name, action)

    def _act_once(self, name: str, action: Action) -> None:
        server = self.servers[name]
        match action:
            case AnswerCaller(caller=caller, reply=reply):
                assert callable(caller)
                caller(reply)
            case ToCoordinator(message=message):
                if name in self.coordinator.map.addresses:
                    self._send(
                        name, "coordinator", lambda: self._follow(self.coordinator.message(name, message))
                    )
            case SendCopy(server=target, copy=copy):
                if target in self.servers:
                    other = self.servers[target]
                    self._send(name, target, lambda: self._act(target, other.receive(copy)))
            case ForwardUpdate(server=target, forward=number, exchange=exchange):
                if target not in self.servers:
                    self._act(name, server.mirror_lost(target))
                    return
                other = self.servers[target]

                def answer(reply: ExchangeReply) -> None:
                    if name in self.servers:
                        self._send(
                            target, name, lambda: self._act(name, server.mirrored(number, reply.status))
                        )

                self._send(name, target, lambda: self._act(target, other.mirror(answer, exchange)))
            case WriteSlot(checkpoint=checkpoint, state=state):
                file = f"{checkpoint}-{state.slot}-{name}"

                def write() -> None:
                    self.files[file] = state
                    self._act(name, server.written(checkpoint, state.slot, file))

                self._send(f"disk of {name}", name, write)
            case ReadSlots(term=term, files=files):
                states = [self.files[file] for file in files.values()]
                self._send(f"disk of {name}", name, lambda: self._act(name, server.loaded(term, states)))

    # Workers.

    def _can_step(self, worker: Worker) -> bool:
        if worker.delivery is None:
            return worker.epoch < EPOCHS
        delivery, known = worker.delivery, self.coordinator.map.addresses
        waits_for = delivery.waits_for
        return delivery.done or delivery.outdated or not waits_for or not waits_for <= known.keys()

    def _step(self, worker: Worker) -> None:
        if worker.delivery is not None:
            if not worker.delivery.done:
                self._exchange(worker)
            else:
                self._delivered(worker)
        elif worker.work is None:
            self._ask(worker)
        else:
            worker.delivery = Delivery(SLOTS)
            worker.applied = None
            self._exchange(worker)

    def _ask(self, worker: Worker) -> None:
        match self.coordinator.answer(AskShard(worker.name, worker.epoch), 0.0):
            case Shard() as shard:
                worker.work, worker.batches = ShardBatches(shard, BATCH), None
                worker.pulled, worker.computed = {}, False
                worker.committed = self.coordinator.committed
            case EpochOver(epoch=epoch):
                worker.epoch = epoch + 1
            case WaitForShard():
                self._count("waits")

    def _delivered(self, worker: Worker) -> None:
        assert worker.delivery is not None
        assert worker.work is not None
        dropped, worker.delivery = worker.delivery.dropped, None
        if dropped:
            worker.work = None
            return
        if worker.batches is None:
            assert worker.applied is not None
            worker.work.skip(worker.applied.tolist())
            worker.batches = [number for number, _ in worker.work]
            self._count("batches skipped", int(worker.applied.sum()))
        elif self.staleness is None or worker.computed:
            worker.batches.pop(0)
            worker.pulled, worker.computed = {}, False
        else:
            worker.computed = True
        if not worker.batches:
            shard = worker.work.shard
            report = ShardReport(worker.name, shard.term, ((shard.lease, len(shard)),))
            verdict = self.coordinator.answer(report, 0.0)
            assert isinstance(verdict, ReportVerdict)
            self._count("reports accepted" if verdict.accepted else "reports refused")
            worker.work = None

    def _exchange(self, worker: Worker) -> None:
        assert worker.delivery is not None
        assert worker.work is not None
        for given_up in worker.delivery.waits_for - self.coordinator.map.addresses.keys():
            worker.delivery.disconnected(given_up)
        if worker.map is None or worker.delivery.outdated or None in worker.map.owners:
            worker.map, worker.delivery.outdated = self.coordinator.map, False
        for server, slots in worker.delivery.to_send(worker.map).items():
            exchange = self._request(worker, np.array(slots))
            delivery = worker.delivery
            if server not in self.servers:
                delivery.disconnected(server)
                continue
            self._send(worker.name, server, self._requester(worker, delivery, server, exchange))

    def _requester(
        self, worker: Worker, delivery: Delivery, name: str, exchange: Exchange
    ) -> Callable[[], None]:
        server = self.servers[name]

        def heard(reply: ExchangeReply) -> None:
            if delivery is not worker.delivery or name not in delivery.waits_for:
                return  # the exchange was dropped; or the server was given up, and the connection closed
            self._count(reply.status.name)
            if reply.status is ExchangeStatus.DONE and exchange.which_applied is not None:
                worker.applied = reply.applied if worker.applied is None else worker.applied & reply.applied
            if reply.status is ExchangeStatus.DONE and exchange.pull_dense and exchange.push is None:
                pulled = reply.dense[0]
                assert (pulled == reply.rows[0]).all(), "a row and the dense piece of its slot differ"
                self._check_staleness(worker, pulled)
                served = reply.served if len(reply.served) else exchange.slots
                worker.pulled.update(zip(served.tolist(), pulled, strict=True))
            delivery.answered(name, reply.status, reply.served.tolist())
            if len(reply.served):
                self._count("served in part")

        def answer(reply: ExchangeReply) -> None:
            if worker.name in self.workers and name in self.servers:
                self._send(name, worker.name, lambda: heard(reply))

        return lambda: self._act(name, server.request(answer, exchange))

    def _request(self, worker: Worker, slots: np.ndarray) -> Exchange:
        assert worker.work is not None
        assert worker.delivery is not None
        term = worker.work.shard.term
        if term == self.coordinator.queues.term:
            worker.committed = self.coordinator.committed
        committed = worker.committed
        if worker.batches is None:
            asked = worker.work.asked
            return Exchange(term, slots, which_applied=BatchRange(asked.epoch, asked.first, asked.count))
        epoch, batch = worker.work.shard.epoch, worker.batches[0]
        keys = KEYS[slots]
        begin = {0: np.zeros((len(slots), WIDTH), np.float32)} if worker.delivery.lacks_values else {}
        if self.staleness is not None and not worker.computed:
            return Exchange(term, slots, None, {0: keys}, (0,), begin, committed=committed)
        pulled = np.zeros((SLOTS, WIDTH), np.float32)
        for slot, values in worker.pulled.items():
            pulled[slot] = values
        gradient = gradients(self.staleness, epoch, batch, pulled)[slots]
        push = Update(epoch, batch, slots, {0: (keys, gradient.copy())}, {0: gradient})
        return Exchange(term, slots, push, {0: keys}, (0,), begin, committed=committed)

    def _check_staleness(self, worker: Worker, pulled: np.ndarray) -> None:
        """All steps that the batch must be computed with are in what was pulled."""
        assert self.spec.order is not None
        assert worker.work is not None
        assert worker.batches
        step, _ = self.spec.order.place(worker.work.shard.epoch, worker.batches[0])
        for place in range(WIDTH):
            if self.spec.order.place(*divmod(place, BATCHES))[0] < step - self.spec.order.staleness:
                assert (pulled[:, place] != 0).all(), f"batch of step {step} does not see {place}"

    # Small things.

    def _name(self, kind: str) -> str:
        self.made += 1
        return f"{kind}{self.made}"

    def _count(self, what: str, more: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + more
