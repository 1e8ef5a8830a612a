"""A server process: one loop over its connections, around `protocol.slot_server`, which makes the decisions.

    1. wait until a worker, a server or the leader sends something, or a file is written or read
    2. decode it, let `SlotServer` decide, and carry out its actions
    3. a piece of what can wait: save the next slot, send the next copy to a mirror, give some memory back
    4. tell the leader regularly what has been done

Slots are saved, and copied to mirrors, one after the other: each needs memory for a second copy of it. The process ends when
the leader tells it to, or when its connection to the leader ends.
"""

from __future__ import annotations

import os
import selectors
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from gyrostat.core.errors import MalformedState
from gyrostat.ps.checkpoint.checkpoint_files import slot_file_name
from gyrostat.ps.checkpoint.record import UpdateRecorder
from gyrostat.ps.checkpoint.slot_files import read_slot, write_slot
from gyrostat.ps.protocol.exchange import ExchangeReply
from gyrostat.ps.protocol.messages import AssumeTerm, SaveSlot, SetMirror, SlotRole, ToServer
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
from gyrostat.ps.server.file_thread import FileThread
from gyrostat.ps.server.load import LoadMeter
from gyrostat.ps.wire.codec import ExchangeCodec
from gyrostat.ps.wire.connection import PsConnection, PsListener, connect
from gyrostat.ps.wire.control import (
    DigestSlot,
    EndServer,
    LinkLost,
    OpenStore,
    ServerAddresses,
    ServerLoad,
    ServerProblem,
    ServerReady,
    SlotDigest,
    SlotNotSaved,
    control_numbers,
    send_control,
    to_server,
)
from gyrostat.ps.wire.frames import FrameKind, MalformedFrame, PsFrame
from gyrostat.ps.wire.handshake import PeerIdentity, PeerRole

_SHRINK_ROWS = 4096


class ServerProcessSettings(msgspec.Struct, frozen=True):
    name: str
    leader: tuple[str, int]
    token: bytes
    host: str = "127.0.0.1"
    """The address at which it listens."""
    load_seconds: float = 0.5
    """How often it tells the leader what it has done."""


class _Caller(msgspec.Struct, frozen=True):
    """Who gets the reply to an exchange."""

    connection: PsConnection
    kind: FrameKind
    number: int


