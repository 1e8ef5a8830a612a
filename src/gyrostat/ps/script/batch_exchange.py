"""`BatchExchange`: the parameters of one batch come from the servers, and its gradients go there: one round trip per batch.

The gradients of a batch wait until the next one is there, and are pushed in the same exchange that pulls for it. Which rows
that batch needs is known only when the script calls its tables. But a table that was called with a tensor of the last batch
itself will, in all likelihood, be called with the same one of this batch: those ids are pulled before the script gets the
batch. Ids that were not foreseen cost another round trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

import msgspec
import numpy as np
import torch

from gyrostat.core.errors import Misuse
from gyrostat.ps.client.port import Batch, ParameterServers, Pull, PulledValues, TermOver, WholeUpdate
from gyrostat.ps.protocol.record_lines import UpdateOrigin
from gyrostat.ps.script.dense_part import DensePart
from gyrostat.ps.script.server_loader import tensors_of
from gyrostat.ps.store.coalesce import Grouping, group
from gyrostat.ps.store.hashing import Keys, Rows, keys_of


@dataclass
class _Wanted:
    """Some ids of a table, and their rows once they are pulled."""

    tensors: list[torch.Tensor]
    grouping: Grouping
    rows: torch.Tensor | None = None

    def places(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Of each id, the number of its row; None: these are other ids."""
        start = 0
        for each in self.tensors:
            if each is ids:
                numbers = self.grouping.inverse[start : start + ids.numel()]
                return torch.from_numpy(numbers).view(ids.shape)
            start += each.numel()
        return None


class BatchExchange:
    """Of one worker. It holds the gradients of at most one batch."""

    def __init__(
        self,
        servers: ParameterServers,
        names: Sequence[str],
        dense: Sequence[DensePart],
        *,
        recorded: bool = False,
    ) -> None:
        """`names`: of the tables, by number. `recorded`: updates tell what they were computed from, and nothing is foreseen, so
        that the pulls of a batch follow from the script alone."""
        self._servers, self._names, self._dense = servers, names, dense
        self._recorded, self._me, self._computations = recorded, token_hex(8), 0
        self._versions: list[bytes] = []
        self._pending: WholeUpdate | None = None
        self._foreseen: dict[int, list[int]] = {}
        """By table: which tensors of a batch it was called with, by their places in the batch."""
        self._batch: Batch | None = None
        self._leaves: list[Any] = []
        self._wanted: dict[int, list[_Wanted]] = {}
        self._void = False
        """The term ended while the batch was computed."""

    # Training.

    def begin(self, batch: Batch, content: Any) -> None:
        """Push the gradients of the batch before, and pull for this one. Raises `TermOver`."""
        self._batch, self._void = batch, False
        self._leaves = list(tensors_of(content))
        self._wanted = {}
        for table, places in self._foreseen.items():
            if all(
                isinstance(self._leaves[place], torch.Tensor) for place in places if place < len(self._leaves)
            ):
                tensors = [self._leaves[place] for place in places if place < len(self._leaves)]
                self._wanted[table] = [self._want(table, tensors)] if tensors else []
        self._foreseen = {}
        self._versions = []
        pending, self._pending = self._pending, None
        self._pull(pending, {table: each[0] for table, each in self._wanted.items() if each})

    def rows_of(self, table: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For `ServerTable`."""
        for place, leaf in enumerate(self._leaves):
            if leaf is ids and not self._recorded and place not in self._foreseen.setdefault(table, []):
                self._foreseen[table].append(place)
        for wanted in self._wanted.get(table, []):
            places = wanted.places(ids)
            if places is not None:
                assert wanted.rows is not None
                return wanted.rows, places
        wanted = self._want(table, [ids])
        self._wanted.setdefault(table, []).append(wanted)
        self._pull_again({table: wanted})
        places = wanted.places(ids)
        assert wanted.rows is not None
        assert places is not None
        return wanted.rows, places

    def end(self) -> None:
        """The batch is computed: keep its gradients. Those of a batch whose term is over are dropped."""
        if self._batch is None:
            raise Misuse("step.backward outside the inner loop")
        rows: dict[int, tuple[Keys, Rows]] = {}
        for table, all_wanted in self._wanted.items():
            trained = [each for each in all_wanted if each.rows is not None and each.rows.grad is not None]
            if len(trained) == 1:
                rows[table] = trained[0].grouping.keys, _gradient(trained[0])
            elif trained:
                joined = group(np.concatenate([each.grouping.keys for each in trained]))
                rows[table] = joined.keys, joined.sum(np.concatenate([_gradient(each) for each in trained]))
        dense = {number: part.gradients() for number, part in enumerate(self._dense)}
        if not self._void:
            self._pending = WholeUpdate(self._batch, rows, dense, self._origin())
        self.forget()

    def _origin(self) -> bytes:
        if not self._recorded:
            return b""
        self._computations += 1
        name = f"{self._me}-{self._computations}"
        return msgspec.msgpack.encode(UpdateOrigin(name, tuple(self._versions)))

    def flush(self) -> None:
        """Push what waits. Raises `TermOver`."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._servers.exchange(pending, Pull())

    def drop(self) -> None:
        """The term is over: what waits is void."""
        self._pending = None
        self.forget()

    def forget(self) -> None:
        """No batch is running."""
        self._batch, self._leaves, self._wanted = None, [], {}

    # Both.

    def pull_dense(self) -> None:
        """The dense part as it is now, for an evaluation."""
        self._pull_again({})

    def _want(self, table: int, tensors: list[torch.Tensor]) -> _Wanted:
        ids = [each.detach().cpu().numpy().reshape(-1) for each in tensors]
        keys = keys_of(ids[0] if len(ids) == 1 else np.concatenate(ids), self._names[table])
        return _Wanted(tensors, group(keys))

    def _pull_again(self, wanted: dict[int, _Wanted]) -> None:
        """A pull in the middle of a batch. If the term has ended, the batch is finished with other rows, and dropped."""
        while True:
            try:
                return self._pull(None, wanted, dense=not wanted)
            except TermOver:
                self._void = True

    def _pull(self, push: WholeUpdate | None, wanted: dict[int, _Wanted], *, dense: bool = True) -> None:
        numbers = tuple(range(len(self._dense))) if dense else ()
        pull = Pull({table: each.grouping.keys for table, each in wanted.items()}, numbers)
        pulled = self._servers.exchange(push, pull)
        self._versions.append(pulled.versions.tobytes())
        self._install(pulled, wanted)

    def _install(self, pulled: PulledValues, wanted: dict[int, _Wanted]) -> None:
        for number, values in pulled.dense.items():
            self._dense[number].install(values)
        for table, each in wanted.items():
            each.rows = torch.from_numpy(pulled.rows[table]).to(each.tensors[0].device)
            each.rows.requires_grad_(self._batch is not None)


def _gradient(wanted: _Wanted) -> Rows:
    assert wanted.rows is not None
    assert wanted.rows.grad is not None
    gradient: Rows = wanted.rows.grad.detach().cpu().numpy()
    return gradient
