"""Memory that workers of one machine share: unnamed files, mapped by their owner and by its peers.

A `SharedRegion` is passed to a peer through a `PeerLink` as a file descriptor when the peer first needs it. It has no name
in the file system, so a worker that is killed leaves nothing behind. `RegionExchange` keeps track, for one peer, of the
regions that each side has mapped.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import weakref
from collections.abc import Iterable

import msgspec
import torch

from gyrostat.engine.transport.peer_link import PeerLink

_MADV_DONTFORK = 10
_MAX_FILES_PER_MESSAGE = 64
_OFFER, _MESSAGE = b"o", b"m"

_serials = itertools.count(1)
_alive: weakref.WeakValueDictionary[int, SharedRegion] = weakref.WeakValueDictionary()


class SharedRegion:
    """Memory of this worker that its peers can map. The kernel frees it when no process maps it any more."""

    def __init__(self, size: int) -> None:
        self.serial = next(_serials)
        """Identifies the region among those of this process."""
        self.file = os.memfd_create("gyrostat-gradients")
        os.ftruncate(self.file, size)
        self._closing = weakref.finalize(self, os.close, self.file)
        self._closing.atexit = False
        self.memory = _map(self.file)
        """The bytes of the region."""
        _alive[self.serial] = self

    def close_file(self) -> None:
        """Close the descriptor in a process that was forked from this one and does not use the region."""
        self._closing()


def _map(file: int) -> torch.Tensor:
    size = os.fstat(file).st_size
    memory = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=size, dtype=torch.uint8)
    # Data workers are forks of this process: they would keep memory alive that it has freed.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(size), _MADV_DONTFORK)
    return memory


def _close_in_fork() -> None:
    for region in list(_alive.values()):
        region.close_file()


os.register_at_fork(after_in_child=_close_in_fork)


class RegionOffer(msgspec.Struct, frozen=True, array_like=True):
    """Sent with the files of regions that the receiver has not mapped yet."""

    serials: list[int]
    gone: list[int]
    """Regions that no longer exist: the receiver unmaps them."""


class RegionExchange:
    """Messages and regions exchanged with one peer. Used by the reducer's thread only."""

    def __init__(self, link: PeerLink) -> None:
        self._link = link
        self._offered: set[int] = set()
        self._mapped: dict[int, torch.Tensor] = {}

    def offer(self, regions: Iterable[SharedRegion]) -> None:
        """Send the peer the regions that it does not have yet, and which earlier ones are gone."""
        new = [region for region in regions if region.serial not in self._offered]
        gone = [serial for serial in self._offered if serial not in _alive]
        self._offered.difference_update(gone)
        self._offered.update(region.serial for region in new)
        for start in range(0, len(new), _MAX_FILES_PER_MESSAGE) or (range(1) if gone else ()):
            some, gone_now = new[start : start + _MAX_FILES_PER_MESSAGE], gone if start == 0 else []
            message = msgspec.msgpack.encode(RegionOffer([region.serial for region in some], gone_now))
            self._link.send(_OFFER + message, [region.file for region in some])

    def send(self, message: bytes) -> None:
        self._link.send(_MESSAGE + message)

    def receive(self) -> bytes:
        """The peer's next message. Regions that it offers before are mapped."""
        while True:
            message, files = self._link.receive_with_files(_MAX_FILES_PER_MESSAGE)
            if message[:1] != _OFFER:
                return message[1:]
            offer = msgspec.msgpack.decode(message[1:], type=RegionOffer)
            for serial in offer.gone:
                self._mapped.pop(serial, None)
            for serial, file in zip(offer.serials, files, strict=True):
                self._mapped[serial] = _map(file)
                os.close(file)

    def memory(self, serial: int) -> torch.Tensor:
        """A region of the peer."""
        return self._mapped[serial]

    def close(self) -> None:
        self._link.close()
        self._mapped.clear()
