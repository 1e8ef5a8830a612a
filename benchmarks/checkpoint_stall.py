"""For how long a checkpoint of a 100 MB model stops training, against `torch.save` of the same state.

The GPT example, widened to 25 million parameters, with AdamW: 300 MB of state. Ours is what the script sees: from the
end of one step's body to the beginning of the next, with a checkpoint in between, and then, before its optimizer makes the next
update, what the job does there, which is to wait until momenta have been copied. Theirs is `torch.save` of the same
state_dicts to a new file, which is in place when it returns, but not yet safe; in the second figure it is synced too, as
every checkpoint of ours is. The third is the price of what goes on behind: a step while a checkpoint is written.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import gyrostat
from figures import Figure, Options, Target, main
from gyrostat.engine.checkpoint.writer import THREAD
from gyrostat.engine.script import session
from pairs import Pair, show_progress
from workloads import SEED, Workload, gpt

TARGET = Target(at_most=0.1)
WIDTH, LAYERS = 512, 8
WARM_UP_STEPS = 3


def measure(options: Options) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="gyrostat-benchmark-") as name:
        training = Training(wide_gpt(), Path(name) / "ours")
        for _ in range(WARM_UP_STEPS):
            training.step()
        print(f"the first checkpoint, into fresh memory, stopped training for {training.stall():.1f} ms")
        saver = Saver(training.work, Path(name))
        plain: list[Pair] = []
        synced: list[Pair] = []
        beside: list[Pair] = []
        for number in range(options.pairs):
            for sync, pairs in ((False, plain), (True, synced)):
                pairs.append(one_pair(training, saver, sync=sync, ours_first=number % 2 == 0))
                beside.append(Pair(training.step_while_writing, training.step()))
            show_progress(
                number + 1, options.pairs, f"{plain[-1].ours:.1f} ms against {plain[-1].theirs:.1f} ms"
            )
        session.finish()  # before the directory goes
    what = f"a checkpoint of {saver.megabytes:.0f} MB of state"
    save, safe = "torch.save", "torch.save and fsync"
    yield Figure(name=what, ours="stall", theirs=save, unit="ms", pairs=plain, target=TARGET)
    yield Figure(name=f"{what}, both safe", ours="stall", theirs=safe, unit="ms", pairs=synced)
    yield Figure(name="a step while one is written", ours="beside", theirs="alone", unit="ms", pairs=beside)


def one_pair(training: Training, saver: Saver, *, sync: bool, ours_first: bool) -> Pair:
    if ours_first:
        ours = training.stall()
        return Pair(ours, saver.save(sync=sync))
    theirs = saver.save(sync=sync)
    return Pair(training.stall(), theirs)


def wide_gpt() -> Workload:
    """The GPT example at 100 MB."""
    from gpt import GPT

    model = GPT(width=WIDTH, layers=LAYERS, heads=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return dataclasses.replace(gpt(), model=model, optimizer=optimizer, batch_size=1)


class Training:
    """A job of one worker, one step at a time."""

    def __init__(self, work: Workload, directory: Path) -> None:
        self.work = work
        self.step_while_writing = 0.0
        """Milliseconds that a step took, on average, while the last checkpoint was written."""
        # Hooks of all optimizers come before those of a single one, in the order of their registration: ours enclose the job's.
        register_optimizer_step_pre_hook(self._update_asked_for)
        self._job = gyrostat.init(seed=SEED, checkpoint_dir=directory)
        work.optimizer.register_step_pre_hook(self._update_begins)
        self._asked = self._stalled = 0.0
        self._steps = self._run()

    def _update_asked_for(self, *_: object) -> None:
        self._asked = time.perf_counter()

    def _update_begins(self, *_: object) -> None:
        self._stalled += 1000 * (time.perf_counter() - self._asked)

    def step(self) -> float:
        """Run one; how long its body took, in milliseconds."""
        return next(self._steps)

    def stall(self) -> float:
        """Milliseconds between the bodies of two steps, with a checkpoint taken there, and before the update of the second.

        Returns when it is written.
        """
        self._job.save()
        steps = [self.step()]
        stalled = self._stalled
        while any(thread.name == THREAD for thread in threading.enumerate()):
            steps.append(self.step())
        self.step_while_writing = statistics.fmean(steps)
        self.step()  # tells the job that its writer is free
        return stalled

    def _run(self) -> Iterator[float]:
        work, job = self.work, self._job
        train = job.dataloader(work.dataset, batch_size=work.batch_size, shuffle=True, drop_last=True)
        job.track(model=work.model, optimizer=work.optimizer)
        ended = time.perf_counter()
        for _ in job.epochs(1_000_000):
            for step in job.steps(train):
                began = time.perf_counter()
                self._stalled = 1000 * (began - ended)
                for batch in step:
                    step.backward(work.loss(work.model, batch))
                work.update()
                yield 1000 * (time.perf_counter() - began)
                ended = time.perf_counter()


class Saver:
    """What a script would do by hand. The three newest files are kept, as ours are."""

    def __init__(self, work: Workload, directory: Path) -> None:
        self._work, self._directory = work, directory
        self._files: list[Path] = []
        self.save(sync=True)
        self.megabytes = self._files[0].stat().st_size / 1e6

    def save(self, *, sync: bool) -> float:
        """Milliseconds."""
        path = self._directory / f"theirs-{time.monotonic_ns()}.pt"
        self._files.append(path)
        began = time.perf_counter()
        torch.save(
            {"model": self._work.model.state_dict(), "optimizer": self._work.optimizer.state_dict()}, path
        )
        if sync:
            with path.open("rb") as file:
                os.fsync(file)
        seconds = time.perf_counter() - began
        if len(self._files) > 3:
            self._files.pop(0).unlink()
        return 1000 * seconds


if __name__ == "__main__":
    main(__doc__ or "", measure)
