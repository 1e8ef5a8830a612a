"""Applies the settings of `core/determinism.py` to a worker, and refuses a worker that cannot have them.

At two moments. `pin` runs before the first operator, because libraries examine the machine then (the fork server runs no
operator, so a forked worker is in time): it sets environment variables and the number of threads. `prepare` runs when the
script joins its job: it sets what is set through torch, and checks that the variables have taken effect.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from operator import attrgetter

import torch

from gyrostat.core.determinism import CPU_TYPES, PINS, started_as, variables, weakest
from gyrostat.core.errors import Misuse, OtherFingerprint
from gyrostat.core.job import DevicePool, TrainingOptions
from gyrostat.engine.environment import pin_variables, worker_environment

_CAPABILITIES = {"sse": "DEFAULT", "avx2": "AVX2", "avx512": "AVX512"}
# The instruction sets that make a CPU one of a type: those that ATen asks for.
_FLAGS = {"avx2": {"avx2", "fma"}, "avx512": {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx2", "fma"}}


def pin(options: TrainingOptions) -> None:
    """Set environment variables and threads, before the first operator. Raises if this machine cannot have them."""
    if options.pool is not None:
        _check_member(options.pool)
    pin_variables(variables(options.determinism, options.pool, "cpu"))
    torch.set_num_threads(threads(options))


def prepare(options: TrainingOptions) -> torch.device:
    """Make the settings of torch, when the script joins. Returns the worker's device."""
    torch.set_num_threads(threads(options))
    if options.pool is not None:
        _check_pinned(options.pool)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    pin_variables(variables(options.determinism, options.pool, "cuda"), keep_existing=True)
    for setting in PINS:
        if setting.device == "cuda" and not setting.is_variable and options.determinism in setting.levels:
            _set(setting.by, bool(setting.value))
    device = _cuda_device()
    torch.cuda.set_device(device)
    return device


def gpu(device: torch.device) -> str:
    """A name of the GPU that is unique over all machines; empty if the device is not one."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def threads(options: TrainingOptions) -> int:
    """The number of threads that the worker computes with."""
    return options.threads if options.pool is None else options.pool.threads


def cpu_type(environment: Mapping[str, str]) -> str | None:
    """The type of this machine's CPU, as libraries see it in an environment; None if it has no name here."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    _, flags = cpu()
    strongest = [name for name in CPU_TYPES if _FLAGS.get(name, set()) <= flags][-1]
    return started_as(environment, strongest)


@cache
def cpu() -> tuple[str, frozenset[str]]:
    """Vendor and instruction sets."""
    vendor, flags = platform.machine(), frozenset[str]()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "vendor_id":
                    vendor = value.strip()
                elif key.strip() in ("flags", "Features"):
                    flags = frozenset(value.split())
                    break
    except OSError:
        pass
    return vendor, flags


def _cuda_device() -> torch.device:
    """One GPU for each worker of this machine; workers share if there are more of them than GPUs."""
    return torch.device("cuda", worker_environment().local_rank % torch.cuda.device_count())


def _check_member(pool: DevicePool) -> None:
    """A CPU must have the instruction sets of the pool's weakest; a GPU must be one that the pool names."""
    common = weakest(pool)
    mine = cpu_type(worker_environment().variables)
    if common is not None and (mine is None or CPU_TYPES.index(mine) < CPU_TYPES.index(common)):
        raise OtherFingerprint(
            f"this worker's CPU is of type {mine or platform.machine()}, weaker than the weakest of the job's pool "
            f"({', '.join(pool.types)}), so it would compute other bits. Run it elsewhere, or start the job anew with a "
            "pool that has this type"
        )
    gpus = [name for name in pool.types if name not in CPU_TYPES]
    found = torch.cuda.get_device_name(_cuda_device()) if torch.cuda.is_available() else "no GPU"
    if gpus and not any(name in found.lower() for name in gpus):
        raise OtherFingerprint(
            f"this worker has {found}, but the job's pool has {', '.join(gpus)}. Run it elsewhere, or start the job anew with "
            "another pool"
        )


def _check_pinned(pool: DevicePool) -> None:
    common = weakest(pool)
    if common is None:
        return
    found = torch.backends.cpu.get_cpu_capability()
    if found != _CAPABILITIES[common]:
        raise Misuse(
            f"the pool ({', '.join(pool.types)}) asks for {_CAPABILITIES[common]}, but torch computes with {found}: "
            "an operator ran before the job's settings could be made, or this build of torch does not have it; run no operator "
            "before gyrostat.init, or use another build"
        )


def _set(name: str, value: bool) -> None:
    """`torch.some.function(value)`, or `torch.some.attribute = value`."""
    owner_name, _, attribute = name.removeprefix("torch.").rpartition(".")
    owner = attrgetter(owner_name)(torch) if owner_name else torch
    if callable(getattr(owner, attribute)):
        getattr(owner, attribute)(value)
    else:
        setattr(owner, attribute, value)
