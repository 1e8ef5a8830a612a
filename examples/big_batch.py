"""A batch that does not fit into memory at once: the GPT example, 256 windows of text per update, in 128 MB.

    gyrostat run --virtual-workers 32 --workers 1 --reduction tree examples/big_batch.py

What it shows: memory is that of one virtual worker's micro-batch, however many virtual workers there are, and of a few
sets of gradients: log2 N in the order `tree`, N in the order `ddp`. The limit is real: the operating system gives the
process no more than `--memory` megabytes on top of what it has when training begins. The same batch in one forward,
`python examples/big_batch.py --batch-size 256`, runs out of it. `python examples/big_batch.py --table` tries all of
this for several sizes and prints the peaks.
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import gyrostat
import stdlib_text
from gpt import GPT

MB = 1 << 20


def memory(name: str) -> int:
    """Bytes of this process, as Linux counts them: VmRSS now in memory, VmHWM at its peak, VmData its own."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"/proc/self/status has no {name}"
    return int(found[1]) * 1024


def allow(megabytes: int) -> None:
    """From here on, allocate no more than so much on top of what there is."""
    limit = memory("VmData") + megabytes * MB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8, help="windows per virtual worker")
    parser.add_argument("--limit", type=int, default=10, help="the most steps per epoch")
    parser.add_argument("--memory", type=int, default=128, metavar="MB", help="for training; 0 is no limit")
    parser.add_argument("--small", action="store_true", help="shorter windows, for tests")
    parser.add_argument(
        "--table", action="store_true", help="compare numbers of virtual workers, and at once"
    )
    return parser.parse_args()


def train(args: argparse.Namespace) -> None:
    job = gyrostat.init(seed=7)
    text, _ = stdlib_text.load(limit=600_000)
    model = GPT(context=32) if args.small else GPT()
    model.to(job.device)
    windows = job.dataloader(
        stdlib_text.Windows(text, model.context), batch_size=args.batch_size, shuffle=True, drop_last=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    job.track(model=model, optimizer=optimizer)
    before = memory("VmRSS")
    if args.memory:
        allow(args.memory)

    for _ in job.epochs(args.epochs):
        for step in job.steps(windows, limit=args.limit):
            for tokens, following in step:
                logits = model(tokens.to(job.device)).flatten(0, 1)
                loss = F.cross_entropy(logits, following.to(job.device).flatten())
                step.backward(loss)
                mean_loss = job.mean(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            job.log(loss=mean_loss.item())
    job.log(
        total_batch=args.batch_size * job.virtual_workers,
        start_mb=before / MB,
        peak_mb=(memory("VmHWM") - before) / MB,
    )


def table(args: argparse.Namespace) -> None:
    """Every total batch by virtual workers in both orders, and in one forward, once without a limit for its peak."""
    own = ["--limit=2", *(["--small"] if args.small else [])]
    within = f"--memory={args.memory}"
    print(f"peak memory of training; the limit is {args.memory} MB\n")
    print("virtual workers  total batch           tree            ddp  one forward  within the limit")
    for virtual_workers in (1, 2, 4, 8, 16, 32):
        total = virtual_workers * args.batch_size
        each = f"--batch-size={args.batch_size}"
        tree, ddp = (run(virtual_workers, order, [*own, each, within]) for order in ("tree", "ddp"))
        at_once, limited = (
            run(1, "ddp", [*own, f"--batch-size={total}", limit]) for limit in ("--memory=0", within)
        )
        print(
            f"{virtual_workers:15}  {total:11}  {_shown(tree):>13}  {_shown(ddp):>13}  {_shown(at_once):>11}  "
            f"{_shown(limited)}",
            flush=True,
        )


def run(virtual_workers: int, order: str, args: list[str]) -> float | None:
    """This script as a job of one worker: megabytes of its peak, or None if it ran out of memory."""
    program = str(Path(sys.executable).with_name("gyrostat"))
    options = [f"--virtual-workers={virtual_workers}", "--workers=1", f"--reduction={order}"]
    ended = subprocess.run([program, "run", *options, __file__, *args], capture_output=True, text=True)
    output = ended.stdout + ended.stderr
    if ended.returncode == 0:
        return float(re.findall(r"peak_mb (\S+)", output)[-1])
    if "allocate memory" in output or "MemoryError" in output:
        return None
    raise SystemExit(output)


def _shown(megabytes: float | None) -> str:
    return "out of memory" if megabytes is None else f"{megabytes:.0f} MB"


if __name__ == "__main__":
    arguments = parse()
    table(arguments) if arguments.table else train(arguments)
