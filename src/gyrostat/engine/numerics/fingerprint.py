"""The fingerprint: what decides a job's bits besides script, data, seed and N, namely the machine's arithmetic and settings.

A worker with another fingerprint must not join a job, nor may a job resume from a checkpoint with another one. The entries
depend on the level of determinism; `core/determinism.py` has the table.
"""

from __future__ import annotations

import torch

from gyrostat.core.determinism import FINGERPRINT, spans_vendors, variables, weakest
from gyrostat.core.job import Assignment, Determinism
from gyrostat.engine.environment import worker_environment
from gyrostat.engine.numerics.determinism import cpu, threads

# Variables that change which instructions the libraries choose.
_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
)
# Instruction sets that oneDNN and MKL choose kernels by.
_SETS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_int8",
    "avx_vnni",
    "fma",
    "asimd",
)


def fingerprint(assignment: Assignment, device: torch.device) -> dict[str, str]:
    """The fingerprint of this worker."""
    options = assignment.options
    if not options.check_fingerprint:
        return {"fingerprint": "not checked"}
    level, pool = options.determinism, options.pool
    vendor, flags = cpu()
    entries = {
        "torch": str(torch.__version__),
        "threads": str(threads(options)),
        "determinism": str(level),
        "reduction": str(options.reduction),
        "device": device.type,
        "cpu": " ".join([vendor, *(name for name in _SETS if name in flags)]),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "placement": ",".join(
            f"{segment.worker}:{segment.start}-{segment.stop - 1}"
            for segment in assignment.placement.segments
        ),
    }
    if device.type == "cuda":
        entries["gpu"] = torch.cuda.get_device_name(device)
    if pool is not None:
        entries["pool"] = ",".join(pool.types)
    host = entries["cpu"]
    entries = {name: value for name, value in entries.items() if level in FINGERPRINT[name]}
    if assignment.paced is not None:
        entries["paced"] = "yes"  # the rate is left out: time decides no bits
    if device.type == "cuda":
        entries["cuda"] = str(torch.version.cuda)
    present = worker_environment().variables
    if level is not Determinism.HETEROGENEOUS:
        return entries | {name: present[name] for name in _VARIABLES if name in present}
    if pool is None or weakest(pool) is None:
        entries["cpu"] = host  # of a GPU's host, where nothing is pinned
    elif not spans_vendors(pool):
        entries["cpu vendor"] = vendor
    return entries | {name: present.get(name, "") for name in variables(level, pool, "cpu")}
