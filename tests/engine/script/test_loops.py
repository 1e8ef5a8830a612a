"""Where in its loops a script is, and how it gets back there. No torch, no processes."""

from __future__ import annotations

import pytest

from gyrostat.core.errors import Misuse
from gyrostat.core.progress import Progress
from gyrostat.engine.script.loops import Loops


def script(
    loops: Loops, *, epochs: int = 3, steps: tuple[int, ...] = (4, 2), tail: int = 2
) -> list[Progress]:
    """A script with two `job.steps` loops per epoch and one after the epochs. Returns the boundaries it passed."""
    passed: list[Progress] = []

    def run(total: int) -> None:
        done = loops.begin_steps()
        if done is not None:
            if loops.resuming:
                loops.reached()
            for _ in range(done, total):
                passed.append(loops.progress)
                loops.step_done()
        loops.end_steps()

    for epoch in loops.begin_epochs(epochs):
        loops.begin_epoch(epoch)
        for total in steps:
            run(total)
    loops.end_epochs()
    run(tail)
    return passed


def test_boundaries_are_ordered_and_counted() -> None:
    passed = script(Loops())
    assert [progress.step for progress in passed] == list(range(20))
    assert passed == sorted(passed)
    assert passed[4] == Progress(step=4, epochs_call=0, epoch=0, steps_call=1, done=0, epochs_run=1)
    assert passed[-1] == Progress(step=19, epochs_call=1, epoch=-1, steps_call=0, done=1, epochs_run=3)


@pytest.mark.parametrize("number", range(20))
def test_a_resumed_script_goes_on_at_its_boundary(number: int) -> None:
    whole = script(Loops())
    loops = Loops()
    loops.resume_at(whole[number], finished=False)
    assert script(loops) == whole[number:]


def test_the_saved_end_is_recognised() -> None:
    loops = Loops()
    script(loops)
    again = Loops()
    again.resume_at(loops.progress, finished=True)
    assert script(again) == []
    assert again.at_end


def test_more_epochs_than_the_finished_job_had() -> None:
    loops = Loops()
    script(loops, tail=0)
    end = Loops()
    for epoch in end.begin_epochs(3):
        end.begin_epoch(epoch)
    end.end_epochs()
    longer = Loops()
    longer.resume_at(end.progress, finished=True)
    assert list(longer.begin_epochs(5)) == [3, 4]


def test_a_script_with_other_loops_is_refused() -> None:
    loops = Loops()
    loops.resume_at(Progress(step=7, epochs_call=0, epoch=1, steps_call=1, done=1), finished=False)
    with pytest.raises(Misuse, match="not those of the script"):
        script(loops, steps=(4,))


def test_epochs_inside_epochs() -> None:
    loops = Loops()
    for epoch in loops.begin_epochs(1):
        loops.begin_epoch(epoch)
        with pytest.raises(Misuse, match=r"inside job\.epochs"):
            loops.begin_epochs(2)


def test_a_limit_may_depend_on_the_steps_that_are_done() -> None:
    """`job.steps(loader, limit=20 - job.step)` means the same to a script that comes back in the middle of the loop."""
    loops = Loops()
    loops.resume_at(Progress(step=17, epoch=2, steps_call=1, done=3), finished=False)
    assert list(loops.begin_epochs(5)) == [2, 3, 4]
    loops.begin_epoch(2)
    assert loops.begin_steps() is None
    loops.end_steps()
    assert loops.progress.step == 14
    assert loops.begin_steps() == 3
    loops.reached()
    assert loops.progress.step == 17
