"""The private parts of torch that the engine uses, all in one place: the file to check when a new torch is released.

They are the parts of DDP itself: its bucket assignment, raw process groups and their stores. `data/torch_internals.py` is
the same for data workers.
"""

from __future__ import annotations

import socket
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


def rendezvous(address: str, workers: int, prefix: str, timeout: timedelta) -> Any:
    """The store through which workers connect: a file of this machine, or `tcp://HOST:PORT/NAME`, which an agent serves."""
    if not address.startswith("tcp://"):
        return _dist.PrefixStore(prefix, _dist.FileStore(address, workers))
    server, _, name = address.removeprefix("tcp://").partition("/")
    host, _, port = server.rpartition(":")
    client = _dist.TCPStore(host.strip("[]"), int(port), is_master=False, timeout=timeout)
    return _dist.PrefixStore(f"{name}/{prefix}", client)


def rendezvous_server(listener: socket.socket) -> Any:
    """A store for `tcp://` addresses, on a socket that listens already. It serves until it is garbage-collected."""
    host, port = listener.getsockname()[:2]
    return _dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def hash_store() -> Any:
    """A store for threads of this process."""
    return _dist.HashStore()


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta, host: str = "127.0.0.1") -> Any:
    """A raw gloo process group; this process listens at `host`.

    Unlike `init_process_group`, several may coexist, and making one takes half a millisecond.
    """
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return _dist.ProcessGroupGloo(store, rank, size, options)


def nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A raw NCCL process group. It connects with its first collective, on the device of its tensors."""
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


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """`target.copy_(source)` for each, in one call."""
    if targets:
        with torch.no_grad():
            _torch._foreach_copy_(targets, sources)
