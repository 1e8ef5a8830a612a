"""The report of a run: one JSON object, each of its members on a line of its own, written beside and renamed
into place.

`steps`, `samples`, `seconds`, `throughput`, `digest`, `losses` and `events` always exist. Members are
only ever added.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gyrostat.core.files import READABLE, write_atomically
from gyrostat.core.job import Determinism
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.control.run_request import RunRequest


def report(outcome: Outcome, request: RunRequest | None = None) -> dict[str, object]:
    """The report as an object that any JSON encoder takes. The request comes first, if it is given."""
    return _asked(request) | {
        "virtual_workers": outcome.virtual_workers,
        "workers": outcome.workers,
        "servers": outcome.servers,
        "steps": outcome.steps,
        "first_step": outcome.first_step,
        "reported_from": outcome.reported_from,
        "samples": outcome.samples,
        "seconds": outcome.seconds,
        "total_seconds": outcome.total_seconds,
        "throughput": outcome.throughput,
        "digest": outcome.digest,
        "resumed_from": outcome.resumed_from,
        "refused_checkpoints": list(outcome.refused),
        "reduction": None if outcome.reduction is None else dataclasses.asdict(outcome.reduction),
        "checkpoints": [dataclasses.asdict(checkpoint) for checkpoint in outcome.checkpoints],
        "events": [event.as_json() for event in outcome.events],
        "exit_codes": list(outcome.exit_codes),
        "failure": _failure(outcome),
        "stopped_by": None if outcome.stopped_by is None else signal.Signals(outcome.stopped_by).name,
        "logs": [{"step": record.step, **record.metrics} for record in outcome.logs],
        "losses": list(outcome.losses),
    }


def write_report(path: Path, outcome: Outcome, request: RunRequest | None = None) -> None:
    write_json(path, report(outcome, request))


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Atomic: a reader sees the old file or the complete new one."""
    members = (
        f"  {msgspec.json.encode(name).decode()}: {msgspec.json.encode(value).decode()}"
        for name, value in content.items()
    )
    text = "{\n" + ",\n".join(members) + "\n}\n"
    write_atomically(path, text.encode(), durable=False, mode=READABLE)


def _asked(request: RunRequest | None) -> dict[str, object]:
    if request is None:
        return {}
    options = request.options
    return {
        "determinism": options.determinism,
        "pool": None if options.pool is None else list(options.pool.types),
        "mixes_types": options.determinism is Determinism.HETEROGENEOUS,
    }


def _failure(outcome: Outcome) -> dict[str, object] | None:
    if outcome.failure is not None:
        return dataclasses.asdict(outcome.failure)
    return None if outcome.diverged is None else {"cause": "diverged", "summary": outcome.diverged}
