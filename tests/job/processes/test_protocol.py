"""Messages survive any way a socket may cut them; anything else is refused."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyrostat.core.job import (
    Assignment,
    CheckpointPolicy,
    GradientBackend,
    Probe,
    ReductionChoice,
    ReductionOrder,
    TrainingOptions,
)
from gyrostat.core.placement import Placement
from gyrostat.job.processes import channel, protocol
from gyrostat.job.processes.channel import Channel, Frames, ProtocolError
from gyrostat.job.processes.protocol import (
    Exited,
    Failed,
    FailureKind,
    Fork,
    Forked,
    FromWorker,
    Hello,
    Program,
    Signal,
    Started,
    StepReport,
    StepReports,
    ToForkServer,
    WorkerSpec,
)

SPEC = WorkerSpec(
    assignment=Assignment(
        placement=Placement.from_counts([3, 1]),
        worker=1,
        store="/tmp/store",
        options=TrainingOptions(
            checkpoint=CheckpointPolicy(directory="/tmp/c", every=5), probe=Probe(every=2, tensors=True)
        ),
    ),
    program=Program(name="train.py", args=("--lr", "0.1")),
    cwd="/tmp",
    env={"RANK": "1", "ÄÖ": "ß"},
)
FROM_WORKER = [
    Hello(protocol.VERSION, 17),
    Started(3, "/tmp/c/3", ["4 is cut off"], 1.5),
    Started(
        0,
        None,
        [],
        1.5,
        4,
        ReductionChoice(order=ReductionOrder.TREE, carrier=GradientBackend.NCCL, reason="so"),
    ),
    StepReports([StepReport(4, 0, 0.25, 64, 2.5), StepReport(5, 0, None, 64, 2.75)]),
    Failed(FailureKind.PEER_LOST, "gone", "Traceback …"),
]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    with a, b:
        yield a, b


@given(cuts=st.lists(st.integers(0, 400)))
def test_frames_survive_any_cutting(cuts: list[int]) -> None:
    data = b"".join(channel.frame(message) for message in FROM_WORKER)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    frames: Frames[FromWorker] = Frames(FromWorker)
    arrived = [message for a, b in itertools.pairwise(edges) for message in frames.feed(data[a:b])]
    assert arrived == FROM_WORKER


def test_a_workers_spec_arrives_as_it_was_sent() -> None:
    frames: Frames[ToForkServer] = Frames(ToForkServer)
    assert list(frames.feed(channel.frame(Fork(SPEC)))) == [Fork(SPEC)]


def test_a_frame_that_announces_too_much_is_refused_before_it_is_read() -> None:
    frames: Frames[FromWorker] = Frames(FromWorker)
    with pytest.raises(ProtocolError, match=f"announces {channel.MAX_FRAME + 1} bytes"):
        list(frames.feed((channel.MAX_FRAME + 1).to_bytes(4, "big")))


def test_a_message_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        channel.frame(Failed(FailureKind.SCRIPT, "x", "x" * channel.MAX_FRAME))


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1garbage",
        msgspec.msgpack.encode({"type": "Surprise"}),
        msgspec.msgpack.encode({"type": "Exited", "pid": 1, "code": "zero"}),
        msgspec.msgpack.encode(Signal(1, 9)),
    ],
    ids=["no msgpack", "unknown message", "wrong type", "wrong direction"],
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    frames: Frames[msgspec.Struct] = Frames(protocol.FromForkServer)
    with pytest.raises(ProtocolError, match="is not a known message"):
        list(frames.feed(len(body).to_bytes(4, "big") + body))


def test_a_field_with_a_default_may_be_added_later() -> None:
    body = msgspec.msgpack.encode({"type": "Exited", "pid": 1, "code": 0, "node": "n1"})
    frames: Frames[msgspec.Struct] = Frames(protocol.FromForkServer)
    assert list(frames.feed(len(body).to_bytes(4, "big") + body)) == [Exited(1, 0)]


def test_files_travel_beside_messages(pair: tuple[socket.socket, socket.socket]) -> None:
    sender: Channel[Hello] = Channel(pair[0], Hello)
    receiver: Channel[ToForkServer] = Channel(pair[1], ToForkServer)
    reader, writer = os.pipe()
    sender.send(Signal(1, 2), [writer])
    os.close(writer)
    assert receiver.receive() == [Signal(1, 2)]
    (received,) = receiver.files
    assert not os.get_inheritable(received)
    os.write(received, b"through")
    receiver.close()  # closes what nobody took
    assert os.read(reader, 100) == b"through"
    assert os.read(reader, 100) == b""
    os.close(reader)


def test_draining_reads_all_that_was_sent_and_notices_the_end(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    sender: Channel[Hello] = Channel(pair[0], Hello)
    receiver: Channel[protocol.FromForkServer] = Channel(pair[1], protocol.FromForkServer)
    sender.send(Forked(5))
    sender.send(Exited(5, 0))
    assert list(receiver.drain()) == [Forked(5), Exited(5, 0)]
    assert not receiver.closed
    sender.close()
    assert list(receiver.drain()) == []
    assert receiver.closed


def test_another_version_is_refused() -> None:
    with pytest.raises(ProtocolError, match="uses version 99 of the protocol"):
        channel.check_greeting(Hello(99, 1))
    with pytest.raises(ProtocolError, match="expected a Hello first, got Forked"):
        channel.check_greeting(Forked(1))
