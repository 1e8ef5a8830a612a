"""The worker's side of exactly once: an exchange with all slots, repeated until each has answered; and the batches of a
shard. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gyrostat.core.errors import UsageError
from gyrostat.data.shards.messages import Shard
from gyrostat.ps.protocol.exchange import BatchRange, ExchangeStatus
from gyrostat.ps.protocol.slot_map import SlotMap


class Delivery:
    """An exchange of which some slots have not answered yet."""

    def __init__(self, slots: int) -> None:
        self._left = set(range(slots))
        self._sent: dict[str, frozenset[int]] = {}
        self.dropped = False
        """The term is over: the update must be dropped, and the shard with it."""
        self.outdated = False
        """A server does not own what the map says: get a newer map before sending again."""
        self.lacks_values = False
        """Send initial values of dense tensors along."""

    @property
    def done(self) -> bool:
        return not self._left or self.dropped

    @property
    def waits_for(self) -> frozenset[str]:
        """The servers that have not replied."""
        return frozenset(self._sent)

    def to_send(self, slot_map: SlotMap) -> dict[str, list[int]]:
        """The slots to send for, by server: those that have not answered, at servers that are not being waited for."""
        waiting = frozenset[int]().union(*self._sent.values())
        by_server = slot_map.by_server(sorted(self._left - waiting))
        found = {server: slots for server, slots in by_server.items() if server not in self._sent}
        for server, slots in found.items():
            self._sent[server] = frozenset(slots)
        return found

    def answered(self, server: str, status: ExchangeStatus, served: Iterable[int] = ()) -> None:
        """A server's reply for the slots that were sent to it, or those of them that it has served: others are moving."""
        slots = self._sent.pop(server)
        match status:
            case ExchangeStatus.DONE:
                done = slots & frozenset(served) or slots
                self._left -= done
                self.outdated = self.outdated or done != slots
            case ExchangeStatus.STALE:
                self.dropped = True
            case ExchangeStatus.MOVED | ExchangeStatus.AHEAD:
                # Ahead: the server has not heard of the term yet, or it was given up and never will.
                self.outdated = True
            case ExchangeStatus.WITHOUT_VALUES:
                self.lacks_values = True

    def disconnected(self, server: str) -> None:
        """No reply will come: the connection has ended, or a newer map does not have the server any more. What was sent
        may have been applied: it is sent again, and refused if so."""
        if self._sent.pop(server, None) is not None:
            self.outdated = True


class ShardBatches:
    """The batches of a shard that are to be trained."""

    def __init__(self, shard: Shard, batch_size: int) -> None:
        self.shard = shard
        self._batch_size = batch_size
        self._applied: set[int] = set()

    @property
    def asked(self) -> BatchRange:
        """What to ask all slots about before training: the shard may be a returned one."""
        first = self.shard.start // self._batch_size
        return BatchRange(self.shard.epoch, first, -(-self.shard.stop // self._batch_size) - first)

    def skip(self, applied: Iterable[bool]) -> None:
        """Of each batch, whether all slots have it."""
        first = self.asked.first
        self._applied = {first + place for place, has in enumerate(applied) if has}

    def __iter__(self) -> Iterator[tuple[int, range]]:
        """The number of each batch that some slot lacks, and its samples."""
        for start in range(self.shard.start, self.shard.stop, self._batch_size):
            number = start // self._batch_size
            if number not in self._applied:
                yield number, range(start, min(start + self._batch_size, self.shard.stop))


def check_batches(shard_size: int, batch_size: int) -> None:
    """An update is named by first sample // batch size, so batches must begin at multiples of it."""
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
    if shard_size % batch_size:
        raise UsageError(f"shard_size must be a multiple of batch_size {batch_size}, got {shard_size}")
