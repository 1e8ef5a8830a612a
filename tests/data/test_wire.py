"""What goes through a wire comes out equal, tensors with their strides, and large ones without a copy."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from gyrostat.data import torch_internals
from gyrostat.data.wire import BatchWire


@pytest.fixture
def wires() -> Iterator[tuple[BatchWire, BatchWire]]:
    one, other = map(BatchWire, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def through(wires: tuple[BatchWire, BatchWire], message: Any) -> Any:
    sender = threading.Thread(target=wires[0].send, args=(message,))
    sender.start()
    received = wires[1].receive()
    sender.join()
    return received


class Point(NamedTuple):
    x: torch.Tensor
    y: str


TENSORS = {
    "small": torch.arange(5),
    "large": torch.arange(100_000.0),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "booleans": torch.tensor([True, False]),
    "complex": torch.randn(4, dtype=torch.complex64),
    "channels last": torch.randn(2, 3, 40, 50).to(memory_format=torch.channels_last),
    "expanded": torch.arange(3.0).expand(2, 3),
    "with gaps": torch.arange(60_000.0).view(300, 200)[:, ::7],
    "transposed": torch.randn(200, 300).t(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(wires: tuple[BatchWire, BatchWire], name: str) -> None:
    sent = TENSORS[name]
    received = through(wires, {"it": [sent]})["it"][0]
    assert received.dtype == sent.dtype
    assert received.stride() == sent.stride()
    assert torch.equal(received, sent)


def test_everything_else(wires: tuple[BatchWire, BatchWire]) -> None:
    text, numbers = b"x" * 200_000, np.arange(90_000)
    received = through(wires, (Point(torch.ones(2), "é"), {"a": text, "b": numbers}, None, 1.5, {1, 2}))
    assert type(received[0]) is Point
    assert received[1]["a"] == text
    assert np.array_equal(received[1]["b"], numbers)
    assert received[2:] == (None, 1.5, {1, 2})


def test_more_tensors_than_a_message_takes_descriptors(wires: tuple[BatchWire, BatchWire]) -> None:
    sent = [torch.full((5_000,), float(number)) for number in range(300)]
    received = through(wires, sent)
    assert all(map(torch.equal, sent, received))


def test_shared_memory_is_not_copied_and_stays_one(wires: tuple[BatchWire, BatchWire]) -> None:
    storage = torch_internals.shared_storage(400_000)
    whole = torch_internals.tensor_on(storage, torch.float32, 0, (100_000,), (1,))
    whole.fill_(1)
    first, second = through(wires, (whole, whole[50:60]))
    whole[55] = 7
    assert first[55] == 7
    assert second[5] == 7


def test_a_collated_batch(wires: tuple[BatchWire, BatchWire], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", None)  # restored after the test
    torch_internals.set_worker_info(0, 1, 0, None)
    batch = default_collate([(torch.randn(3, 60, 60), number) for number in range(4)])
    assert batch[0].is_shared()
    images, numbers = through(wires, batch)
    assert torch.equal(images, batch[0])
    assert numbers.tolist() == [0, 1, 2, 3]


def test_the_other_end_is_gone(wires: tuple[BatchWire, BatchWire]) -> None:
    wires[0].close()
    with pytest.raises(EOFError):
        wires[1].receive()
