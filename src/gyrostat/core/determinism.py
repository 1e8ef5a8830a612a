"""The settings that each level of determinism pins: one table, which the engine applies and the docs show.

A level defines what may change without changing a bit (EasyScale §3.3): only time under `static`, the number of workers under
`elastic`, also the type of their devices under `heterogeneous`. For the latter a job declares a pool of device types, and all
workers compute with the instruction set of the weakest type. `engine/numerics/determinism.py` applies the pins;
`engine/numerics/fingerprint.py` derives from the same table what must agree among workers. Pure: the machine is not
inspected.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from gyrostat.core.errors import UsageError
from gyrostat.core.job import Determinism, DevicePool

CPU_TYPES = ("sse", "avx2", "avx512")
"""From the weakest to the strongest; each includes the instructions of those before it."""

_EVERY = frozenset(Determinism)
_MIXED = frozenset({Determinism.HETEROGENEOUS})
_ONE_TYPE = _EVERY - _MIXED


@dataclass(frozen=True, kw_only=True)
class Pin:
    """One setting that decides bits."""

    device: str
    """`cpu` or `cuda`."""
    what: str
    by: str
    """An environment variable, or the dotted name of a function or attribute of torch."""
    value: str | bool | Mapping[str, str]
    """The value; if it depends on the pool, by the pool's weakest CPU type."""
    levels: frozenset[Determinism]

    @property
    def is_variable(self) -> bool:
        return self.by.isupper()


PINS = (
    Pin(device="cpu", what="number of threads", by="torch.set_num_threads", value="--threads", levels=_EVERY),
    Pin(
        device="cpu",
        what="instruction set of ATen",
        by="ATEN_CPU_CAPABILITY",
        value={"sse": "default", "avx2": "avx2", "avx512": "avx512"},
        levels=_MIXED,
    ),
    Pin(
        device="cpu",
        what="instruction set of oneDNN",
        by="ONEDNN_MAX_CPU_ISA",
        value={"sse": "SSE41", "avx2": "AVX2", "avx512": "AVX512_CORE"},
        levels=_MIXED,
    ),
    Pin(
        device="cpu",
        what="instruction set of MKL",
        by="MKL_CBWR",
        value={"sse": "COMPATIBLE", "avx2": "AVX2", "avx512": "AVX512"},
        levels=_MIXED,
    ),
    Pin(
        device="cuda",
        what="deterministic kernels only",
        by="torch.use_deterministic_algorithms",
        value=True,
        levels=_EVERY,
    ),
    Pin(
        device="cuda",
        what="workspace of cuBLAS",
        by="CUBLAS_WORKSPACE_CONFIG",
        value=":4096:8",
        levels=_EVERY,
    ),
    Pin(
        device="cuda",
        what="choice of kernels by measuring",
        by="torch.backends.cudnn.benchmark",
        value=False,
        levels=_EVERY,
    ),
    Pin(
        device="cuda",
        what="TF32 in matrix products",
        by="torch.backends.cuda.matmul.allow_tf32",
        value=False,
        levels=_MIXED,
    ),
    Pin(
        device="cuda",
        what="TF32 in convolutions",
        by="torch.backends.cudnn.allow_tf32",
        value=False,
        levels=_MIXED,
    ),
    Pin(
        device="cuda",
        what="flash attention",
        by="torch.backends.cuda.enable_flash_sdp",
        value=False,
        levels=_MIXED,
    ),
    Pin(
        device="cuda",
        what="memory-efficient attention",
        by="torch.backends.cuda.enable_mem_efficient_sdp",
        value=False,
        levels=_MIXED,
    ),
    Pin(
        device="cuda",
        what="attention of cuDNN",
        by="torch.backends.cuda.enable_cudnn_sdp",
        value=False,
        levels=_MIXED,
    ),
)

FINGERPRINT = {
    "torch": _EVERY,
    "threads": _EVERY,
    "determinism": _EVERY,
    "reduction": _EVERY,
    "device": _EVERY,
    "cpu capability": _EVERY,
    "placement": frozenset({Determinism.STATIC}),
    "cpu": _ONE_TYPE,
    "gpu": _ONE_TYPE,
    "pool": _MIXED,
}
"""What must agree among workers, and with a checkpoint, besides the pins: the levels at which it must."""

STARTED_AS: Mapping[str, Mapping[str, str]] = {
    "sse": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "avx512": {},
}
"""The environment in which a process computes like a machine of a weaker type."""


def parse_pool(text: str, *, threads: int = 1) -> DevicePool:
    """`avx512,avx2`: the device types that a job may use. Names that are not CPU types are parts of GPU names."""
    types = [part.strip().lower() for part in text.split(",")]
    if "" in types or len(set(types)) != len(types):
        raise UsageError(
            f"--pool takes different device types, such as avx512,avx2 ({', '.join(CPU_TYPES)}, or names of GPUs); got {text!r}"
        )
    for name in types:
        if name not in CPU_TYPES and (near := difflib.get_close_matches(name, CPU_TYPES, n=1)):
            raise UsageError(f"--pool {text}: no CPU or GPU is of type {name!r}; did you mean {near[0]!r}?")
    return DevicePool(types=tuple(sorted(types, key=_rank, reverse=True)), threads=threads)


def weakest(pool: DevicePool) -> str | None:
    """The weakest CPU type of a pool; None if it has only GPUs."""
    types = [name for name in pool.types if name in CPU_TYPES]
    return min(types, key=_rank) if types else None


def variables(level: Determinism, pool: DevicePool | None, device: str) -> dict[str, str]:
    """The environment variables that a level pins for workers on `device`."""
    found = {}
    for pin in PINS:
        if pin.device == device and pin.is_variable and level in pin.levels:
            if isinstance(pin.value, Mapping):
                common = None if pool is None else weakest(pool)
                if common is not None:
                    found[pin.by] = pin.value[common]
            else:
                found[pin.by] = str(pin.value)
    return found


def started_as(environment: Mapping[str, str], strongest: str) -> str:
    """The type that a CPU of type `strongest` computes as, if the process's environment limits its libraries."""
    held = [strongest]
    for name in CPU_TYPES:
        for variable, value in STARTED_AS[name].items():
            if environment.get(variable, "").lower() == value.lower():
                held.append(name)
    return min(held, key=_rank)


def spans_vendors(pool: DevicePool) -> bool:
    """Whether MKL computes the same on CPUs of all vendors: on other CPUs than Intel's only its weakest setting works."""
    return weakest(pool) == CPU_TYPES[0]


def table() -> list[str]:
    """The table of docs/reference/determinism.md, line by line."""
    lines = [
        "| on | pinned | by | static | elastic | heterogeneous |",
        "|---|---|---|---|---|---|",
    ]
    for pin in PINS:
        cells = [_shown(pin) if level in pin.levels else "–" for level in Determinism]
        lines.append(f"| {pin.device} | {pin.what} | `{pin.by}` | {' | '.join(cells)} |")
    for name, levels in FINGERPRINT.items():
        cells = ["must agree" if level in levels else "–" for level in Determinism]
        lines.append(f"| fingerprint | {name} | | {' | '.join(cells)} |")
    return lines


def _shown(pin: Pin) -> str:
    if isinstance(pin.value, Mapping):
        return ", ".join(f"{name}: `{value}`" for name, value in pin.value.items())
    return {True: "on", False: "off"}[pin.value] if isinstance(pin.value, bool) else f"`{pin.value}`"


def _rank(name: str) -> tuple[int, str]:
    return (CPU_TYPES.index(name) if name in CPU_TYPES else len(CPU_TYPES), name)
