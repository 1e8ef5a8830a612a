"""A job of a trace: what the scheduler may know (`request`), and how long it really takes."""

from __future__ import annotations

from dataclasses import dataclass

from gyrostat.core.request import JobRequest


@dataclass(frozen=True, slots=True)
class TraceJob:
    request: JobRequest
    duration: float
    """Seconds on the devices it asked for, of the reference type and well placed."""
    tenant: str | None = None
    """For reports, if that is not the VC that it runs in."""
