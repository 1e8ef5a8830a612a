"""Recordings of a scheduler: the snapshot and the plan of every tick, in a file; and their replay.

One JSON object per line: first the setup that the scheduler was built from, then for every tick the snapshot and the
plan. A replay builds a scheduler from the setup, feeds it the recorded snapshots, and compares its plans with the
recorded ones: actions, devices, order, reasons, times. Every cluster can be recorded, and a replay needs nothing but the
recording.

File format: `kind` is the name of a class in `core.plan` or `sched.port`, and the other members are the names of its
fields. A rename there breaks recordings of earlier versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any, get_args

import msgspec

from gyrostat.core.errors import UsageError
from gyrostat.core.plan import Action, Plan
from gyrostat.sched.port import Change, Snapshot
from gyrostat.sched.state import SchedulerState
from gyrostat.sched.tick import tick

FORMAT = "gyrostat-ticks-1"
_KINDS: Mapping[str, type] = {kind.__name__: kind for kind in (*get_args(Change), *get_args(Action))}


class TickRecorder:
    """Writes every tick to a file. A `loop.Watcher`."""

    def __init__(self, path: Path, setup: Mapping[str, Any]) -> None:
        self._file: IO[bytes]
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise UsageError(f"the recording cannot be written to {path}: {error.strerror}") from error
        self._write({"format": FORMAT, "setup": dict(setup)})

    def __call__(self, snapshot: Snapshot, plan: Plan) -> None:
        self._write(
            {
                "now": snapshot.now,
                "changes": [_encode(change) for change in snapshot.changes],
                "actions": [_encode(action) for action in plan.actions],
                "wake_at": plan.wake_at,
            }
        )

    def flush(self) -> None:
        """Write buffered ticks to the file."""
        self._file.flush()

    def __enter__(self) -> TickRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _write(self, value: object) -> None:
        self._file.write(msgspec.json.encode(value))
        self._file.write(b"\n")


@dataclass(frozen=True)
class ReplayDifference:
    """The first tick whose replay decided differently."""

    tick: int
    now: float
    recorded: str
    replayed: str


@dataclass(frozen=True)
class Replayed:
    """The result of a replay."""

    ticks: int
    actions: int
    difference: ReplayDifference | None


def replay(path: Path, build: Callable[[Mapping[str, Any]], SchedulerState]) -> Replayed:
    """Build a scheduler from the recorded setup with `build`, and compare its decisions with the recorded ones."""
    setup, recording = read_recording(path)
    scheduler_state = build(setup)
    ticks = actions = 0
    for snapshot, recorded in recording:
        ticks += 1
        plan = tick(scheduler_state, snapshot)
        actions += len(plan.actions)
        if plan != recorded:
            return Replayed(
                ticks, actions, ReplayDifference(ticks, snapshot.now, *_first_difference(recorded, plan))
            )
    return Replayed(ticks, actions, None)


def read_recording(path: Path) -> tuple[Mapping[str, Any], Iterator[tuple[Snapshot, Plan]]]:
    """The setup of the scheduler, and the snapshot and the plan of every tick."""
    lines = _lines(path)
    head = next(lines, {})
    if head.get("format") != FORMAT:
        raise UsageError(
            f"{path} is no recording of ticks ({FORMAT}): it begins with format {head.get('format')!r}"
        )
    return head["setup"], _ticks(path, lines)


def _ticks(path: Path, lines: Iterator[dict[str, Any]]) -> Iterator[tuple[Snapshot, Plan]]:
    for number, line in enumerate(lines, 1):
        try:
            yield (
                Snapshot(line["now"], tuple(map(_decode, line["changes"]))),
                Plan(line["now"], tuple(map(_decode, line["actions"])), line["wake_at"]),
            )
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            raise UsageError(f"{path}, tick {number}: not a valid tick of a recording: {error}") from error


def _first_difference(recorded: Plan, replayed: Plan) -> tuple[str, str]:
    for number in range(max(len(recorded.actions), len(replayed.actions))):
        mine, other = (
            str(plan.actions[number]) if number < len(plan.actions) else "no further action"
            for plan in (recorded, replayed)
        )
        if mine != other:
            return mine, other
    return f"wakes at {recorded.wake_at}", f"wakes at {replayed.wake_at}"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield msgspec.json.decode(line, type=dict[str, Any])
                except msgspec.DecodeError as error:
                    raise UsageError(f"{path}, line {number} is no JSON object: {error}") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _encode(value: Any) -> dict[str, Any]:
    members = {field.name: getattr(value, field.name) for field in fields(value)}
    return {"kind": type(value).__name__, **msgspec.to_builtins(members)}


def _decode(members: dict[str, Any]) -> Any:
    members = dict(members)
    return msgspec.convert(members, _KINDS[members.pop("kind")])
