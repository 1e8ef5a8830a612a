"""Manages a job's checkpoints: when one is due, what goes into it, which one to resume from.

Every worker looks for the newest usable checkpoint by itself, then all agree on it; only the main worker writes. All workers
reach the same decision at which boundary one is taken (`schedule.py`): the notice that the writer is free is part of the
pass reports, as requests are. A written checkpoint is reported at the next boundary, and so is one that could not be written:
training goes on. If the job ends or stops there, an error is raised. A checkpoint that the script has invalidated
(`checkpoint/latecopy.py`) is requested again in the same way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from gyrostat.core.errors import CheckpointError, Diverged, Misuse, OtherFingerprint
from gyrostat.core.job import CheckpointPolicy
from gyrostat.core.logs import note
from gyrostat.core.progress import Progress
from gyrostat.engine.checkpoint import (
    CheckpointSchedule,
    CheckpointStore,
    CheckpointTimer,
    Discarded,
    JobSnapshot,
    Writer,
    Written,
)
from gyrostat.engine.checkpoint.capture import (
    gather_contexts,
    only_updates_change,
    put_contexts,
    put_shared,
    take_shared,
)
from gyrostat.engine.supervisor import Supervisor
from gyrostat.engine.training.collectives import Collectives
from gyrostat.engine.training.reports import RequestBox, Requests
from gyrostat.engine.training.virtual_workers import VirtualWorkers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """Where a checkpoint resumes."""

    progress: Progress
    finished: bool


@dataclass(frozen=True)
class Boundary:
    """A job between two steps: what a checkpoint is taken of."""

    tracked: Mapping[str, Any]
    state: Mapping[str, Any]
    """`job.state`."""
    progress: Progress
    evaluated: Mapping[tuple[int, ...], Any]
    """Results of `job.evaluate` between loops, by place: a script that resumes here passes there again, with other state."""


class NoCheckpoints:
    """The job has no state of its own to save: plain DDP. Also the interface that the training loop uses."""

    def require_directory(self) -> None:
        """Raise `Misuse` if there is no directory to write to."""

    def describe(self, tracked: Mapping[str, Any]) -> dict[str, str]:
        """What must be equal on all workers, by name: the job, and what else decides bits."""
        return {}

    def join(self) -> None:
        """Before training: compare it with all workers."""

    def find(self) -> tuple[Target | None, str | None, list[str]]:
        """The newest usable checkpoint, its path, and why newer ones were refused."""
        return None, None, []

    def evaluations(self) -> Mapping[tuple[int, ...], Any]:
        """The results of `job.evaluate` before the checkpoint that is to be restored, where the script passes again."""
        return {}

    def restore(self, tracked: Mapping[str, Any]) -> dict[str, Any]:
        """Load what `find` found, overwriting everything; returns `job.state`."""
        return {}

    def boundary(self, state: Boundary, *, asked: bool, written: bool) -> None:
        """Take a checkpoint if one is due. It is written in the background; report earlier ones."""

    def before_update(self) -> None:
        """The script is about to call an optimizer's `step`."""

    def last(self, state: Boundary, *, finished: bool) -> None:
        """The job ends here: return when this boundary's checkpoint is in place, and those before it."""

    def left_midway(self, progress: Progress) -> None:
        """The script exited between two boundaries: complete what is being written, and take no other."""

    def writer_lost(self) -> None:
        """The worker that wrote checkpoints is dead: this one writes from now on, and all workers learn it in the same pass."""


