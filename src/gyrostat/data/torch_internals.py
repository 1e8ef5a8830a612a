"""The private parts of `torch.utils.data` and `torch.multiprocessing` that data workers use, all in one place.

A data worker does what torch's own does, for several ranks in turn: it needs torch's fetchers, its record of the data worker
that runs, its seeds for NumPy, and shared memory by file descriptor. `engine/torch_internals.py` is the same for the engine.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import _utils
from torch.utils.data.dataloader import _DatasetKind
from torch.utils.data.dataloader import _InfiniteConstantSampler as InfiniteConstantSampler

__all__ = ["InfiniteConstantSampler"]

_torch_utils: Any = torch._utils
_multiprocessing: Any = torch.multiprocessing
_worker: Any = _utils.worker
_kind: Any = _DatasetKind
_storage: Any = torch.UntypedStorage


def make_fetcher(
    dataset: Any, *, iterable: bool, auto_collation: bool, collate_fn: Any, drop_last: bool
) -> Any:
    """An object that makes the batch of an index. It takes the iterator of an iterable dataset at once."""
    kind = _kind.Iterable if iterable else _kind.Map
    return _kind.create_fetcher(kind, dataset, auto_collation, collate_fn, drop_last)


def set_worker_info(number: int, of: int, seed: int, dataset: Any) -> None:
    """Set what `get_worker_info()` returns."""
    _worker._worker_info = _worker.WorkerInfo(id=number, num_workers=of, seed=seed, dataset=dataset)


def numpy_seed(base_seed: int, number: int) -> list[int]:
    """The seed of data worker `number` for NumPy."""
    seed: list[int] = _worker._generate_state(base_seed, number)
    return seed


def default_convert() -> Callable[[Any], Any]:
    """The default `collate_fn` when batches are not collated."""
    convert: Callable[[Any], Any] = _utils.collate.default_convert
    return convert


def pinned(batch: Any) -> Any:
    """The batch, of any structure, in pinned memory for the present accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return _utils.pin_memory.pin_memory(batch, accelerator.type)  # type: ignore[no-untyped-call]


def wrap_exception(number: int) -> Any:
    """The exception that is being handled, with its traceback as text; `reraise()` raises it in another process."""
    wrapper = _torch_utils.ExceptionWrapper(where=f"in DataLoader worker process {number}")
    try:
        pickle.dumps(wrapper.exc_type)
    except Exception:  # a class that exists only in this process: the text has its name
        wrapper.exc_type = RuntimeError
    return wrapper


def shared_storage(size: int) -> Any:
    """Memory that can be sent as a file descriptor."""
    return _storage._new_shared(size)


def storage_file(storage: Any) -> tuple[int, int]:
    """File descriptor and size of a shared storage. The storage keeps the descriptor."""
    file, size = storage._share_fd_cpu_()
    return int(file), int(size)


def storage_from_file(file: int, size: int) -> Any:
    """The storage behind a file descriptor. It makes a descriptor of its own."""
    return _storage._new_shared_fd_cpu(file, size)


def share_by_file() -> bool:
    """Whether shared memory is made with file descriptors; the default."""
    return bool(_multiprocessing.get_sharing_strategy() == "file_descriptor")


def tensor_on(storage: Any, dtype: torch.dtype, offset: int, size: Any, stride: Any) -> torch.Tensor:
    """A tensor in the memory of `storage`."""
    tensor = torch.empty(0, dtype=dtype)
    return tensor.set_(storage, offset, size, stride)
