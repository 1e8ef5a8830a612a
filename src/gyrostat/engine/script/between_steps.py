"""What all workers, or all virtual workers, do together outside of a step, where ranks of a DDP script would do it each.

Integrations of other frameworks need it; a script of one's own rarely does. Every call is made on all workers alike, and does
nothing with the others while a script repeats what the job has done before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from gyrostat.data.rng import RngState
from gyrostat.engine.state import statetree
from gyrostat.engine.state.digest import digest_of, tensor_digests
from gyrostat.engine.training.parts import Contexts

if TYPE_CHECKING:
    from gyrostat.engine.script.training_loop import TrainingLoop


class BetweenSteps:
    """`job.between_steps`."""

    def __init__(self, training: TrainingLoop, contexts: Contexts, modules: Mapping[str, nn.Module]) -> None:
        self._training, self._contexts, self._modules = training, contexts, modules

    def share_modules(self) -> None:
        """Give all workers the main worker's parameters and buffers, as DDP does when it wraps a module; before the first loop.

        Not needed by scripts that call `gyrostat.init` first, which makes workers build equal modules.
        """
        modules = self._modules
        mine = digest_of(tensor_digests(**modules)).encode()
        if len(set(self._training.exchange("modules", lambda: mine))) == 1:
            return

        def state() -> bytes:
            states = {name: module.state_dict() for name, module in modules.items()}
            return statetree.encode(states) if self._training.is_main else b""

        for payload in filter(None, self._training.exchange("module state", state)):
            for name, saved in statetree.decode(payload).items():
                modules[name].load_state_dict(saved)

    def in_every_stream(self, do: Callable[[], Any]) -> None:
        """`do()` between steps, once with the random streams of each virtual worker: what every rank of a DDP script draws."""
        self._training.in_every_stream(do)

    def barrier(self) -> None:
        """Wait until all workers are here. Call it on all workers alike."""
        self._training.exchange("barrier", lambda: b"")

    def random_states(self) -> list[RngState]:
        """Between steps: the random streams of all virtual workers, in order. Call it on all workers alike."""

        def mine() -> bytes:
            return statetree.encode(
                {rank: state.to_tree() for rank, state in self._contexts.random_states().items()}
            )

        trees: dict[int, Any] = {}
        for payload in self._training.exchange("random states", mine):
            trees |= statetree.decode(payload)
        return [RngState.from_tree(trees[rank]) for rank in sorted(trees)]
