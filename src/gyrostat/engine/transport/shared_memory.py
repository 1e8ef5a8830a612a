"""Workers on one machine exchange messages through Unix sockets and read one another's memory: faster than gloo's loopback.

A group whose workers all run on one machine, in one network namespace and under one user, has a `SharedMemoryTransport`;
any other group uses gloo alone. `peer_listener.py` connects the workers when the group is made. Between any two of them
there are three links (`peer_link.py`), one per thread and purpose, so that none waits for another:

    control     exchanges of small messages, by the script's thread
    gradients   regions of shared memory (`shared_region.py`), by the reducer's thread
    buffers     broadcasts of modules' buffers, by the script's thread
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gyrostat.engine.transport.peer_link import PeerLink, peer_lost
from gyrostat.engine.transport.shared_region import RegionExchange, SharedRegion

_MAX_RANKS = 4096
"""Virtual workers whose region numbers fit into one message."""


@dataclass
class SharedMemoryTransport:
    """This worker's links to all other workers of the group, by rank."""

    rank: int
    control: dict[int, PeerLink]
    regions: dict[int, RegionExchange]
    """Used by the reducer's thread."""
    buffers: dict[int, PeerLink]
    max_files: int
    """The lowest limit of open files among the workers."""
    _interrupted: bool = False

    @property
    def workers(self) -> int:
        return len(self.regions) + 1

    def can_share(self, ranks: int) -> bool:
        """Whether the limit of open files allows all workers to map the gradients of `ranks` virtual workers."""
        return ranks <= _MAX_RANKS and (ranks + 2 * self.workers) * self.workers <= self.max_files // 4

    def gather(self, message: bytes) -> Callable[[], list[bytes]]:
        """Send `message`, of at most `MAX_MESSAGE_BYTES`, to all. The returned function waits for all messages, by rank."""
        for link in self.control.values():
            link.send(message)

        def wait() -> list[bytes]:
            received = {other: link.receive() for other, link in self.control.items()}
            return [message if rank == self.rank else received[rank] for rank in range(self.workers)]

        return wait

    def broadcast(self, tensor: torch.Tensor, source: int) -> Callable[[], None]:
        """Fill `tensor`, of at most `MAX_MESSAGE_BYTES`, with worker `source`'s. The returned function waits for it."""
        row = tensor.view(torch.uint8).numpy()
        if source == self.rank:
            message = row.tobytes()
            for link in self.buffers.values():
                link.send(message)
            return lambda: None

        def wait() -> None:
            row[:] = memoryview(self.buffers[source].receive())

        return wait

    def exchange(self, regions: Sequence[SharedRegion], message: bytes) -> dict[int, bytes]:
        """Share `regions` with all others and exchange a message. Returns theirs, by rank. Reducer's thread."""
        if self._interrupted:  # a peer would take this message for the one that it did not get
            raise peer_lost("the exchange of an earlier bucket was interrupted")
        self._interrupted = True
        for peer in self.regions.values():
            peer.offer(regions)
            peer.send(message)
        received = {other: peer.receive() for other, peer in self.regions.items()}
        self._interrupted = False
        return received

    def peer_memory(self, worker: int, serial: int) -> torch.Tensor:
        """A region that another worker has shared. Reducer's thread."""
        return self.regions[worker].memory(serial)

    def close(self) -> None:
        for link in (*self.control.values(), *self.buffers.values()):
            link.close()
        for peer in self.regions.values():
            peer.close()
