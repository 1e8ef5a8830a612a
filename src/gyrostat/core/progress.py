"""The progress of a job: the position in the script that every worker, checkpoint and collective refers to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Progress:
    """Progress at a boundary: everything before it is done, nothing after it has begun.

    `step` counts all steps of the job. The others say where in the script's loops the boundary lies, so that a script
    started again can skip what is done: which `job.epochs` call (`epochs_call`), which epoch of it, which `job.steps`
    call within that epoch (`steps_call`), and how many of that call's steps are done (`done`). Outside of `job.epochs`
    the epoch is -1.
    """

    step: int = 0
    epochs_call: int = 0
    epoch: int = -1
    steps_call: int = 0
    done: int = 0
    pass_: int = 0
    """Which pass of the step; 0 at a boundary."""
    epochs_run: int = 0
    """Number of epochs of the last finished `job.epochs` loop; a script with more epochs continues after them."""

    def __str__(self) -> str:
        return f"step {self.step} (epoch {self.epoch}, step {self.done} of its loop, pass {self.pass_})"
