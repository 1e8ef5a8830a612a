"""What cannot be exact is refused at `track`, with the reason; so is what was tracked in a way that has no meaning."""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gyrostat.core.errors import GyrostatError, Misuse, Refused

_COLLECTIVES = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_tensor",
}
_DISTRIBUTED = {"dist", "distributed", "_functional_collectives", "funcol", "comm"}
_DDP_MODULES = ("torch.distributed", "torch.nn.parallel.distributed", "torch.utils.data.distributed")
_INSTEAD_OF_DDP = (
    "gyrostat brings the workers together itself, so remove that call, the DistributedDataParallel wrapper and the "
    "DistributedSampler (see docs/howto/from-ddp.md)"
)


def check_trackable(name: str, thing: Any) -> None:
    """A tracked thing must be able to save and load its state."""
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(thing, method, None)):
            raise Misuse(
                f"job.track({name}=…) got a {type(thing).__name__}, which has no {method}(); track modules, optimizers, "
                "schedulers and scalers, and put plain values into job.state"
            )


def check_module(name: str, module: nn.Module) -> None:
    """Refuse what would not give the bits of plain DDP."""
    for path, part in module.named_modules():
        where = f"{name}.{path}" if path else name
        if isinstance(part, nn.SyncBatchNorm):
            raise Refused(
                f"{where} is a SyncBatchNorm: it communicates inside forward, where virtual workers run one after the "
                "other. Use BatchNorm (DDP broadcasts its statistics from rank 0) or GroupNorm"
            )
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise Refused(
                f"{where} has sparse gradients, which gloo adds in no fixed order; use {type(part).__name__}(sparse=False)"
            )
        if isinstance(part, nn.parallel.DistributedDataParallel):
            raise Refused(
                f"{where} is wrapped in DistributedDataParallel; track the module itself, gyrostat takes its place"
            )
        if _is_sharded(part):
            raise Refused(f"{where} is sharded by FSDP; gyrostat keeps one whole replica per worker")
        collective = _collective_in_forward(part)
        if collective:
            raise Refused(
                f"{where}: forward of {type(part).__name__} calls {collective}; a collective inside forward would have to "
                "run in all virtual workers at once, but they run one after the other"
            )
    for path, parameter in module.named_parameters():
        if type(parameter.data).__name__ == "DTensor" or type(parameter).__name__ == "DTensor":
            raise Refused(
                f"parameter {name}.{path} is a DTensor; gyrostat keeps one whole replica per worker"
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise Refused(f"parameter {name}.{path} is not initialized; run a dummy forward before job.track")
        if parameter.layout is not torch.strided:
            raise Refused(f"parameter {name}.{path} is sparse; use a dense one")
        if parameter.is_complex():
            raise Refused(
                f"parameter {name}.{path} is complex; DDP adds real and imaginary parts in an order of their own. Keep it as a "
                "real parameter and use torch.view_as_complex in forward"
            )
    if getattr(module, "_ddp_params_and_buffers_to_ignore", None):
        raise Refused(
            f"{name} asks DDP to ignore some parameters; each rank would train its own copy of them"
        )


def check_no_process_group() -> None:
    if dist.is_available() and dist.is_initialized():
        raise Refused(f"the script called torch.distributed.init_process_group; {_INSTEAD_OF_DDP}")


def leftover_of_ddp(error: BaseException) -> Refused | None:
    """What an error of torch means if the script raised it by a call that only DDP needs, such as init_process_group without
    torchrun's environment, or a DistributedSampler without a process group."""
    called = _called_in_torch_distributed(error)
    if called is None or isinstance(error, GyrostatError):
        return None
    refusal = Refused(f"the script called torch.distributed.{called}; {_INSTEAD_OF_DDP}")
    return refusal.with_traceback(error.__traceback__)


def check_separate(modules: Mapping[str, nn.Module]) -> None:
    """A parameter in two tracked modules would be reduced twice."""
    owners: dict[int, str] = {}
    for name, module in modules.items():
        for path, parameter in module.named_parameters():
            owner = owners.setdefault(id(parameter), name)
            if owner != name and parameter.requires_grad:
                raise Misuse(
                    f"parameter {path!r} belongs to both tracked modules {owner!r} and {name!r}; track one module that "
                    "holds both"
                )


def check_optimizer(name: str, optimizer: Optimizer, modules: Mapping[str, nn.Module]) -> None:
    """Whatever the optimizer updates must be tracked, or its gradients would differ from worker to worker."""
    tracked = {id(parameter) for module in modules.values() for parameter in module.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in tracked:
                raise Misuse(
                    f"optimizer {name!r} updates a parameter of shape {tuple(parameter.shape)} (group {number}, position "
                    f"{position}) that belongs to no tracked module; track its module together with the optimizer"
                )


def check_update(
    name: str, optimizer: Optimizer, modules: Mapping[str, nn.Module], reduced: frozenset[int] | None
) -> None:
    """Before every update: all gradients that it uses have been reduced. Parameters may have come or been unfrozen since."""
    if reduced is None:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and id(parameter) not in reduced:
                check_optimizer(name, optimizer, modules)
                raise Misuse(
                    f"optimizer {name!r} updates a parameter of shape {tuple(parameter.shape)} whose gradient is not "
                    "reduced: it was frozen at job.track, or did not exist. Track it while it requires a gradient"
                )


def _called_in_torch_distributed(error: BaseException) -> str | None:
    """The function by which code outside gyrostat entered torch.distributed, if the error was raised there."""
    caller, trace = "", error.__traceback__
    while trace is not None:
        module, called = _module(trace.tb_frame), trace.tb_frame.f_code.co_qualname
        if not module.startswith(_DDP_MODULES):
            caller = module
        elif caller.startswith("gyrostat."):
            return None
        elif "<locals>" not in called:  # a decorator
            return called.removesuffix(".__init__")
        trace = trace.tb_next
    return None


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_sharded(part: nn.Module) -> bool:
    return any(kind.__name__ in ("FullyShardedDataParallel", "FSDPModule") for kind in type(part).__mro__)


def _collective_in_forward(part: nn.Module) -> str | None:
    if type(part).__module__.startswith("torch."):
        return None
    code = getattr(getattr(type(part), "forward", None), "__code__", None)
    names = _names(code) if isinstance(code, CodeType) else set()
    called = names & _COLLECTIVES
    return f"torch.distributed.{sorted(called)[0]}" if called and names & _DISTRIBUTED else None


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names
