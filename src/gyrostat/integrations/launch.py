"""Joining this process's job from inside a framework, which takes a launcher's environment variables for its own.

gyrostat's workers have RANK and WORLD_SIZE, as torchrun's have. A framework that finds them would bring up a process group
of its own, so they are hidden when an integration is imported. If another launcher has set them, it is refused.
"""

from __future__ import annotations

from gyrostat.core.errors import Refused
from gyrostat.data.rng import Streams
from gyrostat.engine import environment
from gyrostat.engine.script import session
from gyrostat.engine.script.checks import check_no_process_group
from gyrostat.engine.script.job import Job


def hide_launcher() -> None:
    """Called when an integration is imported, before the framework looks at the environment."""
    if session.assigned():
        environment.hide_launcher()


def join(seed: int) -> Job:
    """This process's job: the one that the script has joined, or a new one."""
    if not session.assigned() and environment.launched_by_others():
        raise Refused(
            "this process was started by torchrun, accelerate launch or another launcher of torch.distributed; gyrostat "
            "brings its workers together itself: gyrostat run -n N -w P SCRIPT"
        )
    check_no_process_group()
    job = session.current()
    if job is None:
        streams = Streams()
        before = streams.save()
        job = session.init(seed=seed)
        streams.exchange(before)  # the framework seeds by itself
    return job
