"""Switching the one model of this worker between its virtual workers: random streams and buffers in and out.

Streams are exchanged in pairs: what was in force before goes back to its owner, the virtual worker that ran before or the code
outside the inner loop, whose streams all virtual workers share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gyrostat.data.rng import RngState, Streams, seed_all
from gyrostat.engine.training.backups import ContextBackups
from gyrostat.engine.training.buffer_sync import BufferSync
from gyrostat.engine.training.context import Context
from gyrostat.engine.training.generation import CurrentGeneration


class ContextSwitch:
    """The contexts of the local virtual workers, and which of them is in force."""

    def __init__(
        self, generation: CurrentGeneration, buffers: BufferSync, backups: ContextBackups, *, seed: int
    ) -> None:
        self._generation, self._buffers, self._backups, self._seed = generation, buffers, backups, seed
        self.streams = Streams()
        self.contexts: Mapping[int, Context] = {}
        """Of the local virtual workers, by rank."""
        self._active: int | None = None  # the rank whose streams are in force
        self._outer: RngState | None = None  # meanwhile, those of the code outside the inner loop
        self._any_entered = False  # in this pass

    def start(self, *, same: bool = False) -> None:
        """Before training: virtual worker r's streams begin as if seeded with seed + r, or with `same` as the script's."""
        outer = self.streams.save()
        all_ranks = range(self._generation.placement.virtual_workers)
        fresh = {}
        for rank in all_ranks if self._backups.enabled else self._generation.local_ranks:
            if not same:
                seed_all(self._seed + rank)
            fresh[rank] = Context(self.streams.save())
        self.streams.exchange(outer)
        self.contexts = {rank: fresh[rank] for rank in self._generation.local_ranks}
        if self._backups.enabled:
            self._backups.hold([fresh[rank].to_tree() for rank in all_ranks])

    def replace(self, contexts: Mapping[int, Context]) -> None:
        """Other virtual workers are local from now on, or the same with other contexts."""
        self.contexts = contexts

    def load(self, trees: Sequence[Any]) -> None:
        """Give the local virtual workers their contexts of a checkpoint; `trees` are those of all ranks, in order."""
        self.contexts = {rank: Context.from_tree(trees[rank]) for rank in self._generation.local_ranks}
        self._backups.hold(trees)

    def random_states(self) -> dict[int, RngState]:
        """The streams of the local virtual workers, between passes."""
        return {rank: self.contexts[rank].rng for rank in self._generation.local_ranks}

    def local(self, rank: int) -> dict[str, Any]:
        """`step.local`."""
        return self.contexts[rank].local

    def begin_pass(self) -> None:
        self.adopt_changed_buffers()
        self._any_entered = False
        for buffers in self._buffers.modules:
            buffers.begin_pass(several=self._may_be_several)

    def adopt_changed_buffers(self) -> None:
        """A buffer that the script has set outside the inner loop counts for virtual workers with buffers of their own, too."""
        for buffers in self._buffers.modules:
            for number in buffers.changed():
                for rank in self._generation.local_ranks:
                    own = self.contexts[rank].buffers.get(buffers.name)
                    if own is not None:
                        own[number] = buffers.current()[number].detach().clone()

    def switch_in(self, rank: int, *, survey: bool = False) -> None:
        """Put the streams and buffers of virtual worker `rank` in force. `survey`: the caller restores buffers."""
        context = self.contexts[rank]
        outgoing = self.streams.exchange(context.rng)
        if self._active is None:
            self._outer = outgoing
        else:
            self.contexts[self._active].rng = outgoing
        self._active = rank
        if survey:
            for buffers in self._buffers.modules:
                if (own := context.buffers.get(buffers.name)) is not None:
                    buffers.restore(own)
            return
        first, self._any_entered = not self._any_entered, True
        for buffers in self._buffers.modules:
            buffers.enter(rank, context.buffers.get(buffers.name), first=first)

    def begin_micro_batch(self, *, last: bool) -> None:
        for buffers in self._buffers.modules:
            buffers.micro_batch(last=last)

    def switch_out(self, rank: int, *, survey: bool = False) -> None:
        """Save the buffers of virtual worker `rank`. Its streams stay in force until the next exchange."""
        if survey:
            return
        context = self.contexts[rank]
        for buffers in self._buffers.modules:
            own = buffers.leave(rank, alone=not self._may_be_several)
            if own is None:
                context.buffers.pop(buffers.name, None)
            else:
                context.buffers[buffers.name] = own

    def end_pass(self) -> None:
        """All local virtual workers have run: back to the streams of the code outside the inner loop."""
        if self._active is not None:
            assert self._outer is not None
            self.contexts[self._active].rng = self.streams.exchange(self._outer)
            self._active = None
        for buffers in self._buffers.modules:
            buffers.end_pass()

    def in_streams_of(self, rank: int, do: Callable[[int], Any]) -> Any:
        """`do(rank)`, outside a pass, with the streams of virtual worker `rank` in force."""
        outside = self.streams.exchange(self.contexts[rank].rng)
        try:
            return do(rank)
        finally:
            self.contexts[rank].rng = self.streams.exchange(outside)

    @property
    def _may_be_several(self) -> bool:
        """More than one virtual worker runs here in this pass, or will if a worker is lost."""
        generation = self._generation
        return len(generation.local_ranks) > 1 or (self._backups.enabled and generation.group.size > 1)
