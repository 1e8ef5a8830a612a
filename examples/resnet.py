"""A small ResNet with batch-norm on Fashion-MNIST.

    gyrostat run --virtual-workers 4 --workers 2 examples/resnet.py

What it shows: batch-norm has buffers, and each virtual worker normalises its own micro-batch, as a DDP
rank does. The running statistics are those of virtual worker 0, wherever it lives. The learning rate
follows one cycle, per step.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fashion_mnist
import gyrostat


class Block(nn.Module):
    """Two 3×3 convolutions around a shortcut; the shortcut is a 1×1 convolution where the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """The ResNet of 6n + 2 layers for small images: a stem, three stages of n blocks, a classifier."""

    def __init__(self, *, width: int = 16, blocks_per_stage: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        stages: list[nn.Module] = []
        channels = width
        for stage in range(3):
            for block in range(blocks_per_stage):
                stride = 2 if stage > 0 and block == 0 else 1
                stages.append(Block(channels, width * 2**stage, stride))
                channels = width * 2**stage
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.stages(self.stem(x)).mean(dim=(2, 3))
        logits: Tensor = self.classifier(features)
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="per virtual worker")
    parser.add_argument("--limit", type=int, default=None, help="the most steps per epoch")
    parser.add_argument("--small", action="store_true", help="fewer images and channels, for tests")
    args = parser.parse_args()

    job = gyrostat.init(seed=7)
    train_set = TensorDataset(*fashion_mnist.load("train", 512 if args.small else 16_000))
    test_set = TensorDataset(*fashion_mnist.load("test", 128 if args.small else 2_000))
    model = ResNet(width=4 if args.small else 16).to(job.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    train = job.dataloader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
    test = job.dataloader(test_set, batch_size=128)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.2, epochs=args.epochs, steps_per_epoch=len(train)
    )
    job.track(model=model, optimizer=optimizer, schedule=schedule)

    def count_correct(batch: tuple[Tensor, Tensor]) -> int:
        x, y = (part.to(job.device) for part in batch)
        return int((model(x).argmax(dim=1) == y).sum())

    for _ in job.epochs(args.epochs):
        for step in job.steps(train, limit=args.limit):
            for x, y in step:
                loss = F.cross_entropy(model(x.to(job.device)), y.to(job.device))
                step.backward(loss)
                mean_loss = job.mean(loss)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        accuracy = sum(job.evaluate(test, count_correct)) / len(test_set)
        job.log(loss=mean_loss.item(), accuracy=accuracy)


if __name__ == "__main__":
    main()
