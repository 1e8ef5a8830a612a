"""Did a script leave a loop by `break`, or did `sys.exit` tear it down?

A generator cannot tell: it is closed either way. But when an exception tears it down, the script still stands at the
instruction that raised, and the exception's traceback names the same instruction. After a `break` it stands elsewhere.
"""

from __future__ import annotations

import sys
from types import CodeType

Place = tuple[CodeType, int]
"""An instruction of the script."""


def script_place() -> Place:
    """Where the script is. Called by a generator of ours that is being closed."""
    frame = sys._getframe(2)
    return frame.f_code, frame.f_lasti


def places_of(error: BaseException) -> set[Place]:
    """Where every function that `error` went through was at that time."""
    places: set[Place] = set()
    trace = error.__traceback__
    while trace is not None:
        places.add((trace.tb_frame.f_code, trace.tb_lasti))
        trace = trace.tb_next
    return places
