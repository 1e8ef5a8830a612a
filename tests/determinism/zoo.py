"""Small training scripts, one per feature that must give the bits of plain DDP. Run as `zoo.py FEATURE`.

Every feature is a function that trains for a few steps with the public surface only. `test_digests.py` runs each as
plain DDP on N processes and on several placements, and compares digests of all tracked state.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

import gyrostat

Feature = Callable[[gyrostat.Job], None]
FEATURES: dict[str, Feature] = {}
BEYOND_DDP: dict[str, Feature] = {}
"""What DDP itself gets wrong, and gyrostat does not."""


def feature(function: Feature) -> Feature:
    FEATURES[function.__name__] = function
    return function


# Parts


def data(samples: int = 60, features: int = 12, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, features, generator=generator, dtype=dtype)
    return TensorDataset(x, torch.randint(0, 4, (samples,), generator=generator))


class Noisy(Dataset[Any]):
    """Draws from all three sources whenever a sample is fetched."""

    def __init__(self, samples: int = 60) -> None:
        self.base = data(samples)

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.base[index]
        return x + 0.1 * torch.randn(12) + np.random.normal() * 0.1 + random.gauss(0, 0.1), y


class Net(nn.Module):
    """An MLP with batch-norm and dropout."""

    def __init__(self, width: int = 300, batch_norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(12, width)
        self.norm = nn.BatchNorm1d(width) if batch_norm else nn.LayerNorm(width)
        self.middle = nn.Linear(width, width)
        self.last = nn.Linear(width, 4)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.relu(self.norm(self.first(x))), 0.2, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.middle(self.features(x))))  # type: ignore[no-any-return]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(
    job: gyrostat.Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Dataset[Any] | None = None,
    *,
    epochs: int = 2,
    loss: Callable[[Any, Any], torch.Tensor] = F.cross_entropy,
    **steps: Any,
) -> None:
    loader = job.dataloader(dataset or data(), batch_size=4, shuffle=True)
    for _ in job.epochs(epochs):
        for step in job.steps(loader, **steps):
            for x, y in step:
                step.backward(loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


# Models and their parts


@feature
def batch_norm_and_dropout(job: gyrostat.Job) -> None:
    model = Net()
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer)
    train(job, model, optimizer)


@feature
def buffers_not_broadcast(job: gyrostat.Job) -> None:
    model = Net()
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer, ddp={"broadcast_buffers": False})
    train(job, model, optimizer)


@feature
def two_forwards_with_batch_norm(job: gyrostat.Job) -> None:
    """The second forward of a micro-batch starts from rank 0's buffers after its first one."""
    model = Net(100)
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer)
    loader = job.dataloader(data(), batch_size=4, shuffle=True)
    for step in job.steps(loader):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y) + model(x * 2).square().mean())
        optimizer.step()
        optimizer.zero_grad()


@feature
def forward_without_gradient(job: gyrostat.Job) -> None:
    """After a forward under no_grad DDP does not broadcast buffers: the next one starts from the rank's own."""
    model = Net(100)
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer)
    loader = job.dataloader(data(), batch_size=4, shuffle=True)
    for step in job.steps(loader):
        for x, y in step:
            with torch.no_grad():
                target = model(x + 1)
            step.backward(F.cross_entropy(model(x), y) + F.mse_loss(model(x), target))
            if step.number % 2:
                with torch.no_grad():
                    model(x - 1)
        optimizer.step()
        optimizer.zero_grad()


@feature
def float64(job: gyrostat.Job) -> None:
    model = Net().double()
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer)
    train(job, model, optimizer, data(dtype=torch.float64))


@feature
def bfloat16_parameters(job: gyrostat.Job) -> None:
    model = Net(batch_norm=False).to(torch.bfloat16)
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer)
    train(job, model, optimizer, data(dtype=torch.bfloat16))


