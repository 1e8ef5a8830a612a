"""The connection to a data worker: frames on a Unix socket, tensors as file descriptors of shared memory.

Both ends are processes of ours, one forked from the other, and the socket has no name: everything unpickled here was pickled by
our own child, as between torch's DataLoader and its workers. Nothing here reads from a network.

Unlike torch's queues there is one socket per data worker and no lock: a process that is killed in the middle of a frame breaks
only its own socket. A tensor that `default_collate` has put into shared memory is not copied; another large one is copied into
shared memory; small ones are sent in the frame. A frame that is longer than the socket's buffer is put into shared memory as a
whole, so that a data worker does not wait for its reader before it begins the next batch.
"""

from __future__ import annotations

import array
import contextlib
import io
import os
import pickle
import socket
import struct
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from gyrostat.data import torch_internals

_HEADER = struct.Struct(
    "<QIB"
)  # bytes of the pickle, file descriptors, whether the first one holds the pickle
_IN_FRAME = 16 << 10
"""Tensors of at most this size, in bytes, are sent in the frame."""
_FRAME = 48 << 10
"""Frames longer than this, in bytes, are put into shared memory."""
_MAX_FILES = 200  # Linux allows 253 in one message
_INT = array.array("i").itemsize


class BatchWire:
    """One end of the socket between a worker and one of its data workers."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection, also for processes that inherited this end by being forked."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def send(self, message: Any) -> int:
        """Send a message; returns how many bytes went into the socket."""
        frame = pack(message)
        self.post(frame)
        return len(frame.data)

    def post(self, frame: Frame) -> None:
        """Send a message that is packed."""
        sent = socket.send_fds(self._socket, [frame.data], frame.files) if frame.files else 0
        self._socket.sendall(memoryview(frame.data)[sent:])

    def receive(self) -> Any:
        """The next message; EOFError if the other end is gone."""
        header, files = self._receive_header()
        try:
            length, count, outside = _HEADER.unpack(header)
            if len(files) != count:
                raise RuntimeError(
                    f"{count - len(files)} tensors of a batch could not be received: this process has too many open files; "
                    "raise the limit (ulimit -n), or let collate_fn make fewer and larger tensors"
                )
            if outside:
                storage = torch_internals.storage_from_file(files[0], length)
                pickled: Any = torch_internals.tensor_on(storage, torch.uint8, 0, (length,), (1,)).numpy()
            else:
                pickled = self._receive_bytes(length)
            return _Unpickler(io.BytesIO(pickled), files[outside:]).load()
        finally:
            for file in files:
                os.close(file)

    def _receive_header(self) -> tuple[bytes, list[int]]:
        data, ancillary, _, _ = self._socket.recvmsg(_HEADER.size, socket.CMSG_SPACE((_MAX_FILES + 1) * _INT))
        files = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                files.frombytes(payload[: len(payload) - len(payload) % _INT])
        if len(data) < _HEADER.size:
            data += self._receive_bytes(_HEADER.size - len(data)) if data else b""
        if not data:
            raise EOFError
        return data, list(files)

    def _receive_bytes(self, count: int) -> bytearray:
        data = bytearray(count)
        view, got = memoryview(data), 0
        while got < count:
            read = self._socket.recv_into(view[got:])
            if read == 0:
                raise EOFError
            got += read
        return data


@dataclass(frozen=True)
class Frame:
    """A packed message."""

    data: bytes | bytearray
    files: list[int]
    storages: list[Any]
    """Owners of the file descriptors; kept alive until the frame is sent."""


def pack(message: Any) -> Frame:
    """Pickle a message, with its tensors in shared memory. Later changes of the message are not sent."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(message)
    pickled, storages = bytearray(buffer.getbuffer()), pickler.storages
    outside = len(pickled) > _FRAME
    if outside:
        memory = torch_internals.shared_storage(len(pickled))
        torch_internals.tensor_on(memory, torch.uint8, 0, (len(pickled),), (1,)).copy_(
            torch.frombuffer(pickled, dtype=torch.uint8)
        )
        storages = [memory, *storages]
    files = [torch_internals.storage_file(storage)[0] for storage in storages]
    header = _HEADER.pack(len(pickled), len(files), outside)
    return Frame(header if outside else header + pickled, files, storages)


class _Pickler(ForkingPickler):
    """Pickles plain tensors as references to shared memory, everything else as torch's queues do."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self.storages: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._by_file = torch_internals.share_by_file()

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or not _is_plain(value):
            return NotImplemented
        storage = value.untyped_storage()
        if storage.is_shared() and self._by_file and self._has_room(storage):
            place = (value.storage_offset(), value.shape, value.stride())
            return _rebuild, (_File(self._number(storage)), value.dtype, *place)
        span = _span(value)
        size = span * value.element_size()
        if size <= _IN_FRAME or not self._has_room():
            raw = value.as_strided((span,), (1,)).view(torch.uint8).numpy().tobytes() if size else b""
            return _rebuild, (raw, value.dtype, 0, value.shape, value.stride())
        copy = torch_internals.shared_storage(size)
        torch_internals.tensor_on(copy, value.dtype, 0, (span,), (1,)).copy_(value.as_strided((span,), (1,)))
        return _rebuild, (_File(self._number(copy)), value.dtype, 0, value.shape, value.stride())

    def _has_room(self, storage: Any = None) -> bool:
        return len(self.storages) < _MAX_FILES or (
            storage is not None and storage.data_ptr() in self._numbers
        )

    def _number(self, storage: Any) -> int:
        if storage.data_ptr() not in self._numbers:
            self._numbers[storage.data_ptr()] = len(self.storages)
            self.storages.append(storage)
        return self._numbers[storage.data_ptr()]

    def persistent_id(self, value: Any) -> Any:
        if type(value) is _File:
            return value.number, torch_internals.storage_file(self.storages[value.number])[1]
        return None


class _File:
    """Stands for a storage that is sent as a file descriptor."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, files: list[int]) -> None:
        super().__init__(buffer)
        self._files = files
        self._storages: dict[int, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        number, size = pid
        if number not in self._storages:
            self._storages[number] = torch_internals.storage_from_file(self._files[number], size)
        return self._storages[number]


def _rebuild(memory: Any, dtype: torch.dtype, offset: int, size: Any, stride: Any) -> torch.Tensor:
    if isinstance(memory, bytes):
        if not memory:
            return torch.empty_strided(size, stride, dtype=dtype)
        return torch.frombuffer(bytearray(memory), dtype=dtype).as_strided(size, stride)
    return torch_internals.tensor_on(memory, dtype, offset, size, stride)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_nested
    )


def _span(tensor: torch.Tensor) -> int:
    """The number of elements from the first to the last: what is copied to keep the strides."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
