"""What workers note of their job, each in a file of its own, line by line: it is there whatever becomes of them.

A step is noted by the worker that runs virtual worker 0. One that is done again, after a checkpoint was restored, is noted
again; that must be the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec


class WorkerStarted(msgspec.Struct, frozen=True, tag=True):
    """A worker has come into being."""

    at: float
    pid: int
    member: int
    parent: int
    """Its fork parent's process id."""


class TrainingBegan(msgspec.Struct, frozen=True, tag=True):
    """Training begins, at `step`."""

    at: float
    step: int
    resumed_from: str | None


class StepDone(msgspec.Struct, frozen=True, tag=True):
    at: float
    step: int
    loss: float | None
    samples: int


class RecoveryNoted(msgspec.Struct, frozen=True, tag=True):
    """This worker goes on with those that are left after a death, in another generation."""

    at: float
    generation: int
    again: int
    """Micro-batches that it does again."""
    paused: float


class WorkerEnd(msgspec.Struct, frozen=True, tag=True):
    at: float
    step: int
    digest: str


Note = WorkerStarted | TrainingBegan | StepDone | RecoveryNoted | WorkerEnd
_decoder: msgspec.json.Decoder[Note] = msgspec.json.Decoder(Note)


class Notebook:
    """A worker's own file."""

    def __init__(self, directory: Path) -> None:
        self._file = os.open(
            directory / f"worker-{os.getpid()}.notes",
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
            0o600,
        )

    def write(self, note: Note) -> None:
        os.write(self._file, msgspec.json.encode(note) + b"\n")


class Reader:
    """All notebooks in a directory, while they are written."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}

    def news(self) -> Iterator[Note]:
        """What has been noted since the last time; of one worker in order."""
        for path in sorted(self._directory.glob("worker-*.notes")):
            start = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(start)
                *whole, _ = file.read().split(b"\n")
            self._read[path] = start + sum(len(line) + 1 for line in whole)
            for line in whole:
                yield _decoder.decode(line)


@dataclass
class RecordedRun:
    """One run, as its workers noted it."""

    steps: dict[int, tuple[float | None, int]] = field(default_factory=dict)
    """Loss and samples of every step."""
    times: list[float] = field(default_factory=list)
    """When steps were complete, those done again included."""
    digests: set[str] = field(default_factory=set)
    restored: int = 0
    """How often it went on from a checkpoint."""
    rescued: set[tuple[int, int]] = field(default_factory=set)
    """Generations in which it went on from peers; they are counted anew after every checkpoint that was restored."""
    redone: int = 0
    """Micro-batches done again by peers."""
    contradictions: list[str] = field(default_factory=list)
    """Steps that were not the same when they were done again."""

    def add(self, note: Note) -> None:
        match note:
            case StepDone(at=at, step=step, loss=loss, samples=samples):
                self.times.append(at)
                before = self.steps.setdefault(step, (loss, samples))
                if before != (loss, samples):
                    self.contradictions.append(
                        f"step {step} had loss and samples {before}, and when it was done again {(loss, samples)}"
                    )
            case TrainingBegan(resumed_from=str()):
                self.restored += 1
            case RecoveryNoted(generation=generation, again=again):
                self.rescued.add((self.restored, generation))
                self.redone += again
            case WorkerEnd(digest=digest):
                self.digests.add(digest)

    @property
    def samples(self) -> int:
        return sum(samples for _, samples in self.steps.values())
