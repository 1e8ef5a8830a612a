"""What is trained when something is measured: the ResNet and the GPT example, and a wide model that is mostly memory.

Both sides of a comparison build the same `Workload`, so that only what is around it differs. Learning rates are constant,
for a benchmark has no last step to plan for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

SEED = 7
BATCH_SIZES = {"resnet": 32, "gpt": 4, "wide": 8}
"""Per rank or virtual worker; as in the examples, for those."""
EXAMPLES = ("resnet", "gpt")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model in training."""

    dataset: Dataset[Any]
    batch_size: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[nn.Module, Any], Tensor]
    clip: float | None = None

    def update(self) -> None:
        """What follows the gradients of a step."""
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def resnet() -> Workload:
    """examples/resnet.py: ResNet-8 with batch-norm on Fashion-MNIST."""
    import fashion_mnist
    from resnet import ResNet

    model = ResNet()
    return Workload(
        dataset=TensorDataset(*fashion_mnist.load("train", 20_000)),
        batch_size=BATCH_SIZES["resnet"],
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True),
        loss=_class_loss,
    )


def gpt() -> Workload:
    """examples/gpt.py: two blocks with dropout, on the text of the standard library."""
    import stdlib_text
    from gpt import GPT

    model = GPT()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return Workload(
        dataset=stdlib_text.Windows(stdlib_text.load(1_200_000)[0], model.context),
        batch_size=BATCH_SIZES["gpt"],
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95)),
        loss=_text_loss,
        clip=1.0,
    )


def wide() -> Workload:
    """38 MiB of parameters with AdamW, and activations that do not count beside them."""
    layers: list[nn.Module] = []
    for _ in range(9):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(1024, 512))
    return Workload(
        dataset=TensorDataset(torch.randn(1024, 1024), torch.randint(512, (1024,))),
        batch_size=BATCH_SIZES["wide"],
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        loss=_class_loss,
    )


WORKLOADS: dict[str, Callable[[], Workload]] = {"resnet": resnet, "gpt": gpt, "wide": wide}


def _class_loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, classes = batch
    return F.cross_entropy(model(inputs), classes)


def _text_loss(model: nn.Module, batch: Any) -> Tensor:
    tokens, following = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