@feature
def parameters_of_two_types(job: gyrostat.Job) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(12, 64)
            self.second = nn.Linear(64, 64).double()
            self.last = nn.Linear(64, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.second(torch.relu(self.first(x)).double())
            return self.last(hidden.float())  # type: ignore[no-any-return]

    model = Mixed()
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer)
    train(job, model, optimizer)


@feature
def channels_last(job: gyrostat.Job) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3),
        nn.Flatten(),
        nn.Linear(16, 4),
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer)
    train(
        job, model, optimizer, TensorDataset(data(48, 75).tensors[0].view(48, 3, 5, 5), data(48).tensors[1])
    )


@feature
def frozen_and_tied(job: gyrostat.Job) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(12, 40, bias=False)
            self.norm = nn.LayerNorm(40)
            self.norm.weight.requires_grad_(False)
            self.back = nn.Linear(40, 12, bias=False)
            self.back.weight = nn.Parameter(torch.randn(12, 40))
            self.again = nn.Linear(12, 40, bias=False)
            self.again.weight = self.embed.weight
            self.last = nn.Linear(40, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.again(self.back(self.norm(self.embed(x)))))  # type: ignore[no-any-return]

    model = Tied()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    job.track(model=model, optimizer=optimizer)
    train(job, model, optimizer)


class Branches(nn.Module):
    """Uses only some of its branches: which ones depends on the sample. One is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 50)
        self.left = nn.Linear(50, 4)
        self.right = nn.Linear(50, 4)
        self.never = nn.Linear(50, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        return (self.left if x.sum() > 0 else self.right)(hidden)  # type: ignore[no-any-return]


@feature
def unused_parameters(job: gyrostat.Job) -> None:
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer, ddp={"find_unused_parameters": True})
    train(job, model, optimizer)


@feature
def unused_parameters_accumulated(job: gyrostat.Job) -> None:
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer, ddp={"find_unused_parameters": True})
    train(job, model, optimizer, accumulate=2)


@feature
def static_graph(job: gyrostat.Job) -> None:
    model = Net()
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer, ddp={"static_graph": True})
    train(job, model, optimizer)


@feature
def static_graph_with_unused(job: gyrostat.Job) -> None:
    model = nn.ModuleDict({"used": nn.Linear(12, 4), "hidden": nn.Linear(12, 12), "unused": nn.Linear(12, 4)})

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts["used"](torch.relu(self.parts["hidden"](x)))  # type: ignore[no-any-return]

    outer = Outer()
    optimizer = sgd(outer)
    job.track(model=outer, optimizer=optimizer, ddp={"static_graph": True})
    train(job, outer, optimizer)


@feature
def small_buckets(job: gyrostat.Job) -> None:
    model = Net()
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer, ddp={"bucket_cap_mb": 0.05})
    train(job, model, optimizer)


@feature
def several_default_buckets(job: gyrostat.Job) -> None:
    model = Net(1200)
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer)
    train(job, model, optimizer, epochs=1, limit=4)


@feature
def gradient_as_bucket_view(job: gyrostat.Job) -> None:
    model = Net()
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer, ddp={"gradient_as_bucket_view": True})
    loader = job.dataloader(data(), batch_size=4, shuffle=True)
    for epoch in job.epochs(2):
        for step in job.steps(loader):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad(set_to_none=epoch == 1)


@feature
def gradients_not_zeroed(job: gyrostat.Job) -> None:
    model = Net()
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer)
    loader = job.dataloader(data(), batch_size=4, shuffle=True)
    for step in job.steps(loader):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        if step.number % 3 == 2:
            optimizer.zero_grad(set_to_none=step.number % 2 == 0)


@feature
def exponential_moving_average(job: gyrostat.Job) -> None:
    model = Net()
    average = torch.optim.swa_utils.AveragedModel(
        model,
        multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9),  # type: ignore[no-untyped-call]
    )
    average.requires_grad_(False)
    optimizer = sgd(model)
    job.track(model=model, average=average, optimizer=optimizer)
    loader = job.dataloader(data(), batch_size=4, shuffle=True)
    for step in job.steps(loader):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)


@feature
def teacher(job: gyrostat.Job) -> None:
    """A frozen second module used in every micro-batch."""
    model = Net(100, batch_norm=False)
    other = copy.deepcopy(model).requires_grad_(False)
    optimizer = sgd(model)
    job.track(model=model, teacher=other, optimizer=optimizer)
    loader = job.dataloader(data(), batch_size=4, shuffle=True)
    for step in job.steps(loader):
        for x, _ in step:
            step.backward(F.mse_loss(model(x), other(x)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                theirs.lerp_(mine, 0.05)


@feature
def activation_checkpointing(job: gyrostat.Job) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(self.features, x, use_reentrant=False)
            return self.last(torch.relu(self.middle(hidden)))  # type: ignore[no-any-return]

    model = Checkpointed(batch_norm=False)
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer)
    train(job, model, optimizer)


@feature
def activation_checkpointing_reentrant(job: gyrostat.Job) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(self.features, x.requires_grad_(), use_reentrant=True)
            return self.last(torch.relu(self.middle(hidden)))  # type: ignore[no-any-return]

    model = Checkpointed(batch_norm=False)
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer, ddp={"static_graph": True})
    train(job, model, optimizer)


@feature
def compiled(job: gyrostat.Job) -> None:
    model = cast(nn.Module, torch.compile(Net(100)))
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer)
    train(job, model, optimizer, data(48), epochs=1)


@feature
def compiled_in_place(job: gyrostat.Job) -> None:
    model = Net(100)
    model.compile()
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer)
    train(job, model, optimizer, data(48), epochs=1)


def channels_last_after_track(job: gyrostat.Job) -> None:
    """DDP fills its buckets by the strides of the moment it wrapped the model, and reads wrong gradients out of them."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16, 4)
    )
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    train(
        job, model, optimizer, TensorDataset(data(48, 75).tensors[0].view(48, 3, 5, 5), data(48).tensors[1])
    )


