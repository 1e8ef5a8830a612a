"""Event files: read back with a reader that knows nothing of the writer."""

from __future__ import annotations

import math
import resource
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyrostat.local.tensorboard import EventFile, crc32c, event, masked_crc


@pytest.mark.parametrize(
    ("data", "crc"),
    [  # RFC 3720, B.4, and the usual check value
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"", 0),
    ],
)
def test_checksums_are_crc32c(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc


def test_what_is_logged_can_be_read(tmp_path: Path) -> None:
    times = iter([1000.0, 1001.0, 1002.0, 1003.0, 1004.0, 1005.0])
    file = EventFile(tmp_path / "tb", clock=lambda: next(times))
    file.began(299)
    assert not (tmp_path / "tb").exists()
    file.scalars(300, {"loss": 0.5, "accuracy": 0.25})
    file.scalars(301, {"größe": -2.0})
    file.began(300)
    (path,) = (tmp_path / "tb").iterdir()
    assert path.name.startswith("events.out.tfevents.0000001000.")
    assert [read(message) for message in records(path.read_bytes())] == [
        {1: 1000.0, 2: 0, 3: b"brain.Event:2"},
        {1: 1001.0, 2: 300, 7: {1: 1}},  # from here on, what earlier attempts said is void
        {1: 1002.0, 2: 300, 5: {"loss": 0.5, "accuracy": 0.25}},
        {1: 1003.0, 2: 301, 5: {"größe": -2.0}},
        {1: 1004.0, 2: 301, 7: {1: 1}},
    ]
    file.close()


def test_a_disk_that_takes_nothing_costs_records_only(tmp_path: Path) -> None:
    (tmp_path / "tb").write_text("in the way")
    file = EventFile(tmp_path / "tb")
    file.scalars(1, {"loss": 1.0})
    file.close()


def test_a_record_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file.scalars(1, {"loss": 1.0})
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, limits[1]))
        file.scalars(2, {"loss": 2.0})
        assert path.read_bytes() == whole
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    file.scalars(3, {"loss": 3.0})
    file.close()
    assert [read(message)[2] for message in records(path.read_bytes())][2:] == [1, 3]


@given(
    step=st.integers(0, 2**63 - 1),
    scalars=st.dictionaries(st.text(min_size=1, max_size=20), st.floats(), min_size=1, max_size=4),
)
def test_any_number_can_be_logged(step: int, scalars: dict[str, float]) -> None:
    found = read(event(1.5, step, scalars=scalars))
    assert found[2] == step
    assert list(found[5]) == list(scalars)
    for tag, value in scalars.items():
        assert found[5][tag] == single(value) or (math.isnan(value) and math.isnan(found[5][tag]))


def single(value: float) -> float:
    try:
        packed: float = struct.unpack("<f", struct.pack("<f", value))[0]
        return packed
    except OverflowError:
        return math.copysign(math.inf, value)


def records(content: bytes) -> Iterator[bytes]:
    while content:
        (length, crc_of_length) = struct.unpack_from("<QI", content)
        assert masked_crc(content[:8]) == crc_of_length
        message, content = content[12 : 12 + length], content[12 + length :]
        assert masked_crc(message) == struct.unpack_from("<I", content)[0]
        content = content[4:]
        yield message


def read(message: bytes) -> dict[int, Any]:
    """The fields of a `tensorflow.Event`."""
    found = dict(fields(message))
    if 5 in found:
        values = [dict(fields(value)) for _, value in fields(found[5])]
        found[5] = {value[1].decode(): value[2] for value in values}
    if 7 in found:
        found[7] = dict(fields(found[7]))
    return found


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and content of each field, by the rules of protocol buffers."""
    while message:
        key, message = varint(message)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, message = varint(message)
            yield number, value
        elif kind == 1:
            yield number, struct.unpack_from("<d", message)[0]
            message = message[8:]
        elif kind == 2:
            length, message = varint(message)
            yield number, message[:length]
            message = message[length:]
        else:
            assert kind == 5
            yield number, struct.unpack_from("<f", message)[0]
            message = message[4:]


def varint(message: bytes) -> tuple[int, bytes]:
    value = shift = 0
    for position, byte in enumerate(message):
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, message[position + 1 :]
    raise AssertionError("cut off")
