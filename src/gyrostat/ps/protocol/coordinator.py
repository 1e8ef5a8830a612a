"""All servers and the shard queues of a job: which server owns which slot, moves, checkpoints, recovery. Pure.

Every method is an event, and returns what is to be done, in order. Only the coordinator changes the map, and only
together with the queues do parameters go back, under a new term. Moves and checkpoints begin when every server has
assumed the term; a checkpoint waits for the moves under way, and no move begins during a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from gyrostat.core.roles import ServerRecovery as ServerRecovery
from gyrostat.data.shards.messages import Answer, AskShard, Request
from gyrostat.data.shards.queues import Queues
from gyrostat.ps.protocol.checkpoint import CheckpointInTheMaking, PsCheckpoint
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
    SlotSaved,
    TermAssumed,
)
from gyrostat.ps.protocol.server_instructions import Instruction as Instruction
from gyrostat.ps.protocol.server_instructions import SendToServer as SendToServer
from gyrostat.ps.protocol.server_instructions import StopServer as StopServer
from gyrostat.ps.protocol.server_instructions import WriteManifest as WriteManifest
from gyrostat.ps.protocol.slot_map import PlannedMove, SlotMap, assign, plan_moves
from gyrostat.ps.protocol.step_commits import committed_steps, wait_for_steps
from gyrostat.ps.store.spec import StepOrder


@dataclass
class _Server:
    address: tuple[str, int]
    cores: float
    leaving: bool = False
    assuming: bool = True
    """It has not acknowledged the term yet."""
    loading: set[int] = field(default_factory=set)
    """Slots that it has not read from their files yet."""


class ServerCoordinator:
    """One job's servers."""

    def __init__(
        self,
        slots: int,
        queues: Queues,
        recovery: ServerRecovery,
        *,
        servers: int = 1,
        order: StepOrder | None = None,
        checkpoint: PsCheckpoint | None = None,
        first_checkpoint: int = 1,
    ) -> None:
        """`servers`: how many to wait for before slots are assigned. `order`: of a job with bounded staleness, whose queues
        hand out one batch after the other. `checkpoint`: the one to begin from, to which the queues have been restored.
        `first_checkpoint`: the least number of those to come."""
        self.queues, self.recovery, self.order = queues, recovery, order
        self._awaited = servers
        self._servers: dict[str, _Server] = {}
        self._owners: list[str | None] = [None] * slots
        self._mirrors: dict[int, tuple[str, int, bool]] = {}
        """By slot: the server, the number of the copy, whether it has arrived."""
        self._version = 0
        self._planned: list[PlannedMove] = []
        self._moves: dict[int, tuple[PlannedMove, int]] = {}
        self._checkpoint = checkpoint or PsCheckpoint(0, queues.epoch, queues.to_state(), {})
        self._numbers = count(max(first_checkpoint, self._checkpoint.number + 1))
        self._making: CheckpointInTheMaking | None = None
        self._checkpoint_due = False
        self._saved_step: int | None = None
        """While slots are being saved, no further step is committed: all files are of one step."""

    @property
    def committed(self) -> int:
        """Of ordered jobs: the steps whose batches are all reported. Every slot has them."""
        if self.order is None:
            return 0
        if self._saved_step is not None:
            return self._saved_step
        return committed_steps(self.order, self.queues)

    @property
    def map(self) -> SlotMap:
        addresses = {name: server.address for name, server in self._servers.items()}
        return SlotMap(self._version, self.queues.term, tuple(self._owners), addresses)

    @property
    def checkpoint(self) -> PsCheckpoint:
        """The last valid one."""
        return self._checkpoint

    @property
    def making(self) -> int | None:
        """The number of the checkpoint that is being made."""
        return None if self._making is None else self._making.number

    @property
    def moving(self) -> int:
        """Slots that move now, or wait for it."""
        return len(self._moves) + len(self._planned)

    @property
    def settled(self) -> bool:
        """Every slot has an owner that serves the term, and nothing is moving or being saved."""
        return (
            None not in self._owners
            and not self._moves
            and not self._planned
            and self._making is None
            and not any(server.assuming for server in self._servers.values())
            and all(ready for _, _, ready in self._mirrors.values())
            and (not self._mirrored or len(self._mirrors) == len(self._owners))
        )

    @property
    def _mirrored(self) -> bool:
        """Every slot should have a mirror, which is on a server that stays."""
        staying = sum(not server.leaving for server in self._servers.values())
        return self.recovery is ServerRecovery.REPLICA and staying > 1

    # Workers.

    def answer(self, request: Request, now: float) -> Answer:
        """A worker asks for a shard, or reports one whose batches all slots have acknowledged.

        It may get a shard of an earlier epoch than it asks for: the queues have gone back, and that epoch is not over
        any more.
        """
        queues = self.queues
        if not isinstance(request, AskShard):
            return queues.answer(request, now)
        if request.epoch > queues.epoch:
            # One epoch after the other: the queues may have gone back by more than one.
            request = AskShard(request.worker, queues.epoch + queues.over)
        if self.order is not None:
            wait = wait_for_steps(self.order, queues, request.epoch, self.committed)
            if wait is not None:
                return wait
        return queues.answer(request, now)

    def worker_lost(self, worker: str) -> None:
        self.queues.release(worker, "lost")

    # Servers that come and go.

    def server_joined(self, name: str, address: tuple[str, int], cores: float = 1.0) -> list[Instruction]:
        """A new server. It gets slots of the others when it has assumed the term."""
        assert name not in self._servers, name
        self._servers[name] = _Server(address, cores)
        if len(self._servers) < self._awaited:
            return []
        self._awaited = 0
        if None in self._owners:
            return self._assign_lost()
        self._version += 1
        assume: list[Instruction] = [SendToServer(name, AssumeTerm(self.queues.term, {}))]
        return assume + self.rebalance()

    def server_leaving(self, name: str) -> list[Instruction]:
        """Move all of its slots away, then stop it."""
        self._servers[name].leaving = True
        return self.rebalance()

    def server_lost(self, name: str, now: float) -> list[Instruction]:
        """A server has died, or is given up."""
        del self._servers[name]
        lost = [slot for slot, owner in enumerate(self._owners) if owner == name]
        self._version += 1
        done = self._cancel_moves(name)
        self._making = self._saved_step = None
        done += self._drop_mirrors_on(name)
        if not lost:
            return done + self._next()
        if self.recovery is ServerRecovery.REPLICA and all(self._has_mirror(slot) for slot in lost):
            return done + self._promote(lost) + self._next()
        return done + self._roll_back(lost, now)

    def rebalance(self, loads: Sequence[float] | None = None) -> list[Instruction]:
        """Even out the slots, by measured loads if given; those of leaving servers move to others."""
        self._planned = plan_moves(self._owners_after_moves(), self._staying(), loads)
        return self._next()

    def link_lost(self, source: str, target: str) -> list[Instruction]:
        """The connection from one server to another has ended, and both live: copies on their way are sent again."""
        done: list[Instruction] = []
        for slot, (move, number) in list(self._moves.items()):
            if (move.source, move.target) == (source, target):
                del self._moves[slot]
                self._planned.insert(0, move)
                done += [SendToServer(name, CancelMove(slot, number)) for name in (source, target)]
        for slot, (mirror, _, _) in list(self._mirrors.items()):
            if self._owners[slot] == source and mirror == target:
                done += self._detach(slot)
        return done + self._next()

    # Messages of servers.

    def message(self, server: str, message: FromServer) -> list[Instruction]:
        if server not in self._servers:
            return []
        match message:
            case TermAssumed(term=term):
                if term == self.queues.term:
                    self._servers[server].assuming = False
                    self._servers[server].loading.clear()
                return self._next()
            case SlotArrived():
                return self._arrived(server, message)
            case MirrorReady(slot=slot, number=number):
                if self._mirrors.get(slot) == (server, number, False):
                    self._mirrors[slot] = server, number, True
                return self._next()
            case SlotSaved():
                return self._saved(message)

    def _arrived(self, server: str, message: SlotArrived) -> list[Instruction]:
        move, number = self._moves.get(message.slot, (None, 0))
        if move is None or number != message.move:
            return [SendToServer(server, CancelMove(message.slot, message.move))]
        del self._moves[message.slot]
        self._owners[message.slot] = server
        self._version += 1
        done: list[Instruction] = [SendToServer(server, OwnSlots({message.slot: number}))]
        done.append(SendToServer(move.source, DropSlot(message.slot, number)))
        return done + self._next()

    # Checkpoints.

    def checkpoint_due(self) -> list[Instruction]:
        """Begin a checkpoint, as soon as nothing moves."""
        self._checkpoint_due = True
        return self._next()

    def manifest_written(self, checkpoint: PsCheckpoint) -> list[Instruction]:
        """The checkpoint is valid, unless something has gone back meanwhile."""
        if self._making is None or self._making.number != checkpoint.number:
            return []
        self._checkpoint, self._making = checkpoint, None
        forget: list[Instruction] = [
            SendToServer(name, ForgetEpochs(checkpoint.epoch)) for name in self._servers
        ]
        return forget + self._next()

    def checkpoint_failed(self, number: int) -> list[Instruction]:
        """A file or the manifest cannot be written: the last checkpoint stays the valid one."""
        if self.making != number:
            return []
        self._making = self._saved_step = None
        return self._next()

    def _saved(self, message: SlotSaved) -> list[Instruction]:
        if self._making is None or self._making.number != message.checkpoint:
            return []
        complete = self._making.saved(message.slot, message.file)
        if complete is None:
            return []
        self._saved_step = None
        return [WriteManifest(complete)]

    # What may begin now.

    def _next(self) -> list[Instruction]:
        """Begin what has waited: a checkpoint, moves, mirrors; stop servers that have left."""
        if None in self._owners or any(server.assuming for server in self._servers.values()) or self._making:
            return []
        if self._checkpoint_due:
            return self._begin_checkpoint() if not self._moves else []
        return self._begin_moves() + self._set_mirrors() + self._stop_left()

    def _begin_checkpoint(self) -> list[Instruction]:
        self._checkpoint_due = False
        number = next(self._numbers)
        queues = self.queues.to_state()
        self._making = CheckpointInTheMaking(number, self.queues.epoch, queues, len(self._owners))
        self._saved_step = self.committed if self.order is not None else None
        return [
            SendToServer(owner, SaveSlot(number, slot, self.committed))
            for slot, owner in enumerate(self._owners)
            if owner
        ]

    def _begin_moves(self) -> list[Instruction]:
        """One at a time from and to each server, so that a request never waits for more than one copy."""
        busy = {name for move, _ in self._moves.values() for name in (move.source, move.target)}
        begun: list[Instruction] = []
        later = []
        for move in self._planned:
            if move.slot in self._moves:
                later.append(move)  # it is on its way to where this move begins
                continue
            if self._owners[move.slot] != move.source or move.target not in self._servers:
                continue
            if busy & {move.source, move.target}:
                later.append(move)
                continue
            busy |= {move.source, move.target}
            number = next(self._numbers)
            self._moves[move.slot] = move, number
            begun += self._detach(move.slot)
            begun.append(SendToServer(move.source, MoveSlot(move.slot, number, move.target)))
        self._planned = later
        return begun

    def _set_mirrors(self) -> list[Instruction]:
        if self.recovery is not ServerRecovery.REPLICA or len(self._servers) < 2:
            return []
        done: list[Instruction] = []
        for slot, owner in enumerate(self._owners):
            if owner is None or slot in self._mirrors or slot in self._moves:
                continue
            mirror = self._mirror_of(owner)
            if mirror is not None:
                number = next(self._numbers)
                self._mirrors[slot] = mirror, number, False
                done.append(SendToServer(owner, SetMirror(slot, number, mirror)))
        return done

    def _mirror_of(self, owner: str) -> str | None:
        """The next server: an update has one mirror as long as nobody is lost."""
        names = sorted(name for name, server in self._servers.items() if not server.leaving or name == owner)
        following = names[names.index(owner) + 1 :] + names[: names.index(owner)]
        return following[0] if following else None

    def _stop_left(self) -> list[Instruction]:
        done: list[Instruction] = []
        for name in [each for each, server in self._servers.items() if server.leaving]:
            done += self._drop_mirrors_on(name)
            in_move = any(name in (move.source, move.target) for move, _ in self._moves.values())
            if name not in self._owners and not in_move:
                del self._servers[name]
                self._version += 1
                done.append(StopServer(name))
        return done

    # Recovery.

    def _roll_back(self, lost: Sequence[int], now: float) -> list[Instruction]:
        """The queues go back with the lost slots, or with all of them."""
        done: list[Instruction] = []
        for slot in list(self._moves):
            move, number = self._moves.pop(slot)
            for name in (move.source, move.target):
                done.append(SendToServer(name, CancelMove(slot, number)))
        self._planned, self._checkpoint_due = [], False
        self.queues.roll_back(self._checkpoint.queues, term=self.queues.term + 1, now=now)
        self._mirrors.clear()
        for slot in lost:
            self._owners[slot] = None
        return done + self._assign_lost()

    def _assign_lost(self) -> list[Instruction]:
        """Owners for slots that have none; every server assumes the term. Waits if there is no server."""
        staying = self._staying()
        if not staying:
            return []
        lost = [slot for slot, owner in enumerate(self._owners) if owner is None]
        for slot, name in assign(lost, staying, self._owners).items():
            self._owners[slot] = name
        self._version += 1
        exact = self.recovery is not ServerRecovery.PARTIAL
        done: list[Instruction] = []
        for name, server in self._servers.items():
            server.assuming = True
            server.loading |= {
                slot for slot, owner in enumerate(self._owners) if owner == name and (exact or slot in lost)
            }
            load = {slot: self._checkpoint.file(slot) for slot in sorted(server.loading)}
            done.append(SendToServer(name, AssumeTerm(self.queues.term, load, drop_others=exact)))
        return done

    def _has_mirror(self, slot: int) -> bool:
        return slot in self._mirrors and self._mirrors[slot][2]

    def _promote(self, lost: Sequence[int]) -> list[Instruction]:
        by_server: dict[str, dict[int, int]] = {}
        for slot in lost:
            name, number, _ = self._mirrors.pop(slot)
            self._owners[slot] = name
            by_server.setdefault(name, {})[slot] = number
        return [SendToServer(name, OwnSlots(slots)) for name, slots in by_server.items()]

    def _cancel_moves(self, name: str) -> list[Instruction]:
        """Of a server that is lost: the slot stays with its source, or is lost with it."""
        done: list[Instruction] = []
        for slot, (move, number) in list(self._moves.items()):
            if name in (move.source, move.target):
                del self._moves[slot]
                other = move.target if name == move.source else move.source
                if other in self._servers:
                    done.append(SendToServer(other, CancelMove(slot, number)))
        self._planned = [move for move in self._planned if name not in (move.source, move.target)]
        return done

    def _drop_mirrors_on(self, name: str) -> list[Instruction]:
        slots = [slot for slot, (server, _, _) in self._mirrors.items() if server == name]
        return [instruction for slot in slots for instruction in self._detach(slot)]

    def _detach(self, slot: int) -> list[Instruction]:
        """The slot's owner stops forwarding, and the mirror drops its copy."""
        if slot not in self._mirrors:
            return []
        mirror, number, _ = self._mirrors.pop(slot)
        owner = self._owners[slot]
        done: list[Instruction] = []
        if owner in self._servers:
            done.append(SendToServer(owner, SetMirror(slot, number, None)))
        if mirror in self._servers:
            done.append(SendToServer(mirror, DropSlot(slot, number)))
        return done

    def _staying(self) -> Mapping[str, float]:
        staying = {name: server.cores for name, server in self._servers.items() if not server.leaving}
        return staying or {name: server.cores for name, server in self._servers.items()}

    def _owners_after_moves(self) -> list[str | None]:
        owners = list(self._owners)
        for slot, (move, _) in self._moves.items():
            owners[slot] = move.target
        return owners
