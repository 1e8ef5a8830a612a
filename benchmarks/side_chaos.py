"""The job of the chaos campaign: a small model with dropout and AdamW; `side_chaos.py EPOCHS`, 12 steps each."""

from __future__ import annotations

import sys

import torch

import gyrostat

job = gyrostat.init(seed=4)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = job.dataloader(torch.utils.data.TensorDataset(torch.randn(96, 4)), batch_size=2, shuffle=True)
job.track(model=model, optimizer=optimizer)
for _epoch in job.epochs(int(sys.argv[1])):
    for step in job.steps(loader):
        for (x,) in step:
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
