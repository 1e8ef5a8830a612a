"""The options of `job.dataloader`: DataLoader's, checked as DataLoader checks them, and ours."""

from __future__ import annotations

import multiprocessing.context
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.multiprocessing
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe, default_collate

from gyrostat.core.errors import NotYet, Refused, UsageError
from gyrostat.data import torch_internals
from gyrostat.data.loader import OrderedLoader
from gyrostat.data.order import Shuffle
from gyrostat.data.rng import Streams

_OTHERS: dict[str, Any] = {
    "sampler": None,
    "batch_sampler": None,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "generator": None,
    "prefetch_factor": None,
    "persistent_workers": False,
    "timeout": 0,
    "in_order": True,
    "lookahead": False,
}


def make_loader(
    dataset: Any,
    *,
    batch_size: Any,
    virtual_workers: int,
    shuffle: Shuffle,
    num_workers: int,
    drop_last: bool,
    pad: bool,
    pin_memory: bool,
    collate_fn: Callable[[list[Any]], Any] | None,
    others: dict[str, Any],
    number: int = 0,
    generator_owner: int = 0,
    ranks: Sequence[int] = (0,),
) -> OrderedLoader:
    """Check the user's options and make the loader. `ranks`: the virtual ranks of this worker."""
    for name in others:
        if name not in _OTHERS:
            raise UsageError(f"job.dataloader has no option {name!r}; use one of {sorted(_OTHERS)}")
    given = _OTHERS | others
    per_rank, datasets = _datasets(dataset, ranks)
    iterable = isinstance(datasets[ranks[0]], IterableDataset)
    if given["in_order"] is not True:
        raise Refused(
            f"in_order={given['in_order']!r} gives batches in the order in which data workers happen to finish them: no two "
            "runs would be equal; leave it out"
        )
    if not isinstance(shuffle, bool) and shuffle != "bijection":
        raise UsageError(
            f'shuffle={shuffle!r}: give True (DistributedSampler\'s order), "bijection" (one that needs no memory) or False'
        )
    sizes = _check_batches(batch_size, virtual_workers, drop_last, shuffle, iterable, given)
    if per_rank and not iterable:
        _check_per_rank(sizes, shuffle, pad)
    _check_samplers(given)
    _check_workers(num_workers, given)
    batch_sampler = given["batch_sampler"]
    auto_collation = batch_sampler is not None or batch_size is not None
    return OrderedLoader(
        dataset=dataset,
        per_rank=per_rank,
        iterable=iterable,
        number=number,
        batch_size=max(sizes) if sizes is not None else None if batch_sampler is not None else batch_size,
        sizes=sizes,
        virtual_workers=virtual_workers,
        shuffle=shuffle,
        drop_last=drop_last,
        pad=pad,
        sampler=given["sampler"],
        batch_sampler=batch_sampler,
        num_workers=num_workers,
        prefetch_factor=2 if given["prefetch_factor"] is None else given["prefetch_factor"],
        persistent_workers=given["persistent_workers"],
        lookahead=given["lookahead"] and num_workers == 0 and not iterable,
        timeout=given["timeout"],
        worker_init_fn=given["worker_init_fn"],
        generator=given["generator"],
        generator_owner=generator_owner,
        context=_context(given["multiprocessing_context"]),
        pin_memory=pin_memory,
        collate_fn=collate_fn or (default_collate if auto_collation else torch_internals.default_convert()),
        _datasets=datasets if per_rank else {},
        _samplers=_samplers(given["sampler"] if batch_sampler is None else batch_sampler, ranks),
    )


def _make_each(make: Callable[[int], Any], ranks: Sequence[int]) -> dict[int, Any]:
    """Call `make` for each rank, each time with the same streams: each rank of a DDP job would call it once."""
    streams = Streams()
    before = streams.save()
    made = {}
    for rank in ranks:
        streams.exchange(before)
        made[rank] = make(rank)
    return made


def _samplers(given: Any, ranks: Sequence[int]) -> dict[int, Any]:
    return {} if given is None or isinstance(given, Iterable) else _make_each(given, ranks)


def is_made_per_rank(dataset: Any) -> bool:
    """Whether it is a function, or a class, that makes the dataset of a rank."""
    is_dataset = hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")
    return isinstance(dataset, type) or (callable(dataset) and not is_dataset)


def _datasets(dataset: Any, ranks: Sequence[int]) -> tuple[bool, dict[int, Any]]:
    """Whether `dataset` makes the dataset of a rank; and the datasets of `ranks`."""
    per_rank = is_made_per_rank(dataset)
    datasets = _make_each(dataset, ranks) if per_rank else dict.fromkeys(ranks, dataset)
    made = datasets[ranks[0]]
    if isinstance(made, IterDataPipe | MapDataPipe):
        raise NotYet(
            f"{type(made).__name__} is a DataPipe, which torch no longer develops; wrap it in a Dataset or an IterableDataset"
        )
    if not isinstance(made, IterableDataset) and not hasattr(made, "__getitem__"):
        raise UsageError(
            f"{type(made).__name__} is not a dataset: it needs __len__ and __getitem__, or to be an IterableDataset; or give a "
            "callable that makes the dataset of a virtual rank"
        )
    return per_rank, datasets


