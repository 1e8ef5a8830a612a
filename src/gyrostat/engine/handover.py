"""How the state of a running job reaches workers that join it: over a wire of their own, from one donor to all newcomers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from gyrostat.core.job import NextGeneration
from gyrostat.core.progress import Progress
from gyrostat.engine import statetree
from gyrostat.engine.checkpoint import Snapshot
from gyrostat.engine.group import losing_peers
from gyrostat.engine.torch_internals import file_store, gloo_group

_LENGTH = 8


class Wire:
    """A donor, who is number 0, and the newcomers. What the donor sends, all receive."""

    def __init__(self, plan: NextGeneration, member: int, timeout_s: float) -> None:
        ends = (plan.donor, *plan.newcomers)
        store = file_store(f"{plan.store}-handover", len(ends), "handover")
        with losing_peers():
            self._gloo: Any = gloo_group(store, ends.index(member), len(ends), timedelta(seconds=timeout_s))

    @staticmethod
    def concerns(plan: NextGeneration, member: int) -> bool:
        return bool(plan.newcomers) and (member == plan.donor or member in plan.newcomers)

    def send(self, data: bytes) -> None:
        with losing_peers():
            self._broadcast(torch.tensor([len(data)], dtype=torch.int64))
            self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def receive(self) -> bytes:
        with losing_peers():
            length = torch.empty(1, dtype=torch.int64)
            self._broadcast(length)
            data = torch.empty(int(length.item()), dtype=torch.uint8)
            self._broadcast(data)
        return data.numpy().tobytes()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self._gloo.broadcast(tensor, 0).wait()

    def close(self) -> None:
        self._gloo = None


def pack_state(snapshot: Snapshot, turns: Mapping[str, Any], batches: int | None) -> bytes:
    """All that a newcomer needs to go on from a boundary as if it had been there before.

    `batches`: how many micro-batches the loop that is running has for each virtual worker, if that is known.
    """
    progress = snapshot.progress
    return statetree.encode(
        {
            "job": dict(snapshot.job),
            "fingerprint": dict(snapshot.fingerprint),
            "progress": [getattr(progress, name) for name in _PROGRESS],
            "shared": snapshot.shared,
            "contexts": list(snapshot.contexts),
            "turns": dict(turns),
            "batches": batches,
        }
    )


def unpack_state(data: bytes) -> tuple[Snapshot, dict[str, Any], int | None]:
    tree = statetree.decode(data)
    snapshot = Snapshot(
        job=tree["job"],
        fingerprint=tree["fingerprint"],
        progress=Progress(*tree["progress"]),
        shared=tree["shared"],
        contexts=tree["contexts"],
    )
    return snapshot, tree["turns"], tree["batches"]


_PROGRESS = tuple(Progress.__dataclass_fields__)
