"""The private parts of torch that gyrostat leans on, all in one place.

They are what DDP itself is made of: its bucket assignment, raw process groups and their stores. None is public, so
this is the file to look at when a new torch comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as _distributed

_dist: Any = _distributed
_torch: Any = torch

FIRST_BUCKET_BYTES: int = _dist._DEFAULT_FIRST_BUCKET_BYTES
"""DDP's cap for the first bucket: 1 MiB."""


def assign_buckets(
    parameters: Sequence[torch.Tensor], caps: Sequence[int], numbers: Sequence[int]
) -> list[list[int]]:
    """DDP's own assignment of parameters, known by `numbers`, to buckets of at most `caps` bytes."""
    assigned, _ = _dist._compute_bucket_assignment_by_size(
        list(parameters), list(caps), [False] * len(parameters), list(numbers)
    )
    return [list(bucket) for bucket in assigned]


def file_store(path: str, workers: int, prefix: str) -> Any:
    """A rendezvous through a file of this machine."""
    return _dist.PrefixStore(prefix, _dist.FileStore(path, workers))


def hash_store() -> Any:
    """A rendezvous within this process."""
    return _dist.HashStore()


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A raw gloo process group on loopback.

    Unlike `init_process_group`, several may coexist, and making one takes half a millisecond.
    """
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return _dist.ProcessGroupGloo(store, rank, size, options)


def nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A raw NCCL process group. It connects with its first collective, on the device of that one's tensors."""
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _dist.ProcessGroupNCCL(store, rank, size, options)


def outside_graphs(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook that torch.compile does not trace into. Does not import the compiler."""

    def call(*args: Any) -> None:
        hook(*args)

    disabled: Callable[..., None] = _torch._disable_dynamo(call)
    return disabled


def keeping_versions(tensors: Sequence[torch.Tensor]) -> Any:
    """A context in which changes of `tensors` are hidden from autograd's version check, as DDP hides its broadcasts."""
    return _torch.autograd._unsafe_preserve_version_counter(tuple(tensors))
