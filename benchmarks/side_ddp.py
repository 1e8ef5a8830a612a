"""The other side: the same training loop written for plain DDP, with torch's own classes. One process per rank.

It trains what `side_gyrostat.py` trains, so after equally many steps both must end with the same digest. With several
micro-batches per step it accumulates, and reduces only with the last one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import gyrostat
from turns import Turns
from workloads import SEED, WORKLOADS, Workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--turns", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--store", required=True, help="a file where ranks meet")
    parser.add_argument("--micro-batches", type=int, default=1, help="per step")
    parser.add_argument("--report", type=Path, help="rank 0 writes its digest here")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=args.ranks)
    seed_all(SEED)
    work = WORKLOADS[args.workload]()
    seed_all(SEED + args.rank)
    train(work, Turns(args.turns), args.micro_batches)
    if args.rank == 0 and args.report:
        digest = gyrostat.digest(model=work.model, optimizer=work.optimizer)
        args.report.write_text(json.dumps({"digest": digest}))
    dist.barrier()
    dist.destroy_process_group()


def train(work: Workload, turns: Turns, micro_batches: int) -> None:
    model = DistributedDataParallel(work.model)
    sampler: DistributedSampler[Any] = DistributedSampler(work.dataset, shuffle=True, seed=SEED)
    loader = DataLoader(work.dataset, batch_size=work.batch_size, sampler=sampler, drop_last=True)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        batches = iter(loader)
        for _ in range(len(loader) // micro_batches):
            with model.no_sync():
                for batch in itertools.islice(batches, micro_batches - 1):
                    backward(work, model, batch, micro_batches)
            backward(work, model, next(batches), micro_batches)
            work.update()
            if not turns.step_done():
                return


def backward(work: Workload, model: DistributedDataParallel, batch: Any, micro_batches: int) -> None:
    loss = work.loss(model, batch)
    if micro_batches > 1:
        loss = loss / micro_batches
    loss.backward()  # type: ignore[no-untyped-call]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


if __name__ == "__main__":
    main()