BEYOND_DDP["channels_last_after_track"] = channels_last_after_track


@feature
def statistics_reset_by_the_script(job: gyrostat.Job) -> None:
    """What the script sets outside the inner loop counts for all virtual workers, also where each has its own buffers."""
    model = Net()
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer, ddp={"broadcast_buffers": False})
    loader = job.dataloader(data(), batch_size=4, shuffle=True)
    for step in job.steps(loader):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if step.number == 1 and isinstance(model.norm, nn.BatchNorm1d):
            model.norm.reset_running_stats()


class Counting(Net):
    """Puts a new tensor into its buffer in every forward."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__(50)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return super().forward(x) * (1 + 0.01 * self.count)


@feature
def buffers_reassigned(job: gyrostat.Job) -> None:
    model = Counting()
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer)
    loader = job.dataloader(data(), batch_size=4, shuffle=True)
    for _ in job.epochs(2):
        for step in job.steps(loader):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        job.evaluate(loader, lambda batch: model(batch[0]).sum())


def halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@feature
def hook_registered_late(job: gyrostat.Job) -> None:
    model = Net(100)
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer, ddp={"bucket_cap_mb": 0.05})
    loader = job.dataloader(data(), batch_size=4, shuffle=True)
    for step in job.steps(loader):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if step.number == 1:
            model.last.weight.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]


@feature
def zeroed_in_the_inner_loop(job: gyrostat.Job) -> None:
    model = Net()
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer, ddp={"gradient_as_bucket_view": True})
    loader = job.dataloader(data(), batch_size=4, shuffle=True)
    for step in job.steps(loader):
        for x, y in step:
            optimizer.zero_grad()
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()


@feature
def switches_in_mid_run(job: gyrostat.Job) -> None:
    """Layers frozen and set to evaluation from the second epoch on, and an evaluation that decides something."""
    model = Net(100)
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer, ddp={"find_unused_parameters": True})
    loader = job.dataloader(data(), batch_size=4, shuffle=True)
    for epoch in job.epochs(3):
        right = sum(job.evaluate(loader, lambda batch: int((model(batch[0]).argmax(1) == batch[1]).sum())))
        for step in job.steps(loader):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y) * (1 + right / 100))
            optimizer.step()
            optimizer.zero_grad()
            if epoch == 1 and step.number == 0:
                model.first.requires_grad_(False)
                model.norm.eval()


# Precision


@feature
def autocast_bfloat16(job: gyrostat.Job) -> None:
    model = Net()
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer)
    loader = job.dataloader(data(), batch_size=4, shuffle=True)
    for step in job.steps(loader):
        for x, y in step:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            step.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


@feature
def grad_scaler(job: gyrostat.Job) -> None:
    model = Net()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
    job.track(model=model, optimizer=optimizer, scaler=scaler)
    loader = job.dataloader(data(), batch_size=4, shuffle=True)
    for step in job.steps(loader):
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            step.backward(scaler.scale(loss * float("inf") if step.number == 4 else loss))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


# Optimizers and schedules


def optimizer_feature(name: str, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    def run(job: gyrostat.Job) -> None:
        model = Net(60)
        optimizer = make(model)
        job.track(model=model, optimizer=optimizer)
        train(job, model, optimizer)

    FEATURES[f"optimizer_{name}"] = run


optimizer_feature(
    "sgd_nesterov", lambda m: torch.optim.SGD(m.parameters(), 0.05, 0.9, weight_decay=0.01, nesterov=True)
)
optimizer_feature("adam_amsgrad", lambda m: torch.optim.Adam(m.parameters(), 0.01, amsgrad=True))
optimizer_feature("adamw_fused", lambda m: torch.optim.AdamW(m.parameters(), 0.01, fused=True))
optimizer_feature("adadelta", lambda m: torch.optim.Adadelta(m.parameters()))
optimizer_feature("adagrad", lambda m: torch.optim.Adagrad(m.parameters()))
optimizer_feature("adamax", lambda m: torch.optim.Adamax(m.parameters()))
optimizer_feature("asgd", lambda m: torch.optim.ASGD(m.parameters()))
optimizer_feature("nadam", lambda m: torch.optim.NAdam(m.parameters()))
optimizer_feature("radam", lambda m: torch.optim.RAdam(m.parameters()))
optimizer_feature("rmsprop", lambda m: torch.optim.RMSprop(m.parameters(), centered=True, momentum=0.5))
optimizer_feature("rprop", lambda m: torch.optim.Rprop(m.parameters()))
optimizer_feature("adafactor", lambda m: torch.optim.Adafactor(m.parameters()))


@feature
def closure(job: gyrostat.Job) -> None:
    """LBFGS evaluates its closure several times; each time is a pass of its own."""
    model = Net(20, batch_norm=False)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    job.track(model=model, optimizer=optimizer)
    loader = job.dataloader(data(), batch_size=4, shuffle=True)
    for step in job.steps(loader):

        def evaluate(step: Any = step) -> torch.Tensor:
            optimizer.zero_grad()
            for x, y in step:
                loss = F.cross_entropy(model(x), y)
                mean = job.mean(loss)
                step.backward(loss)
            return mean.value

        optimizer.step(evaluate)  # type: ignore[no-untyped-call]


@feature
def parameter_groups_and_schedules(job: gyrostat.Job) -> None:
    model = Net()
    groups: list[dict[str, Any]] = [{"params": [*model.first.parameters(), *model.last.parameters()]}]
    groups.append(
        {"params": [*model.norm.parameters(), *model.middle.parameters()], "lr": 0.01, "weight_decay": 0.1}
    )
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[5])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    job.track(model=model, optimizer=optimizer, schedule=schedule, plateau=plateau)
    loader = job.dataloader(data(), batch_size=4, shuffle=True)
    for _ in job.epochs(3):
        for step in job.steps(loader):
            for x, y in step:
                loss = F.cross_entropy(model(x), y)
                mean = job.mean(loss)
                step.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        plateau.step(mean.item())


# Loops and data


@feature
def accumulation(job: gyrostat.Job) -> None:
    model = Net()
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer)
    train(job, model, optimizer, accumulate=2)


@feature
def accumulation_not_broadcast(job: gyrostat.Job) -> None:
    model = Net()
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer, ddp={"broadcast_buffers": False})
    train(job, model, optimizer, accumulate=3)


@feature
def random_dataset(job: gyrostat.Job) -> None:
    model = Net()
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer)
    train(job, model, optimizer, Noisy())


@feature
def uneven_dataset(job: gyrostat.Job) -> None:
    model = Net(batch_norm=False)
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer)
    for shuffle, pad, drop_last in ((True, True, False), (False, True, True), (True, False, False)):
        loader = job.dataloader(data(47), batch_size=4, shuffle=shuffle, pad=pad, drop_last=drop_last)
        for step in job.steps(loader):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


@feature
def two_passes(job: gyrostat.Job) -> None:
    """A GAN in small: two modules with batch-norm, two optimizers, two passes over random data."""
    generator = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 12))
    critic = nn.Sequential(
        nn.Linear(12, 40), nn.BatchNorm1d(40), nn.Dropout(0.2), nn.ReLU(), nn.Linear(40, 1)
    )
    optimizer_g = torch.optim.Adam(generator.parameters(), 0.01)
    optimizer_d = torch.optim.Adam(critic.parameters(), 0.01)
    job.track(generator=generator, critic=critic, optimizer_g=optimizer_g, optimizer_d=optimizer_d)
    loader = job.dataloader(Noisy(), batch_size=4, shuffle=True)
    for step in job.steps(loader):
        for x, _ in step:
            fake = generator(torch.randn(len(x), 6)).detach()
            step.backward(F.softplus(-critic(x)).mean() + F.softplus(critic(fake)).mean())
        optimizer_d.step()
        optimizer_d.zero_grad()
        for x, _ in step:
            fake = generator(torch.randn(len(x), 6))
            step.backward(F.softplus(-critic(fake)).mean() + 0.1 * (fake.mean() - x.mean()).square())
        optimizer_g.step()
        optimizer_g.zero_grad()
        optimizer_d.zero_grad()


@feature
def loops(job: gyrostat.Job) -> None:
    """Several loaders, `limit`, `break`, `job.state`, `step.local`, `job.mean`, evaluation in between."""
    model = Net()
    optimizer = sgd(model)
    job.track(model=model, optimizer=optimizer)
    first = job.dataloader(Noisy(60), batch_size=3, shuffle=True)
    second = job.dataloader(data(30), batch_size=2)
    for epoch in job.epochs(3):
        for loader in (first, second):
            for step in job.steps(loader, limit=5):
                for x, y in step:
                    step.local["seen"] = step.local.get("seen", 0) + len(x)
                    loss = F.cross_entropy(model(x), y) / (1 + 0.1 * step.local["seen"])
                    mean = job.mean(loss)
                    step.backward(loss)
                job.state["last"] = mean.item()
                for group in optimizer.param_groups:
                    group["lr"] = 0.05 / (1 + job.state["last"])
                optimizer.step()
                optimizer.zero_grad()
                if epoch == 1 and step.number == 2:
                    break
        right = job.evaluate(second, lambda batch: (model(batch[0]).argmax(1) == batch[1]).sum())
        job.state["right"] = int(sum(right))
        for group in optimizer.param_groups:
            group["momentum"] = 0.8 + job.state["right"] / 1000


@feature
def transformer(job: gyrostat.Job) -> None:
    """Embedding, attention, layer-norm and dropout, under AdamW."""
    model = nn.Sequential(
        nn.Embedding(50, 32),
        nn.TransformerEncoderLayer(32, 4, 96, dropout=0.1, batch_first=True, activation="gelu"),
        nn.Linear(32, 50),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)
    tokens = torch.arange(48 * 17).view(48, 17) * 31 % 50
    dataset = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    train(job, model, optimizer, dataset, loss=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()))


if __name__ == "__main__":
    (FEATURES | BEYOND_DDP)[sys.argv[1]](gyrostat.init(seed=11))
