"""A job of two small steps: what `worker_start.py` starts. The model is small, so that starting is what is measured."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import gyrostat

job = gyrostat.init(seed=7)
dataset = TensorDataset(torch.randn(32, 64), torch.randint(10, (32,)))
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train = job.dataloader(dataset, batch_size=16)
job.track(model=model, optimizer=optimizer)
for step in job.steps(train):
    for x, y in step:
        step.backward(F.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
