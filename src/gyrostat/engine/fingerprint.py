"""What besides script, data, seed and N decides a job's bits: the machine's arithmetic and its settings.

Workers with another fingerprint must not join a job, nor may a job go on from a checkpoint with another one.
"""

from __future__ import annotations

import os
import platform

import torch

from gyrostat.core.job import Determinism, Reduction

# Pins that change which instructions the libraries choose.
_PINS = (
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


def fingerprint(
    *, threads: int, determinism: Determinism, reduction: Reduction, device: torch.device
) -> dict[str, str]:
    """The fingerprint of this worker."""
    entries = {
        "torch": str(torch.__version__),
        "threads": str(threads),
        "determinism": str(determinism),
        "reduction": str(reduction),
        "device": device.type,
        "cpu": _cpu(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
    }
    entries |= {name: os.environ[name] for name in _PINS if name in os.environ}
    if device.type == "cuda":
        entries["gpu"] = torch.cuda.get_device_name(device)
        entries["cuda"] = str(torch.version.cuda)
    return entries


def _cpu() -> str:
    """Vendor and the instruction sets that matter."""
    vendor, flags = platform.machine(), set[str]()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "vendor_id":
                    vendor = value.strip()
                elif key.strip() in ("flags", "Features"):
                    flags = set(value.split())
                    break
    except OSError:
        pass
    return " ".join([vendor, *(name for name in _SETS if name in flags)])
