"""A job of a trace: what the scheduler sees (`request`), and its actual duration."""

from __future__ import annotations

from dataclasses import dataclass

from gyrostat.core.request import JobRequest


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A request and how long the job takes."""

    request: JobRequest
    duration: float
    """Seconds on the devices that it requests, of the reference type and well placed."""
    tenant: str | None = None
    """The tenant for reports, if that is not the VC."""
