"""Joins the workers' traces into one file for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from pathlib import Path


def join_traces(parts: Path, file: Path) -> None:
    """A worker that was killed has left no part. Time begins at the first span."""
    events = [event for part in sorted(parts.glob("worker-*.json")) for event in json.loads(part.read_text())]
    begin = min((event["ts"] for event in events if "ts" in event), default=0)
    for event in events:
        if "ts" in event:
            event["ts"] -= begin
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
