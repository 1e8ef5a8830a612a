"""Keeps a job's checkpoints: when one is due, what goes into it, which one to go on from.

Every worker looks for the newest usable checkpoint by itself, then all agree on it; worker 0 alone writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gyrostat.core.errors import Diverged, Misuse, OtherFingerprint
from gyrostat.core.job import CheckpointPolicy
from gyrostat.core.progress import Progress
from gyrostat.engine.checkpoint import CheckpointStore, Snapshot
from gyrostat.engine.snapshot import gather_contexts, put_contexts, put_shared, take_shared
from gyrostat.engine.virtual import VirtualRunner


@dataclass(frozen=True)
class Target:
    """Where a checkpoint says to go on."""

    progress: Progress
    finished: bool


class Keeper:
    """The checkpoints of one job, seen from one worker."""

    def __init__(
        self, policy: CheckpointPolicy | None, runner: VirtualRunner, fingerprint: dict[str, str], seed: int
    ) -> None:
        self._policy, self._runner, self._fingerprint, self._seed = policy, runner, fingerprint, seed
        self._store = None if policy is None else CheckpointStore(Path(policy.directory), keep=policy.keep)
        self._job: dict[str, Any] = {}
        self._found: Snapshot | None = None
        self._last_step = 0

    def require_directory(self) -> None:
        if self._store is None:
            raise Misuse(
                "job.save() has nowhere to write; give `gyrostat run --checkpoint-dir DIR` or "
                "gyrostat.init(checkpoint_dir=DIR)"
            )

    def join(self, tracked: Mapping[str, Any]) -> None:
        """Before training: what decides bits must be the same on all workers."""
        self._job = {
            "virtual_workers": self._runner.placement.virtual_workers,
            "seed": self._seed,
            "tracked": {name: type(thing).__name__ for name, thing in tracked.items()},
        }
        mine = {"fingerprint": self._fingerprint, "job": self._job}
        everyone = [
            msgspec.msgpack.decode(payload)
            for payload in self._runner.group.exchange("join", Progress(), msgspec.msgpack.encode(mine))
        ]
        for worker, other in enumerate(everyone):
            _check_alike(worker, other, everyone[0])

    def find(self) -> tuple[Target | None, str | None, list[str]]:
        """The newest usable checkpoint, its path, and why newer ones were refused."""
        if self._store is None or self._policy is None:
            return None, None, []
        if not self._policy.resume:
            if self._runner.group.rank == 0:
                self._store.set_aside()
            return None, None, []
        found = self._store.find(self._job, self._fingerprint)
        snapshot = found.usable()
        step = -1 if snapshot is None else snapshot.progress.step
        seen = {
            int.from_bytes(payload, "little", signed=True)
            for payload in self._runner.group.exchange(
                "find", Progress(), step.to_bytes(8, "little", signed=True)
            )
        }
        if len(seen) != 1:
            raise Diverged(
                f"workers found different checkpoints, of steps {sorted(seen)}; they must share the directory"
            )
        if snapshot is None:
            return None, None, found.refused
        self._found, self._last_step = snapshot, step
        return (
            Target(snapshot.progress, bool(snapshot.shared.get("finished"))),
            str(found.path),
            found.refused,
        )

    def restore(self, tracked: Mapping[str, Any]) -> dict[str, Any]:
        """Load what `find` found, overwriting everything; returns `job.state`."""
        assert self._found is not None
        snapshot, self._found = self._found, None
        put_contexts(snapshot.contexts, self._runner)
        return put_shared(snapshot.shared, tracked, self._runner)

    def due(self, step: int, *, asked: bool) -> bool:
        """Whether to write one at this boundary: asked for, or its turn. Never the same step twice."""
        if self._policy is None or step == self._last_step:
            return False
        return asked or (self._policy.every > 0 and step % self._policy.every == 0)

    def write(
        self, tracked: Mapping[str, Any], state: Mapping[str, Any], progress: Progress, *, finished: bool
    ) -> Path | None:
        """Write a checkpoint. Contexts come from all workers; worker 0 writes and returns the path."""
        if self._store is None:
            return None
        contexts = gather_contexts(self._runner, progress)
        self._last_step = progress.step
        if self._runner.group.rank != 0:
            return None
        snapshot = Snapshot(
            job=self._job,
            fingerprint=self._fingerprint,
            progress=progress,
            shared=take_shared(tracked, state, self._runner) | {"finished": finished},
            contexts=contexts,
        )
        return self._store.save(snapshot)


def _check_alike(worker: int, other: dict[str, Any], first: dict[str, Any]) -> None:
    for part, error in (("fingerprint", OtherFingerprint), ("job", Diverged)):
        for key in first[part].keys() | other[part].keys():
            mine, theirs = first[part].get(key), other[part].get(key)
            if mine != theirs:
                raise error(
                    f"worker {worker} cannot work with worker 0: its {part} says {key} = {theirs!r}, worker 0's {mine!r}"
                )
