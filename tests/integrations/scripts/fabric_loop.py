"""A loop on Lightning Fabric: with `--ours` on gyrostat's strategy, otherwise on Fabric's DDP."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
parser = argparse.ArgumentParser()
parser.add_argument("--ours", action="store_true")
parser.add_argument("--precision", default="32-true")
parser.add_argument("--out", required=True)
parser.add_argument("--result", required=True)
given = parser.parse_args()
torch.set_num_threads(1)

from lightning.fabric import Fabric, seed_everything  # noqa: E402

seed_everything(9, verbose=False)
settings: dict[str, Any] = {"accelerator": "cpu", "precision": given.precision}
if given.ours:
    from gyrostat.integrations.lightning_fabric import GyrostatFabricStrategy

    fabric = Fabric(strategy=GyrostatFabricStrategy(), **settings)
else:
    fabric = Fabric(strategy="ddp", devices=int(os.environ["WORLD_SIZE"]), **settings)
fabric.launch()
data = TensorDataset(torch.randn(41, 6), torch.randint(0, 3, (41,)))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=3, shuffle=True))
net: Any = torch.nn.Sequential(
    torch.nn.Linear(6, 16),
    torch.nn.BatchNorm1d(16),
    torch.nn.Dropout(0.3),
    torch.nn.ReLU(),
    torch.nn.Linear(16, 3),
)
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
model.train()
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        fabric.backward(torch.nn.functional.cross_entropy(model(x), y))
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()

if fabric.is_global_zero:
    digest = hashlib.sha256()
    for name, tensor in sorted(net.state_dict().items()):
        digest.update(name.encode() + tensor.float().numpy().tobytes())
    with open(given.result, "w") as file:
        json.dump(
            {"digest": digest.hexdigest(), "gyrostat": "gyrostat" in sys.modules and not given.ours}, file
        )
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort a process that takes its group down while others still use it
