"""Where in its loops a script is, and how a resumed script returns there. Pure bookkeeping.

A boundary is named by (`epochs_call`, `epoch`, `steps_call`, `done`): how many `job.epochs` loops are over, the epoch of
the one that is running (-1 outside), how many `job.steps` loops of that epoch are over, and how many steps of the running
one are done. The tuples are ordered as the script passes through them. A resumed script runs from the top; loops that
lie before its target yield nothing, and at the target the saved state is loaded.
"""

from __future__ import annotations

from dataclasses import replace

from gyrostat.core.errors import Misuse
from gyrostat.core.progress import Progress


class Loops:
    """The position in the script's loops, and the target of a resumed one."""

    def __init__(self) -> None:
        self.progress = Progress()
        self._target: Progress | None = None
        self._finished_target = False
        self._in_steps = False

    def resume_at(self, target: Progress, *, finished: bool) -> None:
        """Skip what lies before `target`. `finished`: it is the end of the script, not the start of a step."""
        self._target, self._finished_target = target, finished
        self._count_steps()

    def _count_steps(self) -> None:
        """In the loop that is resumed, the script sees the saved number of steps: the loop's limit may depend on it."""
        target = self._target
        if target is not None and _loop(self.progress) == _loop(target):
            self.progress = replace(self.progress, step=target.step - target.done)

    @property
    def target(self) -> Progress | None:
        return self._target

    @property
    def resuming(self) -> bool:
        """The script has not reached its target yet."""
        return self._target is not None

    def reached(self) -> None:
        """The saved state is loaded; from here on the script goes on normally."""
        if self._target is not None:
            self.progress, self._target = self._target, None

    @property
    def at_end(self) -> bool:
        """Whether this is the saved end of the script, where the state has to be loaded although no step follows."""
        return (
            self._finished_target
            and self._target is not None
            and _place(self.progress) == _place(self._target)
        )

    def place(self) -> tuple[int, ...] | None:
        """Where the script is between two loops over steps: the same in a resumed script. None inside such a loop, to which a
        resumed script does not return."""
        return None if self._in_steps else _loop(self.progress)

    def passes_again(self, place: tuple[int, ...]) -> bool:
        """Whether a script that resumes here passes `place`. It skips other epochs than the one that is running."""
        epochs_call, epoch, *_ = place
        return epoch < 0 or (epochs_call, epoch) == _loop(self.progress)[:2]

    # job.epochs

    def begin_epochs(self, count: int) -> range:
        """A `job.epochs(count)` loop begins; which epochs are left of it."""
        if self.progress.epoch >= 0:
            raise Misuse("job.epochs inside job.epochs; use one loop over epochs")
        self.end_steps()
        if self._target is None:
            return range(count)
        over = self._target.epochs_call - self.progress.epochs_call
        if (
            self._finished_target
            and over == 1
            and self._target.steps_call == 0
            and count > self._target.epochs_run
        ):
            # The job had ended, and now the script wants more epochs of its last loop.
            more = replace(self._target, epochs_call=self.progress.epochs_call, epoch=self._target.epochs_run)
            self._target, self._finished_target = more, False
        elif over > 0:
            return range(0)
        return range(max(self._target.epoch, 0), count)

    def begin_epoch(self, epoch: int) -> None:
        self.end_steps()
        self.progress = replace(self.progress, epoch=epoch, steps_call=0, done=0, epochs_run=epoch + 1)
        self._count_steps()

    def end_epochs(self) -> None:
        self.end_steps()
        self.progress = replace(
            self.progress, epochs_call=self.progress.epochs_call + 1, epoch=-1, steps_call=0, done=0
        )
        self._count_steps()

    # job.steps

    def begin_steps(self) -> int | None:
        """A `job.steps` loop begins; how many of its steps are done, or None if all are."""
        self.end_steps()
        self._in_steps = True
        if self._target is None:
            return 0
        here = (self.progress.epochs_call, self.progress.epoch)
        there = (self._target.epochs_call, self._target.epoch)
        if here > there or (here == there and self.progress.steps_call > self._target.steps_call):
            raise Misuse(
                f"the script passed the place where its checkpoint was taken ({self._target}) without reaching it: "
                "its loops are not those of the script that wrote the checkpoint"
            )
        if here < there or self.progress.steps_call < self._target.steps_call or self._finished_target:
            return None
        return self._target.done

    def end_steps(self) -> None:
        """The running `job.steps` loop, if any, is over: used up, or left by `break`."""
        if self._in_steps:
            self._in_steps = False
            self.progress = replace(self.progress, steps_call=self.progress.steps_call + 1, done=0)
            self._count_steps()

    def step_done(self) -> None:
        self.progress = replace(
            self.progress, step=self.progress.step + 1, done=self.progress.done + 1, pass_=0
        )

    def pass_done(self) -> None:
        self.progress = replace(self.progress, pass_=self.progress.pass_ + 1)


def _place(progress: Progress) -> tuple[int, int, int, int]:
    return (*_loop(progress), progress.done)


def _loop(progress: Progress) -> tuple[int, int, int]:
    return (progress.epochs_call, progress.epoch, progress.steps_call)
