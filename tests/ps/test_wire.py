"""Frames: exchanges survive the way there and back; malformed and hostile ones cost their connection, and nothing else."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyrostat.ps.protocol.exchange import BatchRange, Exchange, ExchangeReply, ExchangeStatus
from gyrostat.ps.protocol.messages import SlotRole
from gyrostat.ps.protocol.slot_server import SlotCopy
from gyrostat.ps.store.hashing import keys_of
from gyrostat.ps.store.optimizers import SGD
from gyrostat.ps.store.slot_store import SlotStore
from gyrostat.ps.store.spec import DenseSpec, StoreSpec, TableSpec
from gyrostat.ps.store.update import Update
from gyrostat.ps.wire.codec import Encoded, ExchangeCodec
from gyrostat.ps.wire.connection import ConnectionState, PsConnection, PsListener, connect
from gyrostat.ps.wire.frames import FrameKind, FrameReader, MalformedFrame, PsFrame, frame_parts
from gyrostat.ps.wire.handshake import PeerIdentity, PeerRole, new_token
from tests.ps.live import CountingJob, LiveJob, check_counts, train
from tests.ps.live import settings as live_settings

SLOTS = 4
SPEC = StoreSpec(
    slots=SLOTS,
    tables=(
        TableSpec(name="items", width=3, optimizer=SGD(lr=1.0)),
        TableSpec(name="words", width=1, optimizer=SGD(lr=1.0)),
    ),
    dense=(DenseSpec(name="model", size=10, optimizer=SGD(lr=1.0)),),
)
CODEC = ExchangeCodec(SPEC, batches=100)
JOB = CountingJob()
_IMPOSSIBLE_JOB = {
    "type": "OpenJob",
    "number": 1,
    "spec": {"slots": 3},
    "data": {"samples": 1, "batch_size": 1, "shard_size": 1},
}


def _exchange() -> Exchange:
    slots = np.array([0, 2, 3])
    keys = np.sort(keys_of(np.arange(5), "items"))
    rows = np.arange(15, dtype=np.float32).reshape(5, 3)
    dense = {0: np.ones((3, 3), np.float32)}
    push = Update(2, 7, slots, {0: (keys, rows), 1: (keys[:3], rows[:3, :1].copy())}, dense, b"origin")
    return Exchange(4, slots, push, {1: keys}, (0,), dense, BatchRange(1, 2, 3), 9)


def _frame(kind: FrameKind, encoded: Encoded) -> bytes:
    return b"".join(frame_parts(kind, *encoded))


def _read(data: bytes, most: int = 1 << 20) -> PsFrame | None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        ours.setblocking(False)
        return FrameReader(most).receive(ours)


def test_an_exchange_and_its_reply_survive() -> None:
    sent = _exchange()
    frame = _read(_frame(FrameKind.EXCHANGE, CODEC.encode_exchange(77, sent)))
    assert frame is not None
    number, got = CODEC.decode_exchange(frame)
    assert number == 77
    assert got.push is not None
    assert sent.push is not None
    assert (got.term, got.which_applied, got.committed, got.pull_dense) == (4, BatchRange(1, 2, 3), 9, (0,))
    assert (got.push.epoch, got.push.batch, got.push.origin) == (2, 7, b"origin")
    for mine, theirs in zip(sent.push.rows.values(), got.push.rows.values(), strict=True):
        assert (mine[0] == theirs[0]).all()
        assert (mine[1] == theirs[1]).all()
        assert theirs[1].flags.writeable  # optimizers may overwrite gradients
    assert (got.slots == sent.slots).all()
    assert (got.pull_rows[1] == sent.pull_rows[1]).all()
    assert (got.begin_dense[0] == sent.begin_dense[0]).all()
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    reply = ExchangeReply(
        ExchangeStatus.DONE, {0: rows}, {0: np.ones((2, 3), np.float32)}, np.array([True, False]), 5
    )
    frame = _read(_frame(FrameKind.REPLY, CODEC.encode_reply(3, reply)))
    assert frame is not None
    number, back = CODEC.decode_reply(frame)
    assert (number, back.status, back.duplicates) == (3, ExchangeStatus.DONE, 5)
    assert (back.rows[0] == rows).all()
    assert back.applied.tolist() == [True, False]


def test_a_slot_survives() -> None:
    store = SlotStore(SPEC)
    store.own([1])
    copy = SlotCopy(SlotRole.INCOMING, 5, 2, store.to_state(1))
    frame = _read(_frame(FrameKind.COPY, CODEC.encode_copy(copy)))
    assert frame is not None
    got = CODEC.decode_copy(frame)
    assert (got.role, got.number, got.term, got.state.digest) == (
        SlotRole.INCOMING,
        5,
        2,
        copy.state.digest,
    )


@settings(max_examples=400)
@given(st.data())
def test_damaged_exchanges_are_decoded_or_malformed(data: st.DataObject) -> None:
    whole = bytearray(_frame(FrameKind.EXCHANGE, CODEC.encode_exchange(1, _exchange())))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MalformedFrame, ValueError):
        frame = _read(bytes(whole))
        if frame is not None:
            for decode in (CODEC.decode_exchange, CODEC.decode_reply, CODEC.decode_copy):
                with contextlib.suppress(MalformedFrame, ValueError):
                    decode(frame)


@pytest.mark.parametrize(
    ("numbers", "arrays"), [(1 << 31, 0), (0, 1 << 62), (0, (1 << 20) + 1)], ids=["numbers", "huge", "over"]
)
def test_sizes_are_refused_before_memory_is_taken(numbers: int, arrays: int) -> None:
    header = struct.pack("<4sHHIIQ", b"gps1", FrameKind.EXCHANGE, 0, numbers, 0, arrays)
    with pytest.raises(MalformedFrame, match="at most"):
        _read(header)


class Ends:
    """A listener and what it heard, in one selector."""

    def __init__(self, token: bytes) -> None:
        self.selector = selectors.DefaultSelector()
        self.heard: list[bytes] = []
        self.lost: list[str] = []
        self.listener = PsListener(
            self.selector, "127.0.0.1", token, on_frame=self._frame, on_lost=self._lost
        )

    def connect(self, token: bytes) -> PsConnection:
        identity = PeerIdentity(PeerRole.WORKER, "w")
        return connect(
            self.selector,
            self.listener.address,
            token,
            identity,
            on_frame=lambda *_: None,
            on_lost=self._lost,
        )

    def turn(self) -> None:
        for key, _ in self.selector.select(5.0):
            key.data()

    def _frame(self, connection: PsConnection, frame: PsFrame) -> None:
        self.heard.append(bytes(frame.numbers))

    def _lost(self, connection: PsConnection, reason: str) -> None:
        self.lost.append(reason)

    def close(self) -> None:
        self.listener.close()
        self.selector.close()


def test_only_those_who_know_the_token_are_heard() -> None:
    token = new_token()
    ends = Ends(token)
    friend, stranger = ends.connect(token), ends.connect(new_token())
    friend.send(FrameKind.CONTROL, b"hello")
    stranger.send(FrameKind.CONTROL, b"let me in")
    while not (ends.heard and stranger.closed):
        ends.turn()
    assert ends.heard == [b"hello"]
    assert friend.state is ConnectionState.OPEN
    friend.close()
    ends.close()


def test_strangers_without_a_handshake_do_not_pile_up() -> None:
    ends = Ends(new_token())
    strangers = [socket.create_connection(ends.listener.address) for _ in range(100)]
    while ends.selector.select(0):
        ends.turn()
    closed = 0
    for stranger in strangers:
        stranger.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while data := stranger.recv(4096):
                assert data
            closed += 1
        stranger.close()
    assert closed == 100 - 64
    ends.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_hostile_bytes_cost_the_connection_and_nothing_else(hostile: Hostile, data: st.DataObject) -> None:
    """Of an authenticated peer and of a stranger, to a server and to the leader, while a worker trains."""
    kind = data.draw(st.sampled_from(list(FrameKind)))
    payload = data.draw(
        st.one_of(
            st.binary(max_size=300),
            st.builds(
                lambda numbers, arrays: _frame(kind, (numbers, [memoryview(arrays)])),
                st.binary(max_size=80),
                st.binary(max_size=80),
            ),
            st.just(struct.pack("<4sHHIIQ", b"gps1", kind, 0, 10, 0, 1 << 62)),
            st.just(_frame(FrameKind.CONTROL, (msgspec.msgpack.encode(_IMPOSSIBLE_JOB), []))),
        )
    )
    role = data.draw(st.sampled_from(list(PeerRole)))
    address = data.draw(st.sampled_from(hostile.addresses))
    hostile.attack(address, role, payload, known=data.draw(st.booleans()))
    hostile.step()


class Hostile:
    def __init__(self, directory: Path) -> None:
        self.job = LiveJob(live_settings(directory, servers=2)).__enter__()
        self.servers = self.job.connect(JOB)
        self.shard = self.servers.next_shard(0)
        self.addresses = [
            self.job.leader.address,
            *self.job.call(lambda: [record.address for record in self.job.leader._fleet.records.values()]),
        ]
        self.memory = self._memory()
        self.sent = 0

    def attack(self, address: tuple[str, int], role: PeerRole, payload: bytes, *, known: bool) -> None:
        selector = selectors.DefaultSelector()
        over: list[str] = []
        if known:
            made = connect(
                selector,
                address,
                self.job.leader.token,
                PeerIdentity(role, f"hostile-{self.sent}"),
                on_frame=lambda *_: None,
                on_lost=lambda connection, reason: over.append(reason),
            )
            while made.state is not ConnectionState.OPEN:
                for key, _ in selector.select(5.0):
                    key.data()
            with contextlib.suppress(OSError):
                made._socket.send(payload)
            made.close()
        else:
            with socket.create_connection(address) as stranger, contextlib.suppress(OSError):
                stranger.sendall(payload)
        selector.close()
        self.sent += 1

    def step(self) -> None:
        """The job goes on."""
        self.servers.exchange(None, JOB.pull())

    def _memory(self) -> int:
        pids = [pid for server in self.job.status().servers for pid in server.pids]
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in pids)

    def finish(self) -> None:
        grown = self._memory() - self.memory
        print(f"{self.sent} attacks; servers have grown by {grown / 1e6:.1f} MB")
        assert grown < 30e6
        self.servers.close()
        other = self.job.connect(JOB, "other")
        train(other, JOB, lambda: 1)
        check_counts(other, JOB, 1)
        assert all(server.pids for server in self.job.status().servers)


@pytest.fixture
def hostile(tmp_path: Path):  # type: ignore[no-untyped-def]
    made = Hostile(tmp_path)
    try:
        yield made
        made.finish()
    finally:
        made.job.__exit__(None, None, None)
