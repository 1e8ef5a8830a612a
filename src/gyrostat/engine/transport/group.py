"""The workers of one generation and how they exchange data: messages by `exchange`, tensors point to point or by collectives.

Every collective begins with an envelope that names its kind, generation and progress. Workers that are at different places
in the script find out there, with an error that names both places, instead of adding gradients that do not belong together.

Control messages, gradients and buffers have a process group each, so that gradients travel while the script's thread
exchanges messages. All are gloo's, except that of gradients where `backend.py` has chosen NCCL. Workers that all run on one
machine use `shared_memory.py` where they can. `pending.py` waits for transfers. A lone worker has the same methods and no
process group.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from gyrostat.core.errors import Diverged, PeerLost
from gyrostat.core.progress import Progress
from gyrostat.engine.torch_internals import gloo_group, nccl_group, rendezvous
from gyrostat.engine.trace import NoTracer
from gyrostat.engine.transport.background import BackgroundReducer, StreamReducer
from gyrostat.engine.transport.peer_link import MAX_MESSAGE_BYTES
from gyrostat.engine.transport.peer_listener import NO_ADDRESS, PeerAddress, open_listener
from gyrostat.engine.transport.pending import (
    GenerationFloor,
    Pending,
    WaitFor,
    as_peer_lost,
    call_all,
    losing_peers,
    wait_while_valid,
    wait_without_checks,
)
from gyrostat.engine.transport.shared_memory import SharedMemoryTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

_FIRST_ROUND = 1024  # bytes; a second round follows only if a payload does not fit
_MAX_FIRST_ROUND_GROWTH = 1 << 16


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The header of every collective."""

    kind: str
    generation: int
    progress: Progress
    length: int
    """Of the payload, in bytes."""


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Envelope)


@dataclass
class Traffic:
    """Bytes of gradients that this worker sent and received, other than by gloo's all-reduce."""

    sent: int = 0
    received: int = 0


@dataclass(frozen=True)
class _ProcessGroups:
    """torch's process groups of a generation; None for a lone worker."""

    control: Any = None
    gradients: Any = None
    buffers: Any = None


