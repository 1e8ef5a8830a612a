"""Where a step's time goes: spans of one worker, in Chrome's trace format.

`gyrostat run --trace FILE` asks for it; each worker writes a part, the launcher joins them. chrome://tracing or Perfetto show
a process per worker, with one track for the script's thread and one for the reducer, which sums buckets while the last
virtual worker's backward still runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

SCRIPT, REDUCER = 1, 2
_NOTHING = nullcontext()
_TRACKS = {SCRIPT: "script", REDUCER: "reducer"}


class NoTracer:
    """Records nothing: the default."""

    active = False

    def span(self, name: str, *, track: int = SCRIPT, **details: Any) -> AbstractContextManager[None]:
        return _NOTHING

    def add(self, name: str, start: int, stop: int, *, track: int = SCRIPT, **details: Any) -> None:
        pass

    def close(self) -> None:
        pass


class Tracer(NoTracer):
    """Collects the spans of one worker. Times are the machine's monotonic clock, so that workers agree on them."""

    active = True

    def __init__(self, path: Path, worker: int) -> None:
        self._path, self._worker = path, worker
        self._events: list[dict[str, Any]] = [_name("process_name", worker, 0, f"worker {worker}")]
        self._events += [_name("thread_name", worker, track, name) for track, name in _TRACKS.items()]

    @contextmanager
    def span(self, name: str, *, track: int = SCRIPT, **details: Any) -> Iterator[None]:
        start = now()
        try:
            yield
        finally:
            self.add(name, start, now(), track=track, **details)

    def add(self, name: str, start: int, stop: int, *, track: int = SCRIPT, **details: Any) -> None:
        self._events.append(
            {
                "name": name,
                "ph": "X",
                "ts": start / 1000,
                "dur": (stop - start) / 1000,
                "pid": self._worker,
                "tid": track,
                "args": details,
            }
        )

    def close(self) -> None:
        self._path.write_text(json.dumps(self._events))


def now() -> int:
    """Nanoseconds."""
    return time.monotonic_ns()


def _name(kind: str, worker: int, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": worker, "tid": track, "args": {"name": name}}
