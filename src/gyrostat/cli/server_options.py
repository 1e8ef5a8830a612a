"""The options of `gyrostat run` for a job with parameter servers: which apply, and how they are read. Pure.

An option that has no meaning there is refused by name, and so is an option of servers without `--servers`.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from gyrostat.cli.options import parse_schedule_entries
from gyrostat.core.errors import UsageError
from gyrostat.core.roles import ServerRole

if TYPE_CHECKING:
    from gyrostat.job.control.run_request import ServerSettings

_ONE_MACHINE = "a job with parameter servers runs on one machine"
_ALONE = "its workers form no group and add no gradients"
REFUSED = {
    "placement": "workers and virtual workers are independent there: use --workers P",
    "reduction": _ALONE,
    "recovery": "a worker that dies is replaced, and its shard goes back; for servers use --server-recovery",
    "min_workers": "its workers never wait for one another: leave it out",
    "paced": "only tracked modules can be emulated, and parameters are on servers: leave it out",
    "stragglers": "a slow worker gets fewer shards there, always: leave it out",
    "straggler_factor": "a slow worker gets fewer shards there, always: leave it out",
    "straggler_steps": "a slow worker gets fewer shards there, always: leave it out",
    "straggler_pause": "a slow worker gets fewer shards there, always: leave it out",
    "straggler_return": "a slow worker gets fewer shards there, always: leave it out",
    "store": _ONE_MACHINE,
    "nodes": _ONE_MACHINE,
    "node": _ONE_MACHINE,
    "listen": _ONE_MACHINE,
    "token_file": _ONE_MACHINE,
    "node_timeout": _ONE_MACHINE,
    "lease": _ONE_MACHINE,
    "trace": "traces show the phases of synchronous steps: leave it out",
}
"""Parameters of `run` that a job with parameter servers does not have, and why."""
ONLY_WITH_SERVERS = ("server_cores", "server_recovery", "server_adjust", "record")


def check_options(given: Collection[str], servers: int) -> None:
    """`given`: the parameters that the user has set. Raises `UsageError` for the first that does not apply."""
    if not servers:
        for name in ONLY_WITH_SERVERS:
            if name in given:
                raise UsageError(f"{_option(name)} is for a job with parameter servers: --servers S")
        return
    for name, reason in REFUSED.items():
        if name in given:
            raise UsageError(f"{_option(name)} does not go together with --servers: {reason}")


def choose_servers(
    role: ServerRole,
    workers: int | None,
    schedule: str | None,
    record: Path | None,
) -> tuple[ServerSettings, tuple[tuple[int, int], ...]]:
    """The servers and workers that the job begins with, and (update, workers) of every later change."""
    from gyrostat.job.control.run_request import ServerSettings

    entries = [] if schedule is None else parse_schedule_entries(schedule)
    for update, count in entries:
        if count < 0 or (update == 0 and count < 1):
            raise UsageError(f"--schedule {schedule} has {count} workers at update {update}")
    if entries and entries[0][0] == 0:
        first = entries.pop(0)[1]
        if workers is not None and workers != first:
            raise UsageError(
                f"--schedule {schedule} begins with {first} workers, but --workers says {workers}"
            )
        workers = first
    settings = ServerSettings(role=role, workers=1 if workers is None else workers, record=record)
    return settings, tuple(entries)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
