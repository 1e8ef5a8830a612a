"""The other side of `scale_out_gap.py` and `recovery.py`: DDP under torchrun, which restarts all workers when a node comes or a
worker dies.

As good as torchrun can do: a small model, a snapshot in memory after every step, and going on from it. Rank 0 writes the
time of every step to a file.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--directory", required=True, help="for the snapshot and the times; in memory")
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--width", type=int, default=64)
parser.add_argument(
    "--step-seconds", type=float, required=True, help="a step waits for so long instead of computing"
)
args = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(
    nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(args.layers)))
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
snapshot = os.path.join(args.directory, "snapshot.pt")
done = 0
if os.path.exists(snapshot):
    saved = torch.load(snapshot, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    done = saved["done"]
with open(os.path.join(args.directory, f"pid-{dist.get_rank()}"), "w") as pid:
    pid.write(str(os.getpid()))
with open(os.path.join(args.directory, "steps"), "a", buffering=1) as steps:
    while True:
        time.sleep(args.step_seconds / dist.get_world_size())
        model(torch.randn(4, args.width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if dist.get_rank() == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done},
                snapshot + ".new",
            )
            os.replace(snapshot + ".new", snapshot)
            print(time.monotonic(), dist.get_world_size(), file=steps)
