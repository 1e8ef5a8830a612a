"""Deaths of a job's workers, and how the job continued: written by its host, line by line, and read as events of the cluster.

The file is complete even if no daemon runs. How many of its lines have become events is part of the job's record, so each
becomes one, whenever the daemon is killed.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec

_FILE = "logs/incidents.jsonl"


class IncidentKind(StrEnum):
    """Kinds of events."""

    WORKER_DIED = "worker died"
    RECOVERED = "recovered"
    """The other workers went on."""
    SERVER_DIED = "server died"
    """One of its parameter servers."""
    SERVERS = "servers"
    """Parameter servers were added, removed or found slow, or slots of parameters went back or moved."""
    RESTARTING = "workers restart"
    """All workers start again, from the newest checkpoint."""


class Incident(msgspec.Struct, frozen=True):
    kind: IncidentKind
    text: str


def incidents_file(directory: Path) -> Path:
    """`directory`: the job's."""
    return directory / _FILE


def encode_incident(incident: Incident) -> str:
    return msgspec.json.encode(incident).decode()


def read_incidents(directory: Path, after: int) -> list[Incident]:
    """All but the first `after`. A line that is being written, or was cut off by a full disk, is left out."""
    found = []
    for line in incidents_file(directory).read_bytes().split(b"\n")[after:-1]:
        try:
            found.append(msgspec.json.decode(line, type=Incident))
        except msgspec.DecodeError:
            found.append(Incident(IncidentKind.WORKER_DIED, "its host could not record how"))
    return found
