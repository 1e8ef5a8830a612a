"""The workers of one generation and how they talk: small messages by `exchange`, tensors point to point or together.

Every collective begins with an envelope that names its kind, generation and progress. Workers that are not at the same
place in the script find out there, with an error that names both places, instead of adding gradients that do not
belong together. Gradients and buffers have process groups of their own, so that they may travel while the script's thread
talks. All are gloo's, but for that of gradients where `carrier.py` has chosen NCCL. Workers that all live on one machine use
shorter ways where they can (`neighbours.py`). A lone worker has the same methods and no process group.

gloo tells only some of the others when a worker dies, and nobody when one falls silent. So whoever waits looks up now and
then whether the generation has been superseded (`GenerationFloor`), and if so raises `PeerLost`, as gloo's own errors do.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
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
from gyrostat.engine.transport.shared_memory import (
    MOST_BYTES,
    PLACE_BYTES,
    PeerAddress,
    SharedMemoryTransport,
    open_listener,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_FIRST_ROUND = 1024  # bytes; a second round follows only if somebody's payload does not fit
_MOST_AT_ONCE = 1 << 16
_TIMED_OUT = "Operation timed out!"
_LOOK_UP = timedelta(milliseconds=20)


class GenerationFloor:
    """The oldest generation that is still valid. Raised by whoever hears that a worker is lost, read by whoever waits."""

    def __init__(self) -> None:
        self.generation = 0


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What stands on every collective, and how long its contents are."""

    kind: str
    generation: int
    progress: Progress
    length: int