class ServerProcess:
    """The process. Its store exists when the leader has sent `OpenStore`."""

    def __init__(self, settings: ServerProcessSettings) -> None:
        self._settings = settings
        self._selector = selectors.DefaultSelector()
        self._files = FileThread()
        self._selector.register(self._files, selectors.EVENT_READ, self._files.take_done)
        self._listener = PsListener(
            self._selector, settings.host, settings.token, on_frame=self._requested, on_lost=_ignore
        )
        self._identity = PeerIdentity(PeerRole.SERVER, settings.name)
        self._leader = connect(
            self._selector,
            settings.leader,
            settings.token,
            self._identity,
            on_frame=self._instructed,
            on_lost=self._orphaned,
        )
        self._addresses: dict[str, tuple[str, int]] = {}
        self._peers: dict[str, PsConnection] = {}
        self._opened: _Opened | None = None
        self._later: deque[SaveSlot | SetMirror | DigestSlot] = deque()
        self._ended = False

    def run(self) -> None:
        """Serve until the end."""
        send_control(self._leader, ServerReady(self._listener.address, os.getpid()))
        try:
            self._loop()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            send_control(self._leader, ServerProblem(reason, fatal=False))
            raise
        self._files.close()

    def _loop(self) -> None:
        report_at = time.monotonic() + self._settings.load_seconds
        more = False
        while not self._ended:
            wait = 0.0 if more else max(0.0, report_at - time.monotonic())
            for key, _ in self._selector.select(wait):
                key.data()
            more = self._background()
            if time.monotonic() >= report_at:
                opened = self._opened
                load = ServerLoad() if opened is None else opened.meter.to_load(opened.server)
                send_control(self._leader, load)
                report_at = time.monotonic() + self._settings.load_seconds

    # Requests of workers, and what other servers send.

    def _requested(self, connection: PsConnection, frame: PsFrame) -> None:
        opened = self._opened
        if opened is None:
            raise MalformedFrame(f"a {frame.kind.name} frame before the job is open")
        assert connection.peer is not None
        from_server = connection.peer.role is PeerRole.SERVER
        began = time.perf_counter()
        match frame.kind:
            case FrameKind.EXCHANGE:
                number, exchange = opened.codec.decode_exchange(frame)
                self._act(opened.server.request(_Caller(connection, FrameKind.REPLY, number), exchange))
                opened.meter.served(exchange, time.perf_counter() - began)
            case FrameKind.FORWARD if from_server:
                number, exchange = opened.codec.decode_exchange(frame)
                self._act(opened.server.mirror(_Caller(connection, FrameKind.FORWARDED, number), exchange))
                opened.meter.served(exchange, time.perf_counter() - began)
            case FrameKind.COPY if from_server:
                copy = opened.codec.decode_copy(frame)
                try:
                    self._act(opened.server.receive(copy))
                except MalformedState as error:
                    raise MalformedFrame(str(error)) from error
            case _:
                raise MalformedFrame(f"a {frame.kind.name} frame from a {connection.peer.role}")

    def _answered_by_mirror(self, _: PsConnection, frame: PsFrame) -> None:
        assert self._opened is not None
        if frame.kind is not FrameKind.FORWARDED:
            raise MalformedFrame(f"a {frame.kind.name} frame from a mirror")
        forward, reply = self._opened.codec.decode_reply(frame)
        self._act(self._opened.server.mirrored(forward, reply.status))

    # The leader.

    def _instructed(self, _: PsConnection, frame: PsFrame) -> None:
        message = to_server(control_numbers(frame))
        match message:
            case OpenStore():
                self._opened = _Opened(message, self._settings.name)
            case ServerAddresses(addresses=addresses):
                self._addresses = addresses
                for name in self._peers.keys() - addresses.keys():
                    self._peer_lost(name)
                for name in addresses.keys() - {self._settings.name}:
                    self._peer(name)  # now, and not while a slot is frozen
            case DigestSlot():
                self._later.append(message)
            case EndServer():
                self._ended = True
            case _:
                self._control(message)

    def _control(self, message: ToServer) -> None:
        assert self._opened is not None
        match message:
            case SaveSlot():
                self._later.append(message)
                return
            case SetMirror() if message.mirror is not None:
                self._later.append(message)
                return
            case SetMirror():
                self._later = deque(
                    each
                    for each in self._later
                    if not (isinstance(each, SetMirror) and each.slot == message.slot)
                )
            case AssumeTerm():
                self._later.clear()
        self._act(self._opened.server.control(message))

    def _orphaned(self, _: PsConnection, reason: str) -> None:
        self._ended = True

    # What can wait.

    def _background(self) -> bool:
        """One piece of work. Returns whether there is more that can be done now."""
        if self._opened is None:
            return False
        if self._later:
            peers_busy = any(peer.busy for peer in self._peers.values())
            if self._files.pending or peers_busy:
                return False
            message = self._later.popleft()
            if isinstance(message, DigestSlot):
                self._digest(self._opened.server, message)
            else:
                self._act(self._opened.server.control(message))
            return True
        return self._opened.server.store.shrink(_SHRINK_ROWS) > 0

    def _digest(self, server: SlotServer, message: DigestSlot) -> None:
        slot = np.array([message.slot])
        if server.roles.get(message.slot) is SlotRole.OWNER and server.store.commit(slot, message.committed):
            digest = server.store.to_state(message.slot).content_digest
            send_control(self._leader, SlotDigest(message.number, message.slot, digest))

    # Actions.

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            self._act_once(action)

    def _act_once(self, action: Action) -> None:
        assert self._opened is not None
        codec = self._opened.codec
        match action:
            case AnswerCaller(caller=caller, reply=reply):
                assert isinstance(caller, _Caller)
                self._answer(caller, reply)
            case ToCoordinator(message=message):
                send_control(self._leader, message)
            case SendCopy(server=name, copy=copy):
                peer = self._peer(name)
                if peer is not None:
                    peer.send(FrameKind.COPY, *codec.encode_copy(copy))
            case ForwardUpdate(server=name, forward=forward, exchange=exchange):
                peer = self._peer(name)
                if peer is None:
                    self._act(self._opened.server.mirror_lost(name))
                else:
                    peer.send(FrameKind.FORWARD, *codec.encode_exchange(forward, exchange))
            case WriteSlot():
                self._files.post(lambda: self._write(action))
            case ReadSlots():
                self._files.post(lambda: self._read(action))

    def _answer(self, caller: _Caller, reply: ExchangeReply) -> None:
        assert self._opened is not None
        caller.connection.send(caller.kind, *self._opened.codec.encode_reply(caller.number, reply))

    def _peer(self, name: str) -> PsConnection | None:
        known = self._peers.get(name)
        if known is not None:
            return known
        if name not in self._addresses:
            return None

        def lost(connection: PsConnection, reason: str) -> None:
            if self._peers.get(name) is connection:
                self._peer_lost(name)

        try:
            made = connect(
                self._selector,
                self._addresses[name],
                self._settings.token,
                self._identity,
                on_frame=self._answered_by_mirror,
                on_lost=lost,
            )
        except OSError:
            return None
        self._peers[name] = made
        return made

    def _peer_lost(self, name: str) -> None:
        self._peers.pop(name).close()
        if self._opened is not None:
            self._act(self._opened.server.mirror_lost(name))
        send_control(self._leader, LinkLost(name))

    # Files, in their thread; what these return is called in the loop.

    def _write(self, action: WriteSlot) -> Callable[[], None]:
        opened = self._opened
        assert opened is not None
        checkpoint, slot = action.checkpoint, action.state.slot
        file = slot_file_name(checkpoint, slot, self._settings.name)
        try:
            write_slot(opened.directory / file, action.state)
        except OSError as error:
            failed = SlotNotSaved(checkpoint, f"slot {slot}, in {opened.directory}: {error.strerror}")
            return lambda: send_control(self._leader, failed)
        return lambda: self._act(opened.server.written(checkpoint, slot, file))

    def _read(self, action: ReadSlots) -> Callable[[], None]:
        opened = self._opened
        assert opened is not None
        try:
            states = [read_slot(opened.directory / file) for file in action.files.values()]
        except (OSError, MalformedState) as error:
            problem = ServerProblem(f"a file of a checkpoint in {opened.directory} cannot be read: {error}")
            return lambda: send_control(self._leader, problem)
        return lambda: self._act(opened.server.loaded(action.term, states))


class _Opened:
    """What exists once the job is open."""

    def __init__(self, message: OpenStore, name: str) -> None:
        self.server = SlotServer(message.spec)
        if message.spec.record:
            self.server.record = UpdateRecorder(Path(message.directory), name).write
        self.codec = ExchangeCodec(message.spec, message.batches)
        self.meter = LoadMeter(message.spec.slots)
        self.directory = Path(message.directory)


def _ignore(connection: PsConnection, reason: str) -> None:
    """A worker has gone: its next requests come from elsewhere."""
