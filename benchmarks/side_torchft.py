"""The other side of `recovery.py`: one replica under torchft 0.2, whose replicas go on without one that dies.

A Manager, its optimizer, gloo, a quorum before every step, and `manager.allreduce` for the gradients: torchft's own
DistributedDataParallel ends the survivor, too (an assertion in its hook, torchft 0.2.0 with torch 2.13 over gloo). A step waits
instead of computing. Every replica writes the time of every step that it commits to a file. With `--lighthouse` alone it is
the lighthouse, which decides on quorums; its time-outs are torchft's own unless given.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

parser = argparse.ArgumentParser()
parser.add_argument("--directory", required=True, help="for the times")
parser.add_argument("--lighthouse", action="store_true")
parser.add_argument("--replica", type=int, default=0)
parser.add_argument("--replicas", type=int, required=True)
parser.add_argument("--step-seconds", type=float, default=0.02, help="of a step on one replica")
parser.add_argument("--heartbeat-ms", type=int, help="after which a silent replica is not waited for")
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--width", type=int, default=64)
args = parser.parse_args()

address = os.path.join(args.directory, "lighthouse")
if args.lighthouse:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer("127.0.0.1:0", args.replicas - 1, heartbeat_timeout_ms=args.heartbeat_ms)
    with open(address + ".new", "w") as file:
        file.write(server.address())
    os.replace(address + ".new", address)
    while True:
        time.sleep(60)

from torchft import Manager, Optimizer, ProcessGroupGloo  # noqa: E402

torch.set_num_threads(1)
while not os.path.exists(address):
    time.sleep(0.01)
with open(address) as file:
    lighthouse = file.read()
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
torch.manual_seed(0)
module = nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(args.layers)))
inner = torch.optim.SGD(module.parameters(), lr=1e-4, momentum=0.9)


def load(state: dict[str, dict[str, torch.Tensor]]) -> None:
    module.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    load_state_dict=load,
    state_dict=lambda: {"model": module.state_dict(), "optimizer": inner.state_dict()},
    min_replica_size=1,
    rank=0,
    world_size=1,
    store_addr="127.0.0.1",
    store_port=store.port,
    lighthouse_addr=lighthouse,
    replica_id=f"replica{args.replica}",
    hostname="127.0.0.1",
)
optimizer = Optimizer(manager, inner)
with open(os.path.join(args.directory, f"pid-{args.replica}"), "w") as file:
    file.write(str(os.getpid()))
with open(os.path.join(args.directory, f"steps-{args.replica}"), "a", buffering=1) as steps:
    while True:
        optimizer.zero_grad()
        time.sleep(args.step_seconds / max(1, manager.num_participants()))
        module(torch.randn(4, args.width)).square().mean().backward()
        works = [manager.allreduce(parameter.grad) for parameter in module.parameters()]
        for work in works:
            work.wait()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            print(time.monotonic(), manager.num_participants(), file=steps)
