"""Runs the probe's operators in this process and digests their results."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from gyrostat.core.job import DevicePool
from gyrostat.engine.environment import worker_environment
from gyrostat.engine.numerics.determinism import cpu, cpu_type
from gyrostat.engine.numerics.probe.operators import FAMILIES
from gyrostat.engine.numerics.probe.result import ProbeResult
from gyrostat.engine.state.tensorbytes import tensor_bytes


def run_probe(*, pool: DevicePool | None, type: str | None = None) -> ProbeResult:
    """Run all operators with torch's current settings. `type`: the CPU's before settings were pinned; None: this process's."""
    operators = {}
    for family, members in FAMILIES.items():
        for name, operator in members().items():
            torch.manual_seed(1)
            operators[f"{family}/{name}"] = _digest(operator())
    return ProbeResult(
        torch=str(torch.__version__),
        cpu=cpu()[0],
        type=cpu_type(worker_environment().variables) if type is None else type,
        capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        pool=None if pool is None else pool.types,
        operators=operators,
    )


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hasher.update(tensor_bytes(tensor))
    return hasher.hexdigest()[:16]
