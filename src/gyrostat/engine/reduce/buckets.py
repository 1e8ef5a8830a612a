"""Assigns parameters to buckets as unmodified DDP does; a bucket is flat memory with a view per parameter.

DDP begins with one bucket per type of parameter, in order of definition. After its first reduction it rebuilds them in the
order in which rank 0's gradients became ready, with a cap of 1 MiB for the first bucket and 25 MiB for the others. With
`find_unused_parameters` it starts capped and never rebuilds; with `static_graph` it rebuilds one reduction later.
The position of a parameter in its bucket decides its chunk, and so the order in which it is added: the layout is part of
the job's state.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from gyrostat.core.errors import Refused, UsageError
from gyrostat.engine.state.tensorbytes import aligned, is_dense
from gyrostat.engine.torch_internals import FIRST_BUCKET_BYTES, assign_buckets
from gyrostat.engine.transport.shared_region import SharedRegion

Layout = tuple[tuple[int, ...], ...]
"""Buckets as parameter numbers, in the order in which the buckets are reduced."""

_HOST = torch.device("cpu")
_MIB = 1 << 20
_DEFAULT_CAP_MB = 25

_REFUSED = {
    "process_group": "gyrostat brings the process group",
    "device_mesh": "gyrostat brings the process group",
    "device_ids": "the device is job.device",
    "output_device": "the device is job.device",
    "mixed_precision": "use torch.autocast",
    "batched_grad_copy": "it changes how gradients are scaled",
    "skip_all_reduce_unused_params": "every worker must know which parameters were used",
    "bucket_cap_mb_list": "give one bucket_cap_mb",
    "delay_all_reduce_named_params": "every gradient is reduced by gyrostat",
    "param_to_hook_all_reduce": "every gradient is reduced by gyrostat",
    "init_sync": "all workers build the same objects",
    "check_reduction": "DDP does not use it any more",
    "dim": "DDP does not use it on one device",
}


@dataclass(frozen=True, kw_only=True)
class DdpOptions:
    """DDP's own options that have a meaning here, with DDP's defaults."""

    broadcast_buffers: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    bucket_cap_mb: float | None = None

    @classmethod
    def parse(cls, given: dict[str, Any]) -> DdpOptions:
        """Check the options given as `track(ddp={…})`."""
        given = dict(given)
        if "forward_sync_buffers" in given:
            given["broadcast_buffers"] = given.pop("forward_sync_buffers")
        known = {field.name for field in fields(cls)}
        for name, value in given.items():
            if name in _REFUSED:
                raise Refused(
                    f"the DDP option {name}={value!r} cannot be used under gyrostat: {_REFUSED[name]}"
                )
            if name not in known:
                raise UsageError(
                    f"DistributedDataParallel has no option {name!r}; use one of {sorted(known)}"
                )
        return cls(**given)

    @property
    def tolerates_unused(self) -> bool:
        return self.find_unused_parameters or self.static_graph

    @property
    def rebuilds_after(self) -> int | None:
        """The number of reductions after which buckets are rebuilt, or None for never."""
        if self.static_graph:
            return 2
        return None if self.find_unused_parameters else 1

    def caps(self) -> list[int]:
        """Caps in bytes: of the first bucket, then of the others."""
        if self.bucket_cap_mb is None:
            return [FIRST_BUCKET_BYTES, _DEFAULT_CAP_MB * _MIB]
        return [int(self.bucket_cap_mb * _MIB)]


def initial_layout(parameters: Sequence[torch.Tensor], options: DdpOptions) -> Layout:
    """The layout of the first reduction."""
    capped = options.find_unused_parameters and not options.static_graph
    caps = options.caps() if capped else [sys.maxsize]
    assigned = assign_buckets(parameters, caps, range(len(parameters)))
    return tuple(tuple(bucket) for bucket in reversed(assigned))


def rebuilt_layout(parameters: Sequence[torch.Tensor], ready: Sequence[int], options: DdpOptions) -> Layout:
    """The layout after virtual worker 0's gradients became ready in the order `ready`."""
    assigned = assign_buckets([parameters[i] for i in ready], options.caps(), ready)
    return tuple(tuple(bucket) for bucket in assigned)


class FlatBuckets:
    """Memory for one set of gradients in a layout: a flat tensor per bucket, a view per parameter.

    `pinned`: page-locked host memory, for gradients of a GPU (`host_copies.py`). `shared`: a `region` that peers can map.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        layout: Layout,
        *,
        home: torch.device = _HOST,
        pinned: bool = False,
        shared: bool = False,
    ) -> None:
        self.flats: list[torch.Tensor] = []
        self._starts: list[int] = []
        sizes = [sum(parameters[i].numel() for i in bucket) for bucket in layout]
        self.region: SharedRegion | None = None
        if shared:
            room = sum(
                aligned(n * parameters[b[0]].element_size()) for n, b in zip(sizes, layout, strict=True)
            )
            self.region = SharedRegion(max(room, 1))
        views: list[torch.Tensor | None] = [None] * len(parameters)
        start = 0
        for bucket, size in zip(layout, sizes, strict=True):
            first = parameters[bucket[0]]
            if self.region is not None:
                length = size * first.element_size()
                flat = self.region.memory[start : start + length].view(first.dtype)
                self._starts.append(start)
                start += aligned(length)
            else:
                flat = torch.empty(size, dtype=first.dtype, device=home, pin_memory=pinned)
            offset = 0
            for i in bucket:
                views[i] = view_like(flat, parameters[i], offset)
                offset += parameters[i].numel()
            self.flats.append(flat)
        self.views: list[torch.Tensor] = [view for view in views if view is not None]

    def within(self, memory: torch.Tensor, bucket: int) -> torch.Tensor:
        """The same bucket in a peer's region, which has the same layout."""
        flat, start = self.flats[bucket], self._starts[bucket]
        return memory[start : start + flat.nbytes].view(flat.dtype)


def shape_of(parameter: torch.Tensor) -> torch.Tensor:
    """Size, strides and type of a parameter, without memory."""
    return torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device="meta")


def view_like(flat: torch.Tensor, parameter: torch.Tensor, offset: int) -> torch.Tensor:
    """A part of `flat` in the shape of `parameter`."""
    # Like DDP, a bucket holds a dense parameter in its own memory order (channels_last stays so).
    if is_dense(parameter.size(), parameter.stride()):
        return flat.as_strided(parameter.size(), parameter.stride(), flat.storage_offset() + offset)
    return flat.narrow(0, offset, parameter.numel()).view(parameter.size())
