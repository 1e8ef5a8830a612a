"""The other side of N virtual workers on one worker: gradient accumulation over N micro-batches, written by hand."""

from __future__ import annotations

import argparse
import itertools

import torch
from torch.utils.data import DataLoader

from turns import Turns
from workloads import SEED, WORKLOADS, Workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--turns", required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    work = WORKLOADS[args.workload]()
    train(work, Turns(args.turns), args.micro_batches)


def train(work: Workload, turns: Turns, micro_batches: int) -> None:
    loader = DataLoader(work.dataset, batch_size=work.batch_size, shuffle=True, drop_last=True)
    while True:
        batches = iter(loader)
        for _ in range(len(loader) // micro_batches):
            for batch in itertools.islice(batches, micro_batches):
                (work.loss(work.model, batch) / micro_batches).backward()  # type: ignore[no-untyped-call]
            work.update()
            if not turns.step_done():
                return


if __name__ == "__main__":
    main()