class CheckpointManager(NoCheckpoints):
    """The checkpoints of one job, as one worker takes part in them."""

    def __init__(
        self,
        policy: CheckpointPolicy | None,
        workers: VirtualWorkers,
        collectives: Collectives,
        *,
        fingerprint: dict[str, str],
        seed: int,
        supervisor: Supervisor,
        requests: RequestBox,
    ) -> None:
        """`policy`: None if no checkpoints are written. `requests`: where the writer's thread puts its notices."""
        self._policy, self._workers, self._collectives = policy, workers, collectives
        self._fingerprint, self._seed = fingerprint, seed
        self._supervisor, self._requests = supervisor, requests
        self._store = None if policy is None else CheckpointStore(Path(policy.directory), keep=policy.keep)
        self._writer = (
            None
            if self._store is None
            else Writer(self._store, done=self._notify_written, invalidated=self._request_again)
        )
        self._turns = CheckpointSchedule(every=0 if policy is None else policy.every)
        self._timer = CheckpointTimer(interval_s=0.0 if policy is None else policy.interval_s)
        self._memory_ready = self._turns.every == 0  # where none is ever due, memory may never be needed
        self._job: dict[str, Any] = {}
        self._found: JobSnapshot | None = None

    def require_directory(self) -> None:
        if self._store is None:
            raise Misuse(
                "job.save() has nowhere to write; give `gyrostat run --checkpoint-dir DIR` or "
                "gyrostat.init(checkpoint_dir=DIR)"
            )

    def describe(self, tracked: Mapping[str, Any]) -> dict[str, str]:
        self._job = {
            "virtual_workers": self._workers.generation.placement.virtual_workers,
            "seed": self._seed,
            "tracked": {name: type(thing).__name__ for name, thing in tracked.items()},
        }
        return {**self._fingerprint, **{name: str(value) for name, value in self._job.items()}}

    def join(self) -> None:
        mine = {"fingerprint": self._fingerprint, "job": self._job}
        everyone = [
            msgspec.msgpack.decode(payload)
            for payload in self._workers.generation.group.exchange(
                "join", Progress(), msgspec.msgpack.encode(mine)
            )
        ]
        for worker, other in enumerate(everyone):
            _check_compatible(worker, other, everyone[0])

    def find(self) -> tuple[Target | None, str | None, list[str]]:
        if self._store is None or self._policy is None:
            return None, None, []
        if not self._policy.resume:
            if self._workers.generation.is_main:
                self._store.set_aside()
            return None, None, []
        found = self._store.find(self._job, self._fingerprint)
        snapshot = found.usable()
        step = -1 if snapshot is None else snapshot.progress.step
        seen = {
            int.from_bytes(payload, "little", signed=True)
            for payload in self._workers.generation.group.exchange(
                "find", Progress(), step.to_bytes(8, "little", signed=True)
            )
        }
        if len(seen) != 1:
            raise Diverged(
                f"workers found different checkpoints, of steps {sorted(seen)}; they must share the directory"
            )
        if snapshot is None:
            return None, None, found.refused
        self._found, self._turns.last_step = snapshot, step
        return (
            Target(snapshot.progress, bool(snapshot.shared.get("finished"))),
            str(found.path),
            found.refused,
        )

    def evaluations(self) -> Mapping[tuple[int, ...], Any]:
        found: Mapping[tuple[int, ...], Any] = (
            {} if self._found is None else self._found.shared.get("evaluated", {})
        )
        return found

    def restore(self, tracked: Mapping[str, Any]) -> dict[str, Any]:
        assert self._found is not None
        snapshot, self._found = self._found, None
        logger.info("state restored", extra={"step": snapshot.progress.step})
        put_contexts(snapshot.contexts, self._workers)
        return put_shared(snapshot.shared, tracked, self._workers)

    def boundary(self, state: Boundary, *, asked: bool, written: bool) -> None:
        if written:
            self._collect(goes_on=True)
        if self._turns.boundary(state.progress.step, asked=asked, written=written):
            self._memory_ready = True
            since = time.monotonic()
            self._timer.took(since)
            with self._workers.generation.group.tracer.span("checkpoint", step=state.progress.step):
                snapshot = self._take(state, finished=False)
                if self._writer is not None and snapshot is not None:
                    self._writer.begin(snapshot, since=since, steady=only_updates_change(state.tracked))
        elif (
            not self._memory_ready
            and self._writer is not None
            and self._workers.generation.is_main
            and state.progress.step
        ):
            # After the first update there is as much state as there will be.
            self._memory_ready = True
            self._writer.prepare(take_shared(state.tracked, state.state, self._workers))
        if self._workers.generation.is_main and not self._turns.pending and self._timer.due(time.monotonic()):
            self._requests.put(Requests(checkpoint=True))

    def before_update(self) -> None:
        if self._writer is not None:
            self._writer.settle()

    def last(self, state: Boundary, *, finished: bool) -> None:
        since = time.monotonic()
        if not finished and state.progress.step == self._turns.last_step:
            self._collect()  # in place already, or being written
            return
        snapshot = self._take(state, finished=finished)
        self._collect(goes_on=True)
        if self._writer is not None and snapshot is not None:
            self._report(self._writer.write_now(snapshot, since=since))
        self._turns.took(state.progress.step)

    def left_midway(self, progress: Progress) -> None:
        discarded = self._collect()
        if self._writer is not None and self._workers.generation.is_main:
            newest = "the newest checkpoint" if discarded else f"step {self._turns.last_step}"
            note(
                f"the script exited inside its loops, after step {progress.step}; that is no boundary, so no "
                f"checkpoint is taken there, and a resumed run goes on from {newest}. To end training for "
                "good, leave the loops by `break`"
            )

    def _take(self, state: Boundary, *, finished: bool) -> JobSnapshot | None:
        """Contexts come from all workers; only the main worker keeps the snapshot. It refers to live tensors."""
        if self._store is None:
            return None
        self._supervisor.checkpoints()
        contexts = gather_contexts(self._workers, self._collectives, state.progress)
        return self.snapshot(state, contexts, finished=finished) if self._workers.generation.is_main else None

    def snapshot(self, state: Boundary, contexts: Sequence[Any], *, finished: bool = False) -> JobSnapshot:
        """The whole job at a boundary. It refers to live tensors."""
        return JobSnapshot(
            job=self._job,
            fingerprint=self._fingerprint,
            progress=state.progress,
            shared=take_shared(state.tracked, state.state, self._workers)
            | {"finished": finished, "evaluated": dict(state.evaluated)},
            contexts=contexts,
        )

    # When the generation changes.

    def turns(self) -> dict[str, Any]:
        """When checkpoints are due, for a newcomer."""
        waited = self._timer.waited(time.monotonic())
        return {"schedule": asdict(self._turns), "waited_s": waited, "stall_s": self._timer.stall_s}

    def adopt(self, snapshot: JobSnapshot, turns: Mapping[str, Any]) -> Target:
        """A newcomer: `restore` will load this, and checkpoints are due when they are for the others."""
        self._found, self._turns = snapshot, CheckpointSchedule(**turns["schedule"])
        self._timer.last, self._timer.stall_s = time.monotonic() - turns["waited_s"], turns["stall_s"]
        return Target(snapshot.progress, finished=False)

    def writer_leaves(self) -> None:
        """The main worker is about to leave. It completes what it writes; another worker may begin the next."""
        self._turns.writing = False

    def writer_lost(self) -> None:
        self._notify_written()

    def leave(self, state: Boundary, contexts: Sequence[Any]) -> None:
        """This worker leaves the job: return when everything it writes is in place."""
        since = time.monotonic()
        if self._collect(goes_on=True) and self._writer is not None:
            self._supervisor.checkpoints()  # no other worker knows that one is to be taken again
            self._report(self._writer.write_now(self.snapshot(state, contexts), since=since))

    def _collect(self, *, goes_on: bool = False) -> Discarded | None:
        """If one is being written, wait for it. Returns why it is not in place, if it was discarded.

        One that could not be written is reported if the job `goes_on` without it, else raised.
        """
        try:
            outcome = None if self._writer is None else self._writer.collect()
        except CheckpointError as error:
            if not goes_on:
                raise
            self._supervisor.checkpoint_failed(str(error))
            return None
        if isinstance(outcome, Written):
            self._report(outcome)
        if not isinstance(outcome, Discarded):
            return None
        note(
            f"the checkpoint of step {outcome.step} is discarded: {outcome.changed!r} was changed before the next "
            "optimizer.step(), while it was being copied. A job that goes on takes another one as soon as it can, and from now "
            "on copies everything at once, which stops it for longer; to avoid that, change the state of an optimizer after "
            "its step, or replace tensors there"
        )
        return outcome

    def _report(self, written: Written) -> None:
        self._timer.stall_s = written.blocked
        self._supervisor.checkpointed(written.step, str(written.path), written.seconds, written.blocked)
        logger.info(
            "checkpoint written to %s in %.2f s, training paused for %.3f s",
            written.path,
            written.seconds,
            written.blocked,
            extra={"step": written.step},
        )

    def _notify_written(self) -> None:
        """In the writer's thread: all workers know it when the next pass has settled."""
        self._requests.put(Requests(written=True))

    def _request_again(self) -> None:
        self._requests.put(Requests(checkpoint=True))


def _check_compatible(worker: int, other: dict[str, Any], first: dict[str, Any]) -> None:
    for part, error in (("fingerprint", OtherFingerprint), ("job", Diverged)):
        for key in first[part].keys() | other[part].keys():
            mine, theirs = first[part].get(key), other[part].get(key)
            if mine != theirs:
                raise error(
                    f"worker {worker} cannot work with worker 0: its {part} says {key} = {theirs!r}, worker 0's {mine!r}"
                )
