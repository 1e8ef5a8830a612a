"""gyrostat's side of a comparison: an example's training loop on the public surface, for `gyrostat run`."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import gyrostat
from gyrostat.engine.reduce.tree import TreeOrder
from turns import Turns
from workloads import SEED, WORKLOADS

_ENDLESS = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--turns", required=True)
    parser.add_argument(
        "--buffers", type=Path, help="how many sets of gradients the tree folds with goes here"
    )
    args = parser.parse_args()

    job = gyrostat.init(seed=SEED)
    work = WORKLOADS[args.workload]()
    train = job.dataloader(work.dataset, batch_size=work.batch_size, shuffle=True, drop_last=True)
    job.track(model=work.model, optimizer=work.optimizer)

    turns = Turns(args.turns)
    for _ in job.epochs(_ENDLESS):
        for step in job.steps(train):
            for batch in step:
                step.backward(work.loss(work.model, batch))
            work.update()
            if not turns.step_done():
                break
        if turns.over:
            break
    if args.buffers and job.is_main:
        args.buffers.write_text(str(folding_buffers()))


def folding_buffers() -> int:
    """All that were ever allocated: they are pooled. 0 in the other order."""
    return sum(thing.allocated_sets for thing in gc.get_objects() if isinstance(thing, TreeOrder))


if __name__ == "__main__":
    main()
