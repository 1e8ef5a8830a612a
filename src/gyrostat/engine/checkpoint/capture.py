"""The whole state of a job at a boundary, taken and put back.

Shared state is one copy: tracked objects, buffers that no state_dict saves, gradients still set, `job.state`, the shared
random streams and the bucket layouts. With it go the contexts of all N virtual workers, collected from the workers that
run them. How a snapshot is written to disk is `checkpoint`'s business.
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
from gyrostat.engine.training.context import Context
from gyrostat.engine.training.virtual import VirtualRunner


def take_shared(
    tracked: Mapping[str, Any], state: Mapping[str, Any], runner: VirtualRunner
) -> dict[str, Any]:
    """The shared state, as a tree. It refers to live tensors: write or copy it before training goes on."""
    return {
        "tracked": {name: thing.state_dict() for name, thing in tracked.items()},
        "unsaved buffers": {name: _unsaved_buffers(module) for name, module in _modules(tracked)},
        "gradients": {name: _gradients(module) for name, module in _modules(tracked)},
        "modes": {name: _modes(module) for name, module in _modules(tracked)},
        "state": dict(state),
        "streams": runner.streams.save().to_tree(),
        "reductions": runner.layouts(),
    }


def only_updates_change(tracked: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Of that, the tensors that nobody changes but an optimizer, in its `step`."""
    for thing in tracked.values():
        if isinstance(thing, Optimizer):
            for _, leaf in statetree.leaves(dict(enumerate(thing.state.values()))):
                if isinstance(leaf, torch.Tensor):
                    yield leaf


def without(
    shared: Mapping[str, Any], optimizers: Collection[str], owned: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """Shared state but for these optimizers and, in modules, what they own: a newcomer holds that already."""
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
    shared: Mapping[str, Any], tracked: Mapping[str, Any], runner: VirtualRunner
) -> dict[str, Any]:
    """Overwrite all shared state; returns what belongs into `job.state`. An imported checkpoint brings only a part."""
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
    for gradients in runner.gradients:
        if gradients.name in shared.get("reductions", {}):
            gradients.reduction.load_state_dict(shared["reductions"][gradients.name])
    if "streams" in shared:
        runner.streams.exchange(RngState.from_tree(shared["streams"]))
    return dict(shared.get("state", {}))


def gather_contexts(runner: VirtualRunner, progress: Progress, *, once: bool = False) -> list[Any]:
    """The contexts of all virtual workers, in rank order, on every worker.

    `once`: nothing, if a worker is lost meanwhile and not everybody who is left would come here again.
    """

    def here() -> dict[int, Any]:
        runner.adopt_changed_buffers()
        runner.save_positions()
        return {rank: runner.contexts[rank].to_tree() for rank in runner.hosted}

    if runner.group.size == 1:
        everyone = here()
    else:
        everyone = {}
        for payload in runner.exchange("contexts", progress, lambda: statetree.encode(here()), once=once):
            everyone.update(statetree.decode(payload))
    return [everyone[rank] for rank in sorted(everyone)]


def put_contexts(contexts: Sequence[Any], runner: VirtualRunner) -> None:
    """Give this worker's virtual workers their contexts. An imported checkpoint has none: they stay fresh."""
    if contexts:
        for rank in runner.hosted:
            runner.contexts[rank] = Context.from_tree(contexts[rank])
        if runner.backups is not None:
            runner.backups.hold(contexts)


def _modules(tracked: Mapping[str, Any]) -> list[tuple[str, nn.Module]]:
    return [(name, thing) for name, thing in tracked.items() if isinstance(thing, nn.Module)]


def _load(name: str, thing: Any, tree: Any) -> None:
    try:
        thing.load_state_dict(tree)
    except (ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"the state of {name!r} ({type(thing).__name__}) in the checkpoint does not fit what the script built: {error}. "
            "What a script adds during training (parameter groups, layers, buffers) must be there when it resumes"
        ) from error


def _load_rest(name: str, module: nn.Module, tree: Mapping[str, Any]) -> None:
    """What the module holds already stays."""
    if type(module).load_state_dict is nn.Module.load_state_dict:
        module.load_state_dict(tree, strict=False)
    else:  # it has its own idea of what is complete
        _load(name, module, {**module.state_dict(), **tree})


def _modes(module: nn.Module) -> dict[str, list[bool]]:
    """What a script may switch in mid-run: training or evaluation of each part, frozen or not of each parameter."""
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
