"""What a worker reports to its supervisor. The port between the engine and the package `job` above it.

Only the worker that runs virtual worker 0 reports steps, logs, probes and checkpoints; all workers report the micro-batch that
they run, and that they finished. `NullSupervisor` is that of a plain `python train.py`: it prints what `job.log` is given, and
problems with checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from gyrostat.core.job import ReductionChoice
from gyrostat.core.logs import note
from gyrostat.core.placement import Placement


class Supervisor(Protocol):
    """Receives the reports of a worker. Calls must be quick and must not raise."""

    def started(
        self,
        step: int,
        resumed_from: str | None,
        refused: list[str],
        virtual_workers: int,
        reduction: ReductionChoice,
        compatibility: Mapping[str, str],
    ) -> None:
        """Training begins at `step`, from a checkpoint or from scratch; `refused`: why checkpoints could not be used.

        `virtual_workers` is N, which the script may have chosen; `reduction` is how gradients are added, and the reason;
        `compatibility` is what must be equal on all workers.
        """

    def stepped(
        self, step: int, epoch: int, loss: float | None, samples: int, busy: Sequence[float] = ()
    ) -> None:
        """Step `step` (counted from 1) is complete: virtual worker 0's loss, and samples of all N.

        `busy`: seconds for which each worker ran its virtual workers, before it waited for others.
        """

    def runs(self, step: int, rank: int, number: int, samples: Sequence[int] | None) -> None:
        """The script is about to get virtual worker `rank`'s micro-batch `number` after `step` steps.

        `samples`: their indices, if the job orders them.
        """

    def ran(self) -> None:
        """The script has run that micro-batch."""

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """The script called `job.log`."""

    def probed(self, step: int, digest: str, tensors: Mapping[str, str]) -> None:
        """The digest of all tracked state after `step` steps, and of each tensor if asked for."""

    def checkpoints(self) -> None:
        """A checkpoint is about to be taken: send all reports so far, because a resumed job does not repeat them."""

    def checkpointed(self, step: int, path: str, seconds: float, blocked: float) -> None:
        """The checkpoint of step `step` is in place. It took `seconds`, and training paused for `blocked` seconds."""

    def checkpoint_failed(self, reason: str) -> None:
        """A checkpoint could not be written; training goes on, and the next will be tried."""

    def finished(self, step: int, digest: str) -> None:
        """The script has ended without error after `step` steps, with this digest of all tracked state."""

    def ready(self, compatibility: Mapping[str, str]) -> None:
        """A newcomer has built everything and waits to join. `compatibility`: what must be equal on all workers."""

    def prepared(self, generation: int) -> None:
        """This worker is connected to the members of a generation to come; a newcomer has caught up, too."""

    def switched(
        self, generation: int, step: int, workers: int, paused: float, why_all: str | None = None
    ) -> None:
        """The generation began at boundary `step`, on `workers` workers; this one paused for `paused` seconds.

        `why_all`: why a newcomer had to receive all state at the fence.
        """

    def not_arrived(self, why: str) -> None:
        """This newcomer, for which all others wait, does not arrive in its loop: it is given up. Does not return."""

    def lost(self, generation: int, why: str) -> None:
        """This worker cannot go on in this generation: it has lost another one, and waits for the other survivors."""

    def recovered(self, generation: int, placement: Placement, again: int, paused: float) -> None:
        """The survivors go on together; this worker has `again` micro-batches to run that the dead worker had run.

        It paused for `paused` seconds.
        """


class NullSupervisor:
    """The supervisor of a worker that has none."""

    def started(
        self,
        step: int,
        resumed_from: str | None,
        refused: list[str],
        virtual_workers: int,
        reduction: ReductionChoice,
        compatibility: Mapping[str, str],
    ) -> None:
        for reason in refused:
            note(reason)
        if resumed_from:
            note(f"resumed at step {step} from {resumed_from}")

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
        note(reason)

    def finished(self, step: int, digest: str) -> None:
        pass

    def ready(self, compatibility: Mapping[str, str]) -> None:
        pass

    def prepared(self, generation: int) -> None:
        pass

    def switched(
        self, generation: int, step: int, workers: int, paused: float, why_all: str | None = None
    ) -> None:
        pass

    def not_arrived(self, why: str) -> None:
        pass

    def lost(self, generation: int, why: str) -> None:
        pass

    def recovered(self, generation: int, placement: Placement, again: int, paused: float) -> None:
        pass
