"""The time within which a newcomer arrives in its loop, once it holds the job's state: all others wait for it at the fence.

Between the fence and its loop the newcomer runs only the code of the script between loops that are over. If that code does not
end, the job would hang. So a thread watches the time. When it is over, the newcomer reports where it is and where the donor
waits, and is killed: to the others it is a worker that died, and they go on without it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

ARRIVAL_TIMEOUT_S = 60.0

_PACKAGE = str(Path(__file__).resolve().parents[2])


class ArrivalTimeout:
    """Started by the script's thread, at the fence."""

    def __init__(self, donor: int, step: int, give_up: Callable[[str], None]) -> None:
        self._seconds, self._donor, self._step, self._give_up = ARRIVAL_TIMEOUT_S, donor, step, give_up
        self._script = threading.get_ident()
        self._timer = threading.Timer(self._seconds, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def arrived(self) -> None:
        self._timer.cancel()

    def _expire(self) -> None:
        where = place(sys._current_frames().get(self._script))
        self._give_up(
            f"did not arrive in its loop within {self._seconds:g} s: it is at {where}, and worker {self._donor}, which sent "
            f"it the job's state, waits for it at the fence of step {self._step}"
        )


def place(frame: FrameType | None) -> str:
    """The innermost line of code that is not gyrostat's."""
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
