"""The whole state of a job at a boundary, captured and restored.

Shared state is one copy: tracked objects, buffers that no state_dict saves, gradients still set, `job.state`, the shared
random streams and the bucket layouts. With it go the contexts of all N virtual workers, gathered from the workers that
run them. `store.py` writes a snapshot to disk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gyrostat.core.errors import CheckpointError, ForeignCheckpoint
from gyrostat.core.progress import Progress
from gyrostat.data.rng import RngState
from gyrostat.engine.state import statetree
from gyrostat.engine.state.digest import digest
from gyrostat.engine.state.tensorbytes import same_memory_key
from gyrostat.engine.training.collectives import Collectives
from gyrostat.engine.training.virtual_workers import VirtualWorkers


def take_shared(
    tracked: Mapping[str, Any], state: Mapping[str, Any], workers: VirtualWorkers
) -> dict[str, Any]:
    """The shared state, as a tree. It refers to live tensors: write or copy it before training goes on."""
    return {
        "tracked": {name: thing.state_dict() for name, thing in tracked.items()},
        "unsaved buffers": {name: _unsaved_buffers(module) for name, module in _modules(tracked)},
        "gradients": {name: _gradients(module) for name, module in _modules(tracked)},
        "modes": {name: _modes(module) for name, module in _modules(tracked)},
        "state": dict(state),
        "streams": workers.contexts.streams.save().to_tree(),
        "reductions": workers.gradients.layouts(),
    }


def only_updates_change(tracked: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors in shared state that change only in an optimizer's `step`."""
    for thing in tracked.values():
        if isinstance(thing, Optimizer):
            for _, leaf in statetree.leaves(dict(enumerate(thing.state.values()))):
                if isinstance(leaf, torch.Tensor):
                    yield leaf


def without(
    shared: Mapping[str, Any], optimizers: Collection[str], owned: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """Shared state without these optimizers and, in modules, the tensors that they own: a newcomer holds those already."""
    elsewhere = {same_memory_key(tensor) for tensor in owned}

    def rest(tree: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: value
            for key, value in tree.items()
            if not (isinstance(value, torch.Tensor) and same_memory_key(value) in elsewhere)
        }

    modules = shared["modes"]
    tracked = {
        name: rest(tree) if name in modules else tree
        for name, tree in shared["tracked"].items()
        if name not in optimizers
    }
    return {**shared, "tracked": tracked, "partly": True}


def put_shared(
    shared: Mapping[str, Any], tracked: Mapping[str, Any], workers: VirtualWorkers
) -> dict[str, Any]:
    """Overwrite all shared state; returns `job.state`. An imported checkpoint has only a part of it."""
    saved = shared["tracked"]
    unknown = sorted(set(saved) - set(tracked))
    if unknown:
        raise ForeignCheckpoint(
            f"the checkpoint holds {unknown}, which the script does not track; it tracks {sorted(tracked)}"
        )
    for name, tree in saved.items():
        if shared.get("partly") and isinstance(tracked[name], nn.Module):
            _load_rest(name, tracked[name], tree)
            continue
        _load(name, tracked[name], tree)
        if digest(it=tracked[name]) != digest(it=tree):
            raise CheckpointError(
                f"{name!r} ({type(tracked[name]).__name__}) does not restore exactly: its state after load_state_dict is "
                "not what state_dict had given"
            )
    for name, module in _modules(tracked):
        _put_buffers(module, shared.get("unsaved buffers", {}).get(name, {}))
        _put_gradients(module, shared.get("gradients", {}).get(name, {}))
        _put_modes(module, shared.get("modes", {}).get(name))
    workers.gradients.load_layouts(shared.get("reductions", {}))
    if "streams" in shared:
        workers.contexts.streams.exchange(RngState.from_tree(shared["streams"]))
    return dict(shared.get("state", {}))


def gather_contexts(
    workers: VirtualWorkers, collectives: Collectives, progress: Progress, *, once: bool = False
) -> list[Any]:
    """The contexts of all virtual workers, in rank order, on every worker.

    `once`: empty if a worker is lost meanwhile, because not all survivors would gather them again.
    """

    def local() -> dict[int, Any]:
        workers.contexts.adopt_changed_buffers()
        workers.batches.save_positions()
        return {rank: workers.contexts.contexts[rank].to_tree() for rank in workers.generation.local_ranks}

    if workers.generation.group.size == 1:
        everyone = local()
    else:
        everyone = {}
        for payload in collectives.exchange(
            "contexts", progress, lambda: statetree.encode(local()), once=once
        ):
            everyone.update(statetree.decode(payload))
    return [everyone[rank] for rank in sorted(everyone)]


def put_contexts(contexts: Sequence[Any], workers: VirtualWorkers) -> None:
    """Give the local virtual workers their contexts. An imported checkpoint has none: they stay fresh."""
    if contexts:
        workers.contexts.load(contexts)


def _modules(tracked: Mapping[str, Any]) -> list[tuple[str, nn.Module]]:
    return [(name, thing) for name, thing in tracked.items() if isinstance(thing, nn.Module)]


def _load(name: str, thing: Any, tree: Any) -> None:
    try:
        thing.load_state_dict(tree)
    except (ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"the state of {name!r} ({type(thing).__name__}) in the checkpoint does not fit what the script built: {error}. "
            "What a script adds during training (parameter groups, layers, buffers) must exist when it resumes"
        ) from error


def _load_rest(name: str, module: nn.Module, tree: Mapping[str, Any]) -> None:
    """Load what the tree has; the rest of the module stays as it is."""
    if type(module).load_state_dict is nn.Module.load_state_dict:
        module.load_state_dict(tree, strict=False)
    else:  # its own load_state_dict may require a complete tree
        _load(name, module, {**module.state_dict(), **tree})


def _modes(module: nn.Module) -> dict[str, list[bool]]:
    """What a script may change in mid-run: the training mode of each part, `requires_grad` of each parameter."""
    return {
        "training": [part.training for part in module.modules()],
        "requires_grad": [parameter.requires_grad for parameter in module.parameters()],
    }


def _put_modes(module: nn.Module, modes: Mapping[str, list[bool]] | None) -> None:
    if modes is not None:
        for part, training in zip(module.modules(), modes["training"], strict=True):
            part.training = training
        for parameter, wanted in zip(module.parameters(), modes["requires_grad"], strict=True):
            parameter.requires_grad_(wanted)


def _unsaved_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    saved = module.state_dict()
    return {name: buffer for name, buffer in module.named_buffers() if name not in saved}


def _put_buffers(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])


def _gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def _put_gradients(module: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in module.named_parameters():
        gradient = gradients.get(name)
        parameter.grad = None if gradient is None else gradient.to(parameter.device)