def _check_batches(
    batch_size: Any,
    virtual_workers: int,
    drop_last: bool,
    shuffle: Shuffle,
    iterable: bool,
    given: dict[str, Any],
) -> tuple[int, ...] | None:
    sampler, batch_sampler = given["sampler"], given["batch_sampler"]
    sizes = tuple(batch_size) if isinstance(batch_size, (list, tuple)) else None
    if sizes is not None and len(sizes) != virtual_workers:
        raise UsageError(
            f"batch_size={list(sizes)} has {len(sizes)} entries, but the job has {virtual_workers} virtual workers; give one "
            "size for each, or one number for all"
        )
    for size in (batch_size,) if sizes is None else sizes:
        if (size is None and sizes is None) or (
            isinstance(size, int) and not isinstance(size, bool) and size >= 1
        ):
            continue
        raise UsageError(
            "batch_size must be a whole number of at least 1 per virtual worker, or None to leave batches to the dataset, got "
            f"{batch_size!r}"
        )
    if sizes is not None and (iterable or sampler is not None or batch_sampler is not None):
        raise UsageError(
            "a list of batch sizes goes with a map-style dataset and the job's own order, not with samplers or iterable "
            "datasets"
        )
    if batch_size is None and drop_last:
        raise UsageError("batch_size=None leaves batches to the dataset; drop_last has no meaning then")
    if iterable and (shuffle or sampler is not None or batch_sampler is not None):
        raise UsageError(
            "an iterable dataset decides its own order: leave out shuffle, sampler and batch_sampler"
        )
    if sampler is not None and shuffle:
        raise UsageError("sampler and shuffle exclude each other: the sampler decides the order")
    if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
        raise UsageError(
            "batch_sampler excludes batch_size, shuffle, sampler and drop_last: it decides all of that"
        )
    return sizes


def _check_per_rank(sizes: tuple[int, ...] | None, shuffle: Shuffle, pad: bool) -> None:
    """A map-style dataset of a rank belongs to that rank as a whole: nothing is divided, padded or cut."""
    if sizes is not None:
        raise UsageError(
            f"batch_size={list(sizes)} divides one dataset among virtual workers, but here each has a dataset of its own; give "
            "one number for all"
        )
    for name, value in (("shuffle", shuffle), ("pad", pad)):
        if not isinstance(value, bool) or (name == "pad" and not value):
            raise UsageError(
                f"{name}={value!r} is about one dataset that is divided among virtual workers, but here each has a dataset of "
                "its own; leave it out"
            )


def _check_samplers(given: dict[str, Any]) -> None:
    for name in ("sampler", "batch_sampler"):
        value = given[name]
        if isinstance(value, Iterator):
            raise UsageError(
                f"{name} is an iterator, which can be used up only once; give something that can be iterated for every virtual "
                "worker and epoch"
            )
        if value is not None and not isinstance(value, Iterable) and not callable(value):
            raise UsageError(
                f"{name} must be an iterable, of which every virtual worker gets a copy, or a callable that makes the one of a "
                f"virtual rank, got {value!r}"
            )
    generator = given["generator"]
    if generator is not None and not isinstance(generator, torch.Generator):
        raise UsageError(f"generator must be a torch.Generator, got {generator!r}")


def _check_workers(num_workers: Any, given: dict[str, Any]) -> None:
    if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 0:
        raise UsageError(f"num_workers must be a whole number of at least 0, got {num_workers!r}")
    timeout, prefetch = given["timeout"], given["prefetch_factor"]
    if not isinstance(timeout, (int, float)) or timeout < 0:
        raise UsageError(f"timeout must be a number of seconds of at least 0, got {timeout!r}")
    if prefetch is not None and (not isinstance(prefetch, int) or prefetch < 1):
        raise UsageError(f"prefetch_factor must be a whole number of at least 1, got {prefetch!r}")
    if num_workers == 0:
        for name in ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"):
            if given[name] != _OTHERS[name]:
                raise UsageError(
                    f"{name}={given[name]!r} is about data workers; give num_workers of at least 1"
                )


def _context(wanted: Any) -> Any:
    if wanted is None or isinstance(wanted, multiprocessing.context.BaseContext):
        return wanted
    methods = torch.multiprocessing.get_all_start_methods()
    if wanted not in methods:
        raise UsageError(f"multiprocessing_context must be one of {methods} or a context, got {wanted!r}")
    return torch.multiprocessing.get_context(wanted)