class WorkerGroup:
    """Worker `rank` of `size`, in one generation."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        generation: int,
        store: str | None,
        timeout_s: float,
        host: str = "127.0.0.1",
        tracer: NoTracer | None = None,
        floor: GenerationFloor | None = None,
    ) -> None:
        """Connects to the others if there are any. `host`: the address at which this worker listens."""
        self._floor = floor or GenerationFloor()
        self.tracer = tracer or NoTracer()
        self.rank, self.size, self.generation = rank, size, generation
        self.traffic = Traffic()
        self.reducer: BackgroundReducer | StreamReducer = BackgroundReducer(self.tracer, self._check_valid)
        self.gradients_on = torch.device("cpu")
        """The device from which gradients are sent."""
        self.by_collectives = False
        """Whether gradients are exchanged by collectives; if not, point to point."""
        self._store, self._timeout = store, timedelta(seconds=timeout_s)
        self._first_round = _FIRST_ROUND
        self._groups = _ProcessGroups()
        self.shared_memory: SharedMemoryTransport | None = None
        """None if the workers are on several machines."""
        if size > 1:
            if store is None:
                raise ValueError("a group of several workers needs a rendezvous store")
            with losing_peers():
                self._groups = _ProcessGroups(
                    *(
                        gloo_group(self._rendezvous(purpose), rank, size, self._timeout, host)
                        for purpose in ("control", "gradients", "buffers")
                    )
                )
            self.shared_memory = self._connect_shared_memory()
            carrier = "gloo" if self.shared_memory is None else "shared memory and gloo"
            fields = {"generation": generation}
            logger.debug("worker %d of %d is connected, over %s", rank, size, carrier, extra=fields)

    def _connect_shared_memory(self) -> SharedMemoryTransport | None:
        """Either all workers connect to all others, or none uses shared memory."""
        listener = open_listener(self.size)
        try:
            mine = NO_ADDRESS if listener is None else listener.address.encode()
            addresses = self._gather_by_gloo(mine)()
            connected = None
            if listener is not None and NO_ADDRESS not in addresses:
                peers = [PeerAddress.decode(address) for address in addresses]
                timeout_s = self._timeout.total_seconds()
                connected = listener.connect(self.rank, peers, self._check_valid, timeout_s)
            outcomes = self._gather_by_gloo(b"no" if connected is None else b"ok")()
            if all(outcome == b"ok" for outcome in outcomes):
                return connected
            if connected is not None:
                connected.close()
            return None
        finally:
            if listener is not None:
                listener.close()

    def use_nccl(self, device: torch.device) -> None:
        """From now on gradients are sent over NCCL from `device`, by collectives.

        NCCL's point-to-point messages wait for each other where gloo's do not.
        """
        gradients = nccl_group(self._rendezvous("nccl"), self.rank, self.size, self._timeout)
        self._groups = replace(self._groups, gradients=gradients)
        self.gradients_on, self.by_collectives = device, True
        if device.type == "cuda":
            self.reducer = StreamReducer(device, self.tracer)

    def _rendezvous(self, purpose: str) -> Any:
        name = f"generation-{self.generation}-{purpose}"
        return rendezvous(str(self._store), self.size, name, self._timeout)

    def exchange(self, kind: str, progress: Progress, payload: bytes = b"") -> list[bytes]:
        """All workers' payloads, by rank. Every worker calls this."""
        return self.begin_exchange(kind, progress, payload)()

    def begin_exchange(self, kind: str, progress: Progress, payload: bytes) -> Callable[[], list[bytes]]:
        """The first half of `exchange`: sends the payload. The returned function waits for the others'."""
        if self._groups.control is None:
            return lambda: [payload]
        header = _encoder.encode(Envelope(kind, self.generation, progress, len(payload)))
        head = len(header).to_bytes(2, "little") + header
        if self.shared_memory is not None:
            first_round = self._gather(head + payload[: MAX_MESSAGE_BYTES - len(head)])
        else:
            room = self._first_round - len(head)
            first_round = self._gather(head + payload[:room].ljust(room, b"\0"))

        def finish() -> list[bytes]:
            with self.tracer.span(f"exchange: {kind}"):
                return self._complete(payload, first_round())

        return finish

    def _complete(self, payload: bytes, parts: list[bytes]) -> list[bytes]:
        """Check that all workers are at the same place. A second round follows only if a payload did not fit into the first."""
        sizes = [int.from_bytes(part[:2], "little") for part in parts]
        envelopes = [_decoder.decode(part[2 : 2 + size]) for part, size in zip(parts, sizes, strict=True)]
        self._compare(envelopes)
        firsts = [part[2 + size :] for part, size in zip(parts, sizes, strict=True)]
        longest = max(envelope.length - len(first) for envelope, first in zip(envelopes, firsts, strict=True))
        rests = [b""] * self.size
        if longest > 0:
            rests = self._gather(payload[len(firsts[self.rank]) :].ljust(longest, b"\0"))()
            if (
                longest < _MAX_FIRST_ROUND_GROWTH
            ):  # all workers enlarge the next first round by the same number
                self._first_round += longest
        return [
            (first + rest)[: envelope.length]
            for envelope, first, rest in zip(envelopes, firsts, rests, strict=True)
        ]

    def _compare(self, envelopes: list[Envelope]) -> None:
        mine = envelopes[self.rank]
        for worker, other in enumerate(envelopes):
            if (other.kind, other.generation, other.progress) != (mine.kind, mine.generation, mine.progress):
                raise Diverged(
                    f"worker {self.rank} is at '{mine.kind}', generation {mine.generation}, {mine.progress}, "
                    f"but worker {worker} is at '{other.kind}', generation {other.generation}, {other.progress}. "
                    "All workers must run the same loops: look for a decision that depends on job.is_main, on the "
                    "time, or on one virtual worker's loss"
                )

    def _gather(self, message: bytes) -> Callable[[], list[bytes]]:
        """All workers' messages. Those of more than `MAX_MESSAGE_BYTES` have the same length."""
        if self.shared_memory is not None and len(message) <= MAX_MESSAGE_BYTES:
            self._check_valid()
            return self.shared_memory.gather(message)
        return self._gather_by_gloo(message)

    def _gather_by_gloo(self, message: bytes) -> Callable[[], list[bytes]]:
        """All workers' messages, of the same length."""
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        everyone = torch.empty(self.size * len(message), dtype=torch.uint8)
        self._check_valid()
        with losing_peers():
            work = self._groups.control._allgather_base(everyone, mine)

        def wait() -> list[bytes]:
            self._wait_for([work])
            data = everyone.numpy().tobytes()
            return [data[i * len(message) : (i + 1) * len(message)] for i in range(self.size)]

        return wait

    def all_reduce(self, tensor: torch.Tensor, name: str) -> Pending:
        """Sum `tensor` over all workers in place, by gloo's own all-reduce."""
        pending = self._pending(lambda: self._groups.gradients.allreduce([tensor]), tensor)
        if self.tracer.active:  # gloo's own threads do it; the reducer's thread only records when it ends
            self.reducer.submit(partial(self._wait_for, list(pending.works)), name)
        return pending

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_splits: Sequence[int],
        sent_splits: Sequence[int],
    ) -> Pending:
        """Send each worker its part of `sent` and fill `received` with theirs; splits are numbers of elements, by rank."""
        away = sum(sent_splits) - sent_splits[self.rank]
        others = sum(received_splits) - received_splits[self.rank]
        self.traffic.sent += away * sent.element_size()
        self.traffic.received += others * received.element_size()
        return self._pending(
            lambda: self._groups.gradients.alltoall_base(
                received, sent, list(received_splits), list(sent_splits)
            ),
            received,
        )

    def all_gather(self, everyone: torch.Tensor, mine: torch.Tensor) -> Pending:
        """Fill `everyone` with all workers' `mine`, which have the same length, by rank."""
        self.traffic.sent += (self.size - 1) * mine.nbytes
        self.traffic.received += (self.size - 1) * mine.nbytes
        return self._pending(lambda: self._groups.gradients._allgather_base(everyone, mine), everyone)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        """Fill `tensor` with worker `source`'s; it is ready after `wait`."""
        if self._groups.buffers is None:
            return Pending([], tensor, self._wait_for)
        if self.shared_memory is not None and 0 < tensor.nbytes <= MAX_MESSAGE_BYTES:
            transport = self.shared_memory
            return self._pending(lambda: transport.broadcast(tensor, source), tensor, call_all)
        return self._pending(lambda: self._groups.buffers.broadcast(tensor, source), tensor)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Pending:
        """Send `tensor` to a worker. As `receive`, in the reducer's thread only: its wait makes no checks.

        gloo closes a connection when a wait for a message times out, so waiting in short intervals is not possible.
        """
        self.traffic.sent += tensor.nbytes
        return self._pending(
            lambda: self._groups.gradients.send([tensor], to, tag), tensor, wait_without_checks
        )

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        self.traffic.received += tensor.nbytes
        return self._pending(
            lambda: self._groups.gradients.recv([tensor], source, tag), tensor, wait_without_checks
        )

    def _pending(
        self,
        begin: Callable[[], Any],
        tensor: torch.Tensor,
        wait_for: WaitFor | None = None,
    ) -> Pending:
        """Begin a transfer. An error is raised by `Pending.wait`, since this may be called in the middle of a backward."""
        wait_for = wait_for or (wait_without_checks if tensor.is_cuda else self._wait_for)
        if self._floor.generation > self.generation:
            return Pending([], tensor, wait_for, error=self._superseded())
        try:
            return Pending([begin()], tensor, wait_for)
        except PeerLost as error:
            return Pending([], tensor, wait_for, error=error)
        except RuntimeError as error:
            return Pending([], tensor, wait_for, error=as_peer_lost(error))

    def _wait_for(self, works: list[Any]) -> None:
        wait_while_valid(works, self._check_valid, self._timeout)

    def _check_valid(self) -> None:
        if self._floor.generation > self.generation:
            raise self._superseded() from None

    def _superseded(self) -> PeerLost:
        return PeerLost(f"generation {self.generation} has ended: another worker is lost")

    def close(self) -> None:
        """End the use of this group. gloo takes a while to close its connections, so a thread does that."""
        if self.shared_memory is not None:
            # In the reducer's thread, which may be waiting for one of the links.
            self.reducer.submit(self.shared_memory.close, "close shared memory")
        self.reducer.close()
        groups, self._groups = [self._groups], _ProcessGroups()
        threading.Thread(target=groups.clear, name="gyrostat-close", daemon=True).start()
