"""What the benchmarks of elasticity train: `layers` times `width` by `width` parameters, 25 million by default, with momentum.

Runs until it is ended. Under `--paced` nothing is computed, whatever the width.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import gyrostat

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=24)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--batch", type=int, default=4, help="samples of a virtual worker")
args = parser.parse_args()

job = gyrostat.init(seed=7)
model = nn.Sequential(
    *(nn.Sequential(nn.Linear(args.width, args.width), nn.ReLU()) for _ in range(args.layers))
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
data = TensorDataset(torch.randn(512, args.width))
train = job.dataloader(data, batch_size=args.batch, shuffle=True)
job.track(model=model, optimizer=optimizer)
for _ in job.epochs(1_000_000):
    for step in job.steps(train):
        for (x,) in step:
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
