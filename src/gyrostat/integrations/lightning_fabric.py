"""Lightning Fabric on virtual workers: `Fabric(strategy=GyrostatFabricStrategy())`, for loops of the user.

The loop runs once per batch of every virtual worker of this worker; `optimizer.step()` and clipping do nothing before the last
backward of a step (`feed.py`). In evaluation every worker sees all batches of all N processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from gyrostat.integrations import environment, launch

launch.hide_launcher()

from lightning.fabric.strategies import SingleDeviceStrategy  # noqa: E402
from lightning.fabric.utilities.seed import reset_seed  # noqa: E402

from gyrostat.integrations.batches import draw_base_seed, evaluation_of, in_turn, loader_options  # noqa: E402
from gyrostat.integrations.feed import Feed  # noqa: E402
from gyrostat.integrations.ranks import rank_sampler, seeded_workers  # noqa: E402


class FabricLoader:
    """A data loader of Fabric: for training while modules are in training mode, else for evaluation."""

    def __init__(self, strategy: GyrostatFabricStrategy, loader: DataLoader[Any]) -> None:
        self._strategy, self._loader = strategy, loader
        self._training: Any = None

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        strategy, loader = self._strategy, self._loader
        ranks = strategy.job.virtual_workers
        if not any(module.training for module in strategy.modules):
            batches = in_turn([list(rank_sampler(loader.batch_sampler, rank)) for rank in range(ranks)])
            made = evaluation_of(strategy.job, loader, batches)
            draw_base_seed(strategy.job, loader)
            for number in range(len(batches)):
                yield made.fetch([number])[1]
            return
        if self._training is None:
            self._training = strategy.job.dataloader(
                loader.dataset,
                batch_sampler=lambda rank: rank_sampler(loader.batch_sampler, rank),
                **loader_options(loader, seeded_workers(loader)),
            )
        strategy.track()
        for batch, _ in strategy.feed.batches(self._training, strategy.accumulate):
            yield batch


class GyrostatFabricStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Fabric's strategy for a job of gyrostat. Its world is the job's N virtual workers."""

    def __init__(self, accumulate: int = 1, **options: Any) -> None:
        """`accumulate`: how many batches of a virtual worker make one step."""
        self.job = launch.join(environment.lightning_seed())
        self.feed, self.accumulate = Feed(self.job), accumulate
        self.modules: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        super().__init__(device=self.job.device, **options)

    @property
    def complete(self) -> bool:
        """The step's gradients are the mean over all N: what a loop does once per step, such as a schedule, it does now."""
        return self.feed.complete

    @property
    def world_size(self) -> int:
        return self.job.virtual_workers

    @world_size.setter
    def world_size(self, _: int) -> None:
        """It is the job's."""

    @property
    def global_rank(self) -> int:
        return 0 if self.job.is_main else 1

    @global_rank.setter
    def global_rank(self, _: int) -> None:
        """It is the job's."""

    @property
    def is_global_zero(self) -> bool:
        return self.job.is_main

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.job.virtual_workers, "rank": 0}

    def barrier(self, *_: Any, **__: Any) -> None:
        self.job.between_steps.barrier()

    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()  # as Lightning's DDP strategy does

    def process_dataloader(self, dataloader: Any) -> Any:
        return FabricLoader(self, dataloader)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        self.modules.append(module)
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self._optimizers.append(optimizer)
        return optimizer

    def track(self) -> None:
        """When training begins: hand over everything that was set up."""
        if not self.job.tracked:
            things: dict[str, Any] = {f"model{number}": each for number, each in enumerate(self.modules)}
            things |= {f"optimizer{number}": each for number, each in enumerate(self._optimizers)}
            self.job.track(same_streams=True, **things)
            self.job.between_steps.share_modules()

    def backward(self, tensor: torch.Tensor, module: Any, *_: Any, **options: Any) -> None:
        self.precision.pre_backward(tensor, module)
        self.feed.backward(tensor, **options)
        self.precision.post_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, **options: Any) -> Any:
        return None if self.feed.in_step else super().optimizer_step(optimizer, **options)

    def clip_gradients_norm(self, *args: Any, **options: Any) -> Any:
        return torch.zeros(()) if self.feed.in_step else super().clip_gradients_norm(*args, **options)

    def clip_gradients_value(self, *args: Any, **options: Any) -> None:
        if not self.feed.in_step:
            super().clip_gradients_value(*args, **options)
