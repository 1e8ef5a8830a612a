"""What a worker tells whoever watches it. The port between the engine and the room `job` above it.

Only the worker that runs virtual worker 0 reports steps, logs, probes and checkpoints; all report what they run, and that they
finished.
`NullSupervisor` is what a plain `python train.py` gets: it prints what `job.log` is given, and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from gyrostat.core.job import ReductionChoice
from gyrostat.core.placement import Placement


class Supervisor(Protocol):
    """Receives what happens in a worker. Calls must be quick and must not raise."""

    def started(
        self,
        step: int,
        resumed_from: str | None,
        refused: list[str],
        virtual_workers: int,
        reduction: ReductionChoice,
        alike: Mapping[str, str],
    ) -> None:
        """Training begins at `step`, from a checkpoint or from scratch; `refused` says which ones could not be used.

        `virtual_workers` is N, which the script may have chosen; `reduction` is how gradients are added, and why so; `alike` is
        what must be equal on all workers.
        """

    def stepped(
        self, step: int, epoch: int, loss: float | None, samples: int, busy: Sequence[float] = ()
    ) -> None:
        """Step `step` (counted from 1) is complete: virtual worker 0's loss, and samples of all N.

        `busy`: seconds for which each worker ran its virtual workers, before it waited for others.
        """

    def runs(self, step: int, rank: int, number: int, samples: Sequence[int] | None) -> None:
        """The script is about to get virtual worker `rank`'s micro-batch `number` after `step` steps: these samples, if it is
        the job that orders them."""

    def ran(self) -> None:
        """It is done with that."""

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """The script called `job.log`."""

    def probed(self, step: int, digest: str, tensors: Mapping[str, str]) -> None:
        """The digest of all tracked state after `step` steps, and of each tensor if asked for."""

    def checkpoints(self) -> None:
        """A checkpoint is about to be written: whoever resumes from it does not say again what came before."""

    def checkpointed(self, step: int, path: str, seconds: float, blocked: float) -> None:
        """The checkpoint of step `step` is in place. That took so many seconds, and training stood still for `blocked`."""

    def checkpoint_failed(self, reason: str) -> None:
        """One could not be written; training goes on, and the next will be tried."""

    def finished(self, step: int, digest: str) -> None:
        """The script has ended well after `step` steps, with this digest of all tracked state."""

    def ready(self, alike: Mapping[str, str]) -> None:
        """A newcomer has built everything and waits to join. `alike`: what must be equal on all workers."""

    def prepared(self, generation: int) -> None:
        """Connected to the members of a generation to come."""

    def switched(
        self, generation: int, step: int, workers: int, paused: float, why_all: str | None = None
    ) -> None:
        """The generation began at boundary `step`, on so many workers; this one stood still for `paused` seconds.

        `why_all`: a newcomer says why it could not follow the others and had to be told all state at the fence.
        """

    def lost(self, generation: int, why: str) -> None:
        """This worker cannot go on in this generation: it has lost another one, and waits for those that are left."""

    def recovered(self, generation: int, placement: Placement, again: int, paused: float) -> None:
        """Those that are left have found one another; this worker has `again` micro-batches to run that others had run.

        It stood still for `paused` seconds.
        """


class NullSupervisor:
    """The supervisor of a worker that nobody watches."""

    def started(
        self,
        step: int,
        resumed_from: str | None,
        refused: list[str],
        virtual_workers: int,
        reduction: ReductionChoice,
        alike: Mapping[str, str],
    ) -> None:
        for reason in refused:
            print(f"gyrostat: {reason}", file=sys.stderr)
        if resumed_from:
            print(f"gyrostat: resumed at step {step} from {resumed_from}", file=sys.stderr)

    def stepped(
        self, step: int, epoch: int, loss: float | None, samples: int, busy: Sequence[float] = ()
    ) -> None:
        pass

    def runs(self, step: int, rank: int, number: int, samples: Sequence[int] | None) -> None:
        pass

    def ran(self) -> None:
        pass

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        print(f"step {step}  " + "  ".join(f"{name} {value:.6g}" for name, value in metrics.items()))

    def probed(self, step: int, digest: str, tensors: Mapping[str, str]) -> None:
        pass

    def checkpoints(self) -> None:
        pass

    def checkpointed(self, step: int, path: str, seconds: float, blocked: float) -> None:
        pass

    def checkpoint_failed(self, reason: str) -> None:
        print(f"gyrostat: {reason}", file=sys.stderr)

    def finished(self, step: int, digest: str) -> None:
        pass

    def ready(self, alike: Mapping[str, str]) -> None:
        pass

    def prepared(self, generation: int) -> None:
        pass

    def switched(
        self, generation: int, step: int, workers: int, paused: float, why_all: str | None = None
    ) -> None:
        pass

    def lost(self, generation: int, why: str) -> None:
        pass

    def recovered(self, generation: int, placement: Placement, again: int, paused: float) -> None:
        pass