@dataclass
class Traffic:
    """Bytes of gradients that this worker sent and received, other than by gloo's all-reduce."""

    sent: int = 0
    received: int = 0


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
        """`host`: where this worker listens for the others."""
        self._floor = floor or GenerationFloor()
        self.tracer = tracer or NoTracer()
        self.rank, self.size, self.generation = rank, size, generation
        self.traffic = Traffic()
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Envelope)
        self.reducer: BackgroundReducer | StreamReducer = BackgroundReducer(self.tracer, self._check_valid)
        self.gradients_on = torch.device("cpu")
        """Where tensors must be for gradients to travel."""
        self.by_collectives = False
        """Whether gradients travel by collectives; if not, point to point."""
        self._store, self._timeout = store, timedelta(seconds=timeout_s)
        self._first_round = _FIRST_ROUND
        self._gloo: Any = None
        self._gradients: Any = None
        self._buffers: Any = None
        self.shared_memory: SharedMemoryTransport | None = None
        """If all workers live on one machine."""
        if size > 1:
            if store is None:
                raise ValueError("a group of several workers needs a rendezvous store")
            with losing_peers():
                self._gloo, self._gradients, self._buffers = (
                    gloo_group(self._rendezvous(purpose), rank, size, self._timeout, host)
                    for purpose in ("control", "gradients", "buffers")
                )
            self.shared_memory = self._find_shared_memory()

    def _find_shared_memory(self) -> SharedMemoryTransport | None:
        """All workers find all others here, or none does."""
        entrance = open_listener(self.size)
        try:
            place = entrance.place.encode() if entrance is not None else b"".ljust(PLACE_BYTES, b"\0")
            places = self._gather_by_gloo(place)()
            found = None
            if entrance is not None and all(any(place) for place in places):
                everyone = [PeerAddress.decode(each) for each in places]
                found = entrance.connect(
                    self.rank, everyone, self._check_valid, self._timeout.total_seconds()
                )
            connected = self._gather_by_gloo(b"no" if found is None else b"ok")()
            if all(each == b"ok" for each in connected):
                return found
            if found is not None:
                found.close()
            return None
        finally:
            if entrance is not None:
                entrance.close()

    def use_nccl(self, device: torch.device) -> None:
        """From now on NCCL carries gradients, in the memory of `device`.

        By collectives: NCCL's messages from point to point wait for each other where gloo's do not.
        """
        self._gradients = nccl_group(self._rendezvous("nccl"), self.rank, self.size, self._timeout)
        self.gradients_on, self.by_collectives = device, True
        if device.type == "cuda":
            self.reducer = StreamReducer(device, self.tracer)

    def _rendezvous(self, purpose: str) -> Any:
        name = f"generation-{self.generation}-{purpose}"
        return rendezvous(str(self._store), self.size, name, self._timeout)

    def exchange(self, kind: str, progress: Progress, payload: bytes = b"") -> list[bytes]:
        """Give every worker everybody's payload, in worker order."""
        return self.begin_exchange(kind, progress, payload)()

    def begin_exchange(self, kind: str, progress: Progress, payload: bytes) -> Callable[[], list[bytes]]:
        """The same, in two halves: what is returned waits for the others."""
        if self._gloo is None:
            return lambda: [payload]
        header = self._encoder.encode(Envelope(kind, self.generation, progress, len(payload)))
        head = len(header).to_bytes(2, "little") + header
        if self.shared_memory is not None:
            first_round = self._gather(head + payload[: MOST_BYTES - len(head)])
        else:
            room = self._first_round - len(head)
            first_round = self._gather(head + payload[:room].ljust(room, b"\0"))

        def finish() -> list[bytes]:
            with self.tracer.span(f"exchange: {kind}"):
                return self._complete(payload, first_round())

        return finish

    def _complete(self, payload: bytes, parts: list[bytes]) -> list[bytes]:
        """Check that all are at the same place. One round is enough, unless somebody's payload is longer."""
        sizes = [int.from_bytes(part[:2], "little") for part in parts]
        envelopes = [
            self._decoder.decode(part[2 : 2 + size]) for part, size in zip(parts, sizes, strict=True)
        ]
        self._compare(envelopes)
        firsts = [part[2 + size :] for part, size in zip(parts, sizes, strict=True)]
        longest = max(envelope.length - len(first) for envelope, first in zip(envelopes, firsts, strict=True))
        rests = [b""] * self.size
        if longest > 0:
            rests = self._gather(payload[len(firsts[self.rank]) :].ljust(longest, b"\0"))()
            if longest < _MOST_AT_ONCE:  # the next time all will fit into one round: all know that alike
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
        """Everybody's message. Long ones are of the same length."""
        if self.shared_memory is not None and len(message) <= MOST_BYTES:
            self._check_valid()
            return self.shared_memory.gather(message)
        return self._gather_by_gloo(message)

    def _gather_by_gloo(self, message: bytes) -> Callable[[], list[bytes]]:
        """Everybody's message of the same length."""
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        everyone = torch.empty(self.size * len(message), dtype=torch.uint8)
        self._check_valid()
        with losing_peers():
            work = self._gloo._allgather_base(everyone, mine)

        def wait() -> list[bytes]:
            self._wait_for([work])
            data = everyone.numpy().tobytes()
            return [data[i * len(message) : (i + 1) * len(message)] for i in range(self.size)]

        return wait

    def all_reduce(self, tensor: torch.Tensor, name: str) -> Pending:
        """Sum `tensor` over all workers in place, by gloo's own all-reduce."""
        pending = self._pending(lambda: self._gradients.allreduce([tensor]), tensor)
        if self.tracer.active:  # gloo's own threads do it; the courier only looks when it ends
            self.reducer.send(partial(self._wait_for, list(pending.works)), name)
        return pending

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_splits: Sequence[int],
        sent_splits: Sequence[int],
    ) -> Pending:
        """Parts of `sent` for every worker, of so many elements; `received` are those of every worker for this one."""
        away = sum(sent_splits) - sent_splits[self.rank]
        others = sum(received_splits) - received_splits[self.rank]
        self.traffic.sent += away * sent.element_size()
        self.traffic.received += others * received.element_size()
        return self._pending(
            lambda: self._gradients.alltoall_base(received, sent, list(received_splits), list(sent_splits)),
            received,
        )

    def all_gather(self, everyone: torch.Tensor, mine: torch.Tensor) -> Pending:
        """Every worker's `mine`, all of one length, one after the other."""
        self.traffic.sent += (self.size - 1) * mine.nbytes
        self.traffic.received += (self.size - 1) * mine.nbytes
        return self._pending(lambda: self._gradients._allgather_base(everyone, mine), everyone)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        """Worker `source`'s `tensor` for everybody, in place; ready after `wait`."""
        if self._buffers is None:
            return Pending([], tensor, self._wait_for)
        if self.shared_memory is not None and 0 < tensor.nbytes <= MOST_BYTES:
            near = self.shared_memory
            return self._pending(lambda: near.broadcast(tensor, source), tensor, _complete)
        return self._pending(lambda: self._buffers.broadcast(tensor, source), tensor)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Pending:
        """Only for the courier, as `receive`: who looked up while waiting for a message would close the connection."""
        self.traffic.sent += tensor.nbytes
        return self._pending(lambda: self._gradients.send([tensor], to, tag), tensor, _wait_patiently)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        self.traffic.received += tensor.nbytes
        return self._pending(lambda: self._gradients.recv([tensor], source, tag), tensor, _wait_patiently)

    def _pending(
        self,
        begin: Callable[[], Any],
        tensor: torch.Tensor,
        wait_for: Callable[[list[Any]], None] | None = None,
    ) -> Pending:
        """Who cannot even begin learns it when it waits: this may be called in the middle of a backward."""
        wait_for = wait_for or (_wait_patiently if tensor.is_cuda else self._wait_for)
        if self._floor.generation > self.generation:
            return Pending([], tensor, wait_for, error=self._superseded())
        try:
            return Pending([begin()], tensor, wait_for)
        except PeerLost as error:
            return Pending([], tensor, wait_for, error=error)
        except RuntimeError as error:
            return Pending([], tensor, wait_for, error=_lost(error))

    def _wait_for(self, works: list[Any]) -> None:
        for work in works:
            until: float | None = None
            while True:
                try:
                    work.wait(_LOOK_UP)
                    break
                except RuntimeError as error:
                    if _TIMED_OUT not in str(error):
                        raise _lost(error) from error
                    self._check_valid()
                    until = until or time.monotonic() + self._timeout.total_seconds()
                    if time.monotonic() > until:
                        raise _lost(error) from error

    def _check_valid(self) -> None:
        if self._floor.generation > self.generation:
            raise self._superseded() from None

    def _superseded(self) -> PeerLost:
        return PeerLost(f"generation {self.generation} has ended: another worker is lost")

    def close(self) -> None:
        """Nobody will use it any more. Taking gloo's connections down takes a while, so that is done behind."""
        if self.shared_memory is not None:
            self.reducer.send(self.shared_memory.close, "hang up")  # it may be waiting at a line
        self.reducer.close()
        connections = [self._gloo, self._gradients, self._buffers]
        self._gloo = self._gradients = self._buffers = None
        threading.Thread(target=connections.clear, name="gyrostat-close", daemon=True).start()


class Pending:
    """A transfer under way. Holds its tensor alive."""

    def __init__(
        self,
        works: list[Any],
        tensor: torch.Tensor,
        wait_for: Callable[[list[Any]], None],
        error: PeerLost | None = None,
    ) -> None:
        self.works, self.tensor, self._wait_for, self._error = works, tensor, wait_for, error

    def wait(self) -> torch.Tensor:
        """Until it is complete; of NCCL's, the current stream waits, and the host does not."""
        if self._error is not None:
            raise self._error
        self._wait_for(self.works)
        self.works = []
        return self.tensor


def _complete(works: list[Any]) -> None:
    for complete in works:
        complete()


def _wait_patiently(works: list[Any]) -> None:
    """Until the end, or gloo's time-out. For NCCL's, the current stream waits."""
    with losing_peers():
        for work in works:
            work.wait()


@contextmanager
def losing_peers() -> Iterator[None]:
    """gloo reports a peer that went away, or stayed silent for too long, as RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        raise _lost(error) from error


def _lost(error: RuntimeError) -> PeerLost:
    return PeerLost(f"lost another worker in the middle of a collective: {error}")
