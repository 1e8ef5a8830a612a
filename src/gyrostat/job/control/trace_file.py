"""Joins what the workers traced into one file that chrome://tracing and Perfetto read."""

from __future__ import annotations

import json
from pathlib import Path


def join_traces(parts: Path, file: Path) -> None:
    """Write all parts that are there; a worker that was killed has left none. Time begins at the first span."""
    events = [event for part in sorted(parts.glob("worker-*.json")) for event in json.loads(part.read_text())]
    begin = min((event["ts"] for event in events if "ts" in event), default=0)
    for event in events:
        if "ts" in event:
            event["ts"] -= begin
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
