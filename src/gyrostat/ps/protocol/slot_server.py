"""One server process, without its sockets and files: which requests it admits, and what becomes of its slots.

It decides on events (a request, a message of the coordinator, a copy from another server, a file that was read or
written) and returns actions for the process (`server/process.py`) to carry out. A caller is whatever that process needs
to find the connection again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from gyrostat.ps.protocol.exchange import Exchange, ExchangeReply, ExchangeStatus
from gyrostat.ps.protocol.messages import (
    AssumeTerm,
    CancelMove,
    DropSlot,
    ForgetEpochs,
    FromServer,
    MirrorReady,
    MoveSlot,
    OwnSlots,
    SaveSlot,
    SetMirror,
    SlotArrived,
    SlotRole,
    SlotSaved,
    TermAssumed,
    ToServer,
)
from gyrostat.ps.protocol.record_lines import RecordLine, SlotOwned, UpdateAccepted, line_of
from gyrostat.ps.store.hashing import slots_of
from gyrostat.ps.store.ledger import Slots, Versions
from gyrostat.ps.store.slot_state import SlotState
from gyrostat.ps.store.slot_store import SlotStore, Update
from gyrostat.ps.store.spec import StoreSpec

Caller = object


@dataclass(frozen=True)
class AnswerCaller:
    """Answer a worker, or a server that has forwarded an update."""

    caller: Caller
    reply: ExchangeReply


@dataclass(frozen=True)
class ToCoordinator:
    message: FromServer


@dataclass(frozen=True)
class SlotCopy:
    """A slot on its way to another server: to move there (INCOMING) or to be mirrored there (MIRROR)."""

    role: SlotRole
    number: int
    """Of the move, or of the mirror."""
    term: int
    state: SlotState


@dataclass(frozen=True)
class SendCopy:
    server: str
    copy: SlotCopy


@dataclass(frozen=True)
class ForwardUpdate:
    """Send an update to a mirror. Its reply comes back as `mirrored`."""

    server: str
    forward: int
    exchange: Exchange


@dataclass(frozen=True)
class WriteSlot:
    """Write a file in the background. `written` is called afterwards."""

    checkpoint: int
    state: SlotState


@dataclass(frozen=True)
class ReadSlots:
    """Read files. `loaded` is called afterwards."""

    term: int
    files: dict[int, str]


Action = AnswerCaller | ToCoordinator | SendCopy | ForwardUpdate | WriteSlot | ReadSlots


@dataclass
class _Forwarded:
    """A request that is applied here, and waits for mirrors."""

    caller: Caller
    reply: ExchangeReply
    waiting: dict[int, tuple[str, frozenset[int]]] = field(default_factory=dict)
    """By forward: the mirror, and the slots."""


class SlotServer:
    """The slots of one process, and what they are to it."""

    def __init__(self, spec: StoreSpec) -> None:
        self.store = SlotStore(spec)
        self.record: Callable[[RecordLine], None] | None = None
        """Gets every line, before the update is acknowledged."""
        self.term = 0
        self._owned = np.zeros(spec.slots, bool)
        """Owned or frozen."""
        self._lines: Versions = np.zeros(spec.slots, np.int64)
        """Of owned slots, if updates are recorded."""
        self._roles: dict[int, SlotRole] = {}
        self._frozen = np.zeros(spec.slots, bool)
        self._numbers: dict[int, int] = {}
        """Of slots that are frozen, incoming or mirrors: the number of the move or mirror. Messages about others came
        too late."""
        self._mirrors: dict[int, str] = {}
        self._waiting: list[tuple[Caller, Exchange]] = []
        self._forwarded: list[_Forwarded] = []
        self._next_forward = 0

    @property
    def roles(self) -> dict[int, SlotRole]:
        return dict(self._roles)

    # Requests of workers, and of owners to their mirrors.

    def request(self, caller: Caller, exchange: Exchange) -> list[Action]:
        """A worker's push and pull. The answer may come later."""
        if exchange.term != self.term:
            status = ExchangeStatus.STALE if exchange.term < self.term else ExchangeStatus.AHEAD
            return [AnswerCaller(caller, ExchangeReply(status))]
        here = self._owned[exchange.slots] & ~self._frozen[exchange.slots]
        if here.all():
            return self._serve(caller, exchange, np.zeros(0, np.int64))
        if here.any():
            # The rest is asked for again, at its next owner: no worker waits here for a slot that moves.
            part = _restrict(exchange, np.flatnonzero(here), self.store.spec.slots)
            return self._serve(caller, part, part.slots)
        if self._frozen[exchange.slots].any():
            self._waiting.append((caller, exchange))
            return []
        return [AnswerCaller(caller, ExchangeReply(ExchangeStatus.MOVED))]

    def _serve(self, caller: Caller, exchange: Exchange, served: Slots) -> list[Action]:
        """All slots of this exchange are here. `served`: they, if the worker has asked for more."""
        dense = exchange.pull_dense or (exchange.push is not None and exchange.push.dense)
        if dense and not exchange.begin_dense and not self.store.has_dense(exchange.slots):
            return [AnswerCaller(caller, ExchangeReply(ExchangeStatus.WITHOUT_VALUES))]
        if not self.store.commit(exchange.slots, exchange.committed):
            # An update that was acknowledged is not here: another server has become the owner.
            return [AnswerCaller(caller, ExchangeReply(ExchangeStatus.MOVED))]
        reply = self._carry_out(exchange)
        if len(served):
            reply = replace(reply, served=served)
        changes = exchange.push is not None or exchange.begin_dense
        if not self._mirrors or not changes:
            return [AnswerCaller(caller, reply)]
        return self._forward(caller, exchange, reply)

    def mirror(self, caller: Caller, exchange: Exchange) -> list[Action]:
        """An update that the owner of these slots has applied. Slots whose mirror this is not (any more) are left out,
        and then it is not acknowledged."""
        refused = AnswerCaller(caller, ExchangeReply(ExchangeStatus.MOVED))
        if exchange.term != self.term:
            return [refused]
        slots = exchange.slots.tolist()
        mine = [place for place, slot in enumerate(slots) if self._roles.get(slot) is SlotRole.MIRROR]
        self.store.commit(exchange.slots[mine], exchange.committed)
        if len(mine) == len(slots):
            return [AnswerCaller(caller, self._carry_out(exchange))]
        if mine:
            self._carry_out(_restrict(exchange, np.array(mine), self.store.spec.slots))
        return [refused]

    def mirrored(self, forward: int, status: ExchangeStatus) -> list[Action]:
        """The answer of a mirror. A mirror that refuses has become the owner: this server must not acknowledge any more."""
        for waiting in self._forwarded:
            if waiting.waiting.pop(forward, None) is not None:
                if status is not ExchangeStatus.DONE:
                    waiting.reply = ExchangeReply(ExchangeStatus.MOVED)
                return self._flush_forwarded()
        return []

    def mirror_lost(self, server: str) -> list[Action]:
        """The connection to a mirror has ended. Workers repeat what waits for it: the slots may have another mirror then."""
        for waiting in self._forwarded:
            if any(mirror == server for mirror, _ in waiting.waiting.values()):
                waiting.waiting, waiting.reply = {}, ExchangeReply(ExchangeStatus.MOVED)
        return self._flush_forwarded()

    def _carry_out(self, exchange: Exchange) -> ExchangeReply:
        for tensor, values in exchange.begin_dense.items():
            self.store.begin_dense(tensor, exchange.slots, values)
        duplicates = 0
        if exchange.push is not None:
            new = self.store.apply(exchange.push)
            duplicates = int((~new).sum())
            self._record_update(exchange.push, exchange.push.slots[new])
        asked = exchange.which_applied
        applied = np.zeros(0, bool)
        if asked is not None:
            applied = self.store.ledger.all_applied(exchange.slots, asked.epoch, asked.first, asked.count)
        return ExchangeReply(
            ExchangeStatus.DONE,
            {table: self.store.pull(table, keys) for table, keys in exchange.pull_rows.items()},
            {tensor: self.store.pull_dense(tensor, exchange.slots) for tensor in exchange.pull_dense},
            applied,
            duplicates,
            self._line_versions(exchange.slots),
        )

    def _forward(self, caller: Caller, exchange: Exchange, reply: ExchangeReply) -> list[Action]:
        """Even a duplicate: the mirror may not have it yet."""
        pending = _Forwarded(caller, reply)
        actions: list[Action] = []
        by_mirror: dict[str, list[int]] = {}
        for place, slot in enumerate(exchange.slots.tolist()):
            if slot in self._mirrors:
                by_mirror.setdefault(self._mirrors[slot], []).append(place)
        for server, places in by_mirror.items():
            part = _changes(exchange, np.array(places), self.store.spec.slots)
            pending.waiting[self._next_forward] = server, frozenset(part.slots.tolist())
            actions.append(ForwardUpdate(server, self._next_forward, part))
            self._next_forward += 1
        self._forwarded.append(pending)
        return actions + self._flush_forwarded()

    def _flush_forwarded(self) -> list[Action]:
        ready = [each for each in self._forwarded if not each.waiting]
        self._forwarded = [each for each in self._forwarded if each.waiting]
        return [AnswerCaller(each.caller, each.reply) for each in ready]

    # Messages of the coordinator.

    def control(self, message: ToServer) -> list[Action]:
        match message:
            case AssumeTerm():
                return self._assume(message)
            case MoveSlot():
                if self._roles.get(message.slot) is not SlotRole.OWNER:
                    return []
                self._set_role(message.slot, SlotRole.FROZEN, message.move)
                copy = SlotCopy(SlotRole.INCOMING, message.move, self.term, self.store.to_state(message.slot))
                return [SendCopy(message.target, copy)]
            case CancelMove():
                if self._numbers.get(message.slot) != message.move:
                    return []
                if self._roles[message.slot] is SlotRole.FROZEN:
                    self._set_role(message.slot, SlotRole.OWNER)
                else:
                    self._drop([message.slot])
                return self._retry_waiting()
            case OwnSlots():
                for slot, number in message.slots.items():
                    if self._numbers.get(slot) == number:
                        self._set_role(slot, SlotRole.OWNER)
                        self._record_owned(slot, number)
                return []
            case DropSlot():
                if self._numbers.get(message.slot) != message.number:
                    return []
                self._drop([message.slot])
                return self._retry_waiting()
            case SetMirror():
                return self._set_mirror(message)
            case SaveSlot():
                if message.slot not in self._roles:
                    return []
                self.store.commit(np.array([message.slot]), message.committed)
                return [WriteSlot(message.checkpoint, self.store.to_state(message.slot))]
            case ForgetEpochs():
                slots = np.array(self.store.slots, np.int64)
                self.store.ledger.forget(slots, message.before)
                return []

    def _assume(self, message: AssumeTerm) -> list[Action]:
        self.term = message.term
        if message.drop_others:
            self._drop(list(self._roles))
        else:
            self._drop([slot for slot in message.load if slot in self._roles])
        for waiting in self._forwarded:
            waiting.waiting, waiting.reply = {}, ExchangeReply(ExchangeStatus.STALE)
        actions = self._flush_forwarded() + self._retry_waiting()
        fresh = [slot for slot, file in message.load.items() if not file]
        self.store.own(fresh)
        for slot in fresh:
            self._set_role(slot, SlotRole.OWNER)
            self._record_owned(slot, 0)
        files = {slot: file for slot, file in message.load.items() if file}
        if files:
            return [*actions, ReadSlots(message.term, files)]
        return [*actions, ToCoordinator(TermAssumed(message.term))]

    def _set_mirror(self, message: SetMirror) -> list[Action]:
        for waiting in self._forwarded:
            waiting.waiting = {
                forward: (mirror, left)
                for forward, (mirror, slots) in waiting.waiting.items()
                if (left := slots - {message.slot})
            }
        actions = self._flush_forwarded()
        if message.mirror is None:
            self._mirrors.pop(message.slot, None)
            return actions
        if self._roles.get(message.slot) is not SlotRole.OWNER:
            return actions
        self._mirrors[message.slot] = message.mirror
        copy = SlotCopy(SlotRole.MIRROR, message.number, self.term, self.store.to_state(message.slot))
        # The copy first: what waited for another mirror is part of it.
        return [SendCopy(message.mirror, copy), *actions]

    # Copies and files.

    def receive(self, copy: SlotCopy) -> list[Action]:
        """A slot from another server. One of another term is discarded; so is one that is older than what is here.

        A slot that is frozen here may come back as a mirror, before this server hears that it has moved.
        """
        slot = copy.state.slot
        owner = self._roles.get(slot) is SlotRole.OWNER
        if copy.term != self.term or owner or copy.number <= self._numbers.get(slot, 0):
            return []
        self._drop([slot])
        self.store.restore(copy.state)
        self._set_role(slot, copy.role, copy.number)
        kind = MirrorReady if copy.role is SlotRole.MIRROR else SlotArrived
        return [*self._retry_waiting(), ToCoordinator(kind(slot, copy.number))]

    def loaded(self, term: int, states: Iterable[SlotState]) -> list[Action]:
        """The files of `ReadSlots`. Those of a term that is over are ignored."""
        if term != self.term:
            return []
        for state in states:
            self._drop([state.slot])
            self.store.restore(state)
            self._set_role(state.slot, SlotRole.OWNER)
            self._record_owned(state.slot, 0)
        return [ToCoordinator(TermAssumed(term))]

    def written(self, checkpoint: int, slot: int, file: str) -> list[Action]:
        """The file of `WriteSlot`."""
        return [ToCoordinator(SlotSaved(checkpoint, slot, file))]

    def _retry_waiting(self) -> list[Action]:
        """Requests for slots that were frozen: served here, or answered `MOVED`."""
        waiting, self._waiting = self._waiting, []
        return [action for caller, exchange in waiting for action in self.request(caller, exchange)]

    # What is recorded, if anything.

    def _record_update(self, update: Update, slots: Slots) -> None:
        if self.record is not None and len(slots):
            before = (self.store.ledger.versions[slots] - 1).tolist()
            taken = dict(zip(slots.tolist(), before, strict=True))
            self.record(UpdateAccepted(update.epoch, update.batch, update.origin, taken))

    def _line_versions(self, slots: Slots) -> Versions:
        if not self.store.spec.record:
            return np.zeros(0, np.int64)
        return self.store.ledger.versions[slots] + self._lines[slots]

    def _record_owned(self, slot: int, number: int) -> None:
        self._lines[slot] = line_of(self.term, number)
        if self.record is not None:
            self.record(SlotOwned(self.term, number, slot, int(self.store.ledger.versions[slot])))

    def _drop(self, slots: Iterable[int]) -> None:
        gone = [slot for slot in slots if slot in self._roles]
        self.store.remove(gone)
        for slot in gone:
            del self._roles[slot]
            self._owned[slot] = False
            self._frozen[slot] = False
            self._numbers.pop(slot, None)
            self._mirrors.pop(slot, None)

    def _set_role(self, slot: int, role: SlotRole, number: int = 0) -> None:
        self._roles[slot] = role
        if role is SlotRole.OWNER:
            self._numbers.pop(slot, None)
        else:
            self._numbers[slot] = number
        self._owned[slot] = role in (SlotRole.OWNER, SlotRole.FROZEN)
        self._frozen[slot] = role is SlotRole.FROZEN


def _restrict(exchange: Exchange, places: Slots, slots: int) -> Exchange:
    """An exchange in some of its slots. Pushed rows of other slots need not be cut out: `Update.slots` decides."""
    mine = exchange.slots[places]
    push = exchange.push
    if push is not None:
        push = replace(push, slots=mine, dense={tensor: each[places] for tensor, each in push.dense.items()})
    wanted = np.zeros(slots, bool)
    wanted[mine] = True
    return replace(
        exchange,
        slots=mine,
        push=push,
        pull_rows={table: keys[wanted[slots_of(keys, slots)]] for table, keys in exchange.pull_rows.items()},
        begin_dense={tensor: each[places] for tensor, each in exchange.begin_dense.items()},
    )


def _changes(exchange: Exchange, places: Slots, slots: int) -> Exchange:
    """Of some of its slots, what a mirror needs."""
    return replace(
        _restrict(replace(exchange, pull_rows={}), places, slots), pull_dense=(), which_applied=None
    )
