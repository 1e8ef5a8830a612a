"""One side of `ps_step.py`: a process that makes steps when it is told to, and tells the CPU seconds that they took.

A step is that of a table of embeddings: 512 × 26 ids are looked up, every occurrence gets a gradient (of half the sum of
squares times a constant), and Adagrad changes the rows. Modes: `remote` (a worker of a job with one server process), `local`
(the same kernels in this process), `embedding` (torch.nn.Embedding(sparse=True) with torch.optim.Adagrad), `rpc` and
`rpc-server` (a plain parameter server over torch.distributed.rpc: look-up and update are remote calls).

Protocol: a line with a number of steps on stdin, a line with CPU seconds on stdout. The ids are made before.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from gyrostat.ps.client.port import Batch, ParameterServers, Pull, WholeUpdate
from gyrostat.ps.protocol.data_spec import DataSpec
from gyrostat.ps.store.coalesce import Grouping, group
from gyrostat.ps.store.hashing import Rows, keys_of
from gyrostat.ps.store.optimizers import Adagrad
from gyrostat.ps.store.spec import StoreSpec, TableSpec

BATCH, FIELDS, WIDTH = 512, 26, 16
IDS = 1_000_000
LR, SCALE = 0.05, 0.01
_BATCHES = 64
SLOTS = 64

SPEC = StoreSpec(
    slots=SLOTS,
    tables=(TableSpec(name="items", width=WIDTH, optimizer=Adagrad(lr=LR), initial_scale=0.0625),),
)
DATA = DataSpec(samples=BATCH * 1_000_000, batch_size=BATCH, shard_size=BATCH * 1_000_000)


class SideSettings(msgspec.Struct, frozen=True):
    mode: str
    address: tuple[str, int] = ("", 0)
    token: bytes = b""
    rendezvous: str = ""


def batches() -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Ids by a log-uniform law, as of click logs."""
    random = np.random.default_rng(7)
    return [np.exp(random.uniform(0, np.log(IDS), BATCH * FIELDS)).astype(np.int64) for _ in range(_BATCHES)]


def server_steps(servers: ParameterServers) -> Callable[[int], None]:
    """Pull, forward and backward, and a push together with the next pull; as `ps.script` does it."""
    import torch

    from gyrostat.engine.training.heap import keep_freed_memory

    keep_freed_memory()  # as every worker
    torch.set_num_threads(1)
    made = batches()
    state: dict[str, Any] = {"number": 0}
    servers.next_shard(0)

    def grouped(number: int) -> Grouping:
        return group(keys_of(made[number % _BATCHES], "items"))

    def gradients(rows: Rows, batch: Grouping) -> Rows:
        leaf = torch.from_numpy(rows).requires_grad_()
        out = leaf.index_select(0, torch.from_numpy(batch.inverse))
        (out * out).sum().mul(SCALE / 2).backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        found: Rows = leaf.grad.numpy()
        return found

    def run(steps: int) -> None:
        for _ in range(steps):
            number = state["number"]
            if number == 0:
                state["batch"] = grouped(0)
                state["rows"] = servers.exchange(None, Pull({0: state["batch"].keys})).rows[0]
            batch = state["batch"]
            push = WholeUpdate(Batch(0, number), {0: (batch.keys, gradients(state["rows"], batch))})
            following = grouped(number + 1)
            state["rows"] = servers.exchange(push, Pull({0: following.keys})).rows[0]
            state["batch"], state["number"] = following, number + 1

    return run


def remote(settings: SideSettings) -> Callable[[int], None]:
    from gyrostat.ps.client.remote import RemoteServers

    servers = RemoteServers(settings.address, settings.token, "worker")
    servers.open(SPEC, DATA)
    return server_steps(servers)


def local(settings: SideSettings) -> Callable[[int], None]:
    from gyrostat.ps.client.local import LocalServers

    servers = LocalServers()
    servers.open(SPEC, DATA)
    return server_steps(servers)


def embedding(settings: SideSettings) -> Callable[[int], None]:
    import torch

    torch.set_num_threads(1)
    table = torch.nn.Embedding(IDS, WIDTH, sparse=True)
    optimizer = torch.optim.Adagrad(table.parameters(), lr=LR)
    made = [torch.from_numpy(ids) for ids in batches()]
    state = {"number": 0}

    def run(steps: int) -> None:
        for _ in range(steps):
            out = table(made[state["number"] % _BATCHES])
            optimizer.zero_grad()
            (out * out).sum().mul(SCALE / 2).backward()
            optimizer.step()
            state["number"] += 1

    return run


def rpc(settings: SideSettings) -> Callable[[int], None]:
    import torch
    from torch.distributed import rpc as torch_rpc

    torch.set_num_threads(1)
    _join_rpc(settings, "worker", 0)
    made = [torch.from_numpy(ids) for ids in batches()]
    state = {"number": 0}

    def run(steps: int) -> None:
        for _ in range(steps):
            ids = made[state["number"] % _BATCHES]
            distinct, inverse = torch.unique(ids, return_inverse=True)
            rows = torch_rpc.rpc_sync("server", rpc_pull, args=(distinct,)).requires_grad_()
            out = rows[inverse]
            (out * out).sum().mul(SCALE / 2).backward()
            torch_rpc.rpc_sync("server", rpc_push, args=(distinct, rows.grad))
            state["number"] += 1

    return run


_rpc_state: dict[str, Any] = {}


def rpc_pull(ids: Any) -> Any:
    import torch

    with torch.no_grad():
        return _rpc_state["table"](ids)


def rpc_push(ids: Any, gradients: Any) -> None:
    import torch

    table, optimizer = _rpc_state["table"], _rpc_state["optimizer"]
    table.weight.grad = torch.sparse_coo_tensor(ids[None], gradients, table.weight.shape)
    optimizer.step()


def rpc_server(settings: SideSettings) -> Callable[[int], None]:
    import torch
    from torch.distributed import rpc as torch_rpc

    torch.set_num_threads(1)
    table = torch.nn.Embedding(IDS, WIDTH)
    _rpc_state["table"] = table
    _rpc_state["optimizer"] = torch.optim.Adagrad(table.parameters(), lr=LR)
    _join_rpc(settings, "server", 1)
    torch_rpc.shutdown()
    return lambda steps: None


def _join_rpc(settings: SideSettings, name: str, rank: int) -> None:
    import warnings

    from torch.distributed import rpc as torch_rpc

    warnings.simplefilter("ignore")
    options = torch_rpc.TensorPipeRpcBackendOptions(init_method=settings.rendezvous, num_worker_threads=4)
    torch_rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)  # type: ignore[no-untyped-call]


MODES = {"remote": remote, "local": local, "embedding": embedding, "rpc": rpc, "rpc-server": rpc_server}


def main() -> None:
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=SideSettings)
    run = MODES[settings.mode](settings)
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.process_time()
        run(int(line))
        print(time.process_time() - began, flush=True)
    os._exit(0)


if __name__ == "__main__":
    # Remote calls name functions by module: it must be the same in both processes.
    sys.modules["side_ps"] = sys.modules["__main__"]
    for function in (rpc_pull, rpc_push):
        function.__module__ = "side_ps"
    main()
