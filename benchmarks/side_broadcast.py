"""The other side of `scale_out_fence.py`: a broadcast of all state to newcomers, while everybody waits.

One process per rank. The first `--old` ranks train, the others are new: at every line that rank 0 reads, it sends parameters
and momentum to the new ones over gloo, and all meet afterwards. It prints how long that took, in seconds.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--rank", type=int, required=True)
parser.add_argument("--ranks", type=int, required=True)
parser.add_argument("--old", type=int, required=True)
parser.add_argument("--store", required=True)
parser.add_argument("--layers", type=int, default=24)
parser.add_argument("--width", type=int, default=1024)
args = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=args.ranks)
concerned = [0, *range(args.old, args.ranks)]
newcomers = dist.new_group(concerned)
state = [torch.randn(args.width, args.width) for _ in range(2 * args.layers)]
state += [torch.randn(args.width) for _ in range(2 * args.layers)]
while True:
    more = torch.tensor(1 if args.rank > 0 or sys.stdin.readline() else 0)
    dist.broadcast(more, 0)
    if not more:
        break
    dist.barrier()
    began = time.perf_counter()
    if args.rank in concerned:
        for tensor in state:
            dist.broadcast(tensor, 0, group=newcomers)
    dist.barrier()
    if args.rank == 0:
        print(time.perf_counter() - began, flush=True)
dist.destroy_process_group()
