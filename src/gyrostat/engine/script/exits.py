"""Whether a script left a loop by `break` or by `sys.exit`.

A generator is closed either way. But when an exception closes it, the script is at the instruction that raised, and the
exception's traceback names the same instruction. After a `break` it is at another one.
"""

from __future__ import annotations

import sys
from types import CodeType

Place = tuple[CodeType, int]
"""An instruction of the script."""


def script_place() -> Place:
    """Where the script is. Called by one of the engine's generators while it is closed."""
    frame = sys._getframe(2)
    return frame.f_code, frame.f_lasti


def places_of(error: BaseException) -> set[Place]:
    """The instruction of every frame in the traceback of `error`."""
    places: set[Place] = set()
    trace = error.__traceback__
    while trace is not None:
        places.add((trace.tb_frame.f_code, trace.tb_lasti))
        trace = trace.tb_next
    return places
