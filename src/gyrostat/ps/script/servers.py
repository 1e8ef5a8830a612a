"""`gyrostat.servers(job)`: parameters on servers, shared by workers that come and go.

    job = gyrostat.init(seed=7)
    servers = gyrostat.servers(job, staleness=None)
    items = servers.table("items", width=16, optimizer=RowAdagrad(lr=0.05))
    servers.track(model=model, optimizer=Adam(lr=0.001))
    for epoch in job.epochs(5):
        for step in job.steps(job.shards(data, batch_size=512, shard_size=8192)):
            for ids, y in step:
                step.backward(loss_fn(model(items(ids)), y))

Under `gyrostat run --servers S --workers P` the servers are processes of their own; a plain `python train.py` keeps all in
the process. `server_loops.py` has the loops.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from gyrostat.core.errors import Misuse, UsageError
from gyrostat.engine.script import session
from gyrostat.engine.script.job import Job
from gyrostat.ps.client.local import LocalServers
from gyrostat.ps.client.port import ParameterServers
from gyrostat.ps.client.remote import RemoteServers
from gyrostat.ps.client.replay import replaying
from gyrostat.ps.script.batch_exchange import BatchExchange
from gyrostat.ps.script.dense_part import DensePart
from gyrostat.ps.script.server_loops import ServerLoops, ServerParts
from gyrostat.ps.script.table import ServerTable
from gyrostat.ps.store.optimizers import AnyOptimizer
from gyrostat.ps.store.spec import TableSpec

DEFAULT_SLOTS = 64


def servers(job: Job, *, staleness: int | None = None, slots: int = DEFAULT_SLOTS) -> JobServers:
    """Keep this job's parameters on servers. Call it directly after `gyrostat.init`.

    `staleness=None`: asynchronous; every update is applied exactly once, when it comes. `staleness=k`: steps of N batches are
    applied in order, and a batch of step s is computed with all steps before s-k; 0 is synchronous, with the same bits on any
    number of workers and servers. `slots`: the most parts that servers can divide the parameters into, a power of two.
    """
    if not isinstance(job, Job):
        raise UsageError(f"gyrostat.servers needs the job of gyrostat.init, got a {type(job).__name__}")
    if staleness is not None and (not isinstance(staleness, int) or staleness < 0):
        raise UsageError(f"staleness must be None or a whole number of at least 0, got {staleness!r}")
    if staleness is None and job.virtual_workers > 1:
        raise UsageError(
            f"N = {job.virtual_workers} virtual workers need steps, which an asynchronous job does not have; give "
            "gyrostat.servers(job, staleness=0) or more, or one virtual worker"
        )
    return JobServers(job, staleness=staleness, slots=slots)


class JobServers:
    """The servers of a job, as a script sees them."""

    def __init__(self, job: Job, *, staleness: int | None, slots: int) -> None:
        assignment, supervisor, requests = session.surroundings()
        access = assignment.servers
        replayed = replaying()
        policy = assignment.options.checkpoint
        self._port: ParameterServers = replayed or (
            LocalServers() if policy is None else LocalServers(Path(policy.directory), policy.every)
        )
        if access is not None:
            self._port = RemoteServers(access.address, access.token, access.worker)
        recorded = replayed is not None or (access is not None and access.record)
        if recorded and staleness is not None:
            raise UsageError(
                f"--record is for asynchronous jobs, and the script says staleness={staleness}; without staleness there is an "
                "order to record, and with staleness=0 a plain `python` run repeats the job"
            )
        self._slots, self._seed = slots, job.seed
        self._tables: list[ServerTable] = []
        self._dense: list[DensePart] = []
        self._names: list[str] = []
        self._exchange = BatchExchange(self._port, self._names, self._dense, recorded=recorded)
        self._loops = ServerLoops(
            ServerParts(
                servers=self._port,
                exchange=self._exchange,
                tables=self._tables,
                dense=self._dense,
                supervisor=supervisor,
                requests=requests,
                seed=job.seed,
                staleness=staleness,
                virtual_workers=job.virtual_workers,
                slots=slots,
                record=recorded,
                remote=access is not None,
            )
        )
        job.replace_loops(self._loops)
        self._loops.begin()

    def table(
        self,
        name: str,
        *,
        width: int,
        optimizer: AnyOptimizer,
        initial_scale: float = 0.0625,
        enter_after: int = 1,
        expire_after: int = 0,
    ) -> ServerTable:
        """A table of rows by 64-bit id. A new row is uniform in [-initial_scale, initial_scale), a function of the job's seed,
        the table's name and the id. `enter_after`: the number of gradients before a row is kept. `expire_after`: updates
        without a gradient after which it is removed; 0: never."""
        self._before_training("servers.table")
        spec = TableSpec(
            name=name,
            width=width,
            optimizer=_checked_optimizer(optimizer),
            initial_scale=initial_scale,
            seed=self._seed,
            enter_after=enter_after,
            expire_after=expire_after,
        )
        if name in self._names:
            raise UsageError(f"two tables have the name {name!r}; give each its own")
        made = ServerTable(len(self._tables), spec, self._exchange)
        self._tables.append(made)
        self._names.append(name)
        return made

    def track(self, *, optimizer: AnyOptimizer, **modules: nn.Module) -> None:
        """Keep the parameters of modules on the servers, each under the name it is given."""
        self._before_training("servers.track")
        _checked_optimizer(optimizer)
        if not modules:
            raise UsageError("servers.track needs a module: servers.track(model=model, optimizer=…)")
        for name, module in modules.items():
            if any(part.name == name for part in self._dense):
                raise Misuse(f"servers.track({name}=…) twice; give every module a name of its own")
            self._dense.append(DensePart(name, module, optimizer, self._slots))

    def digest(self) -> str:
        """A digest of all rows, parameters and optimizer state. Call it outside the loops."""
        self._loops.require_no_loop("servers.digest")
        return self._port.digest()

    def _before_training(self, what: str) -> None:
        if self._loops.opened:
            raise Misuse(
                f"{what} after the first job.steps; declare tables and modules before training begins"
            )


def _checked_optimizer(optimizer: Any) -> AnyOptimizer:
    if isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"the parameters are on servers, and so is their optimizer: give one of gyrostat.optim, such as "
            f"Adam(lr=…), not torch.optim.{type(optimizer).__name__}"
        )
    if not isinstance(optimizer, AnyOptimizer):
        raise UsageError(f"optimizer must be one of gyrostat.optim, got {optimizer!r}")
    return optimizer
