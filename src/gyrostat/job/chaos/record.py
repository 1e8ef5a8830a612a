"""The records of workers about their job, each in a file of its own, line by line, so that they outlive the worker.

The worker that runs virtual worker 0 records steps. A step that is repeated after a checkpoint was restored is recorded again,
and must be equal.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec


class WorkerStarted(msgspec.Struct, frozen=True, tag=True):
    """A worker has started."""

    at: float
    pid: int
    member: int


class WorkerTrains(msgspec.Struct, frozen=True, tag=True):
    """This worker runs its first micro-batch: it has the job's state."""

    at: float
    pid: int


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
    """This worker recovered from the loss of a peer, and goes on in another generation."""

    at: float
    generation: int
    again: int
    """Micro-batches that it runs again."""
    paused: float


class WorkerEnd(msgspec.Struct, frozen=True, tag=True):
    at: float
    step: int
    digest: str


Entry = WorkerStarted | WorkerTrains | TrainingBegan | StepDone | RecoveryNoted | WorkerEnd
_decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


class RecordWriter:
    """In the worker: appends to its file."""

    def __init__(self, directory: Path) -> None:
        self._file = os.open(
            directory / f"worker-{os.getpid()}.notes",
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
            0o600,
        )

    def write(self, entry: Entry) -> None:
        os.write(self._file, msgspec.json.encode(entry) + b"\n")


class RecordReader:
    """Reads the records of all workers in a directory while they are written."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}

    def new_entries(self) -> Iterator[Entry]:
        """The entries since the last call; those of one worker in order."""
        for path in sorted(self._directory.glob("worker-*.notes")):
            start = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(start)
                *whole, _ = file.read().split(b"\n")
            self._read[path] = start + sum(len(line) + 1 for line in whole)
            for line in whole:
                yield _decoder.decode(line)


@dataclass(frozen=True, kw_only=True)
class JobTotals:
    """What the report of a job with parameter servers adds up to."""

    updates: int
    samples: int | None
    """None: it was resumed, and the report has those since then only."""
    digest: str


@dataclass
class RecordedRun:
    """One run, as its workers recorded it."""

    steps: dict[int, tuple[float | None, int]] = field(default_factory=dict)
    """Loss and samples of every step."""
    times: list[float] = field(default_factory=list)
    """When steps were completed, including repeated ones."""
    digests: set[str] = field(default_factory=set)
    restored: int = 0
    """The number of restores from a checkpoint."""
    begun: int = 0
    """How often training began at step 0."""
    recovered: set[tuple[int, int]] = field(default_factory=set)
    """Recoveries from peers: how often training had begun, and the generation, which is numbered anew each time."""
    redone: int = 0
    """Micro-batches run again by peers."""
    contradictions: list[str] = field(default_factory=list)
    """Steps that differed when they were repeated."""
    on_servers: bool = False
    """Its parameters are on servers: steps are the batches that workers have run, also those that were run again, in the order
    in which they were read."""
    totals: JobTotals | None = None
    """What it reports, once it has ended well. Only with servers."""

    def add(self, entry: Entry) -> None:
        match entry:
            case StepDone(at=at, loss=loss, samples=samples) if self.on_servers:
                self.times.append(at)
                self.steps[len(self.times)] = loss, samples
            case WorkerEnd() if self.on_servers:
                pass  # the servers have the result
            case StepDone(at=at, step=step, loss=loss, samples=samples):
                self.times.append(at)
                before = self.steps.setdefault(step, (loss, samples))
                if before != (loss, samples):
                    self.contradictions.append(
                        f"step {step} had loss and samples {before}, and {(loss, samples)} when it was repeated"
                    )
            case TrainingBegan(resumed_from=str()):
                self.restored += 1
            case TrainingBegan():
                self.begun += 1
            case RecoveryNoted(generation=generation, again=again):
                self.recovered.add((self.restored + self.begun, generation))
                self.redone += again
            case WorkerEnd(digest=digest):
                self.digests.add(digest)

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)

    @property
    def samples(self) -> int:
        return sum(samples for _, samples in self.steps.values())
