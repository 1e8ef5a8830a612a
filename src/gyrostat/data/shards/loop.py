"""`gyrostat.shards` and `gyrostat.batch_end`: shards for any framework's loop, in one process, without torch.

    source = gyrostat.shards(len(x), shard_size=256, epochs=5, directory="run")
    params = load(source.resumed_from) if source.resumed_from else initial()
    for shard in source:
        for batch in shard.batches(32):                    # a range of sample numbers
            params = update(params, x[batch.start : batch.stop])
            gyrostat.batch_end(save=write if source.step % 100 == 99 else None)

`batch_end` reports the batch that the update was made of. With `save` it also saves the queues and what the program writes,
atomically: a program that is killed and started again resumes from there, and each sample counts once in its parameters.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path

from gyrostat.core.errors import Misuse, UsageError
from gyrostat.data.shards.layout import ShardLayout
from gyrostat.data.shards.messages import AskShard, EpochOver, Shard, ShardReport, WaitForShard
from gyrostat.data.shards.queues import Queues
from gyrostat.data.shards.saves import Saves

_ME = "this process"

Writer = Callable[[Path], object]
"""Writes a program's parameters into a directory, in its own format."""


class HeldShard:
    """A shard that this process holds: samples `start` … `stop`-1 of `source`."""

    def __init__(self, shard: Shard) -> None:
        self.epoch, self.source, self.start, self.stop = shard.epoch, shard.source, shard.start, shard.stop
        self.lease = shard.lease
        self.offset = 0
        """Samples that `batch_end` has reported."""
        self.batch: range | None = None
        """The batch of `batches` that has not ended yet."""

    def __len__(self) -> int:
        return self.stop - self.start

    def __repr__(self) -> str:
        where = f" of {self.source}" if self.source is not None else ""
        return f"HeldShard(epoch {self.epoch}, samples {self.start} to {self.stop}{where})"

    def batches(self, size: int) -> Iterator[range]:
        """The rest of the shard in batches of `size`; the last may be shorter. End each with `gyrostat.batch_end()`."""
        if not isinstance(size, int) or size < 1:
            raise UsageError(f"the size of a batch must be a whole number of at least 1, got {size!r}")
        while self.offset < len(self):
            first = self.start + self.offset
            self.batch = range(first, min(first + size, self.stop))
            yield self.batch
            if self.batch is not None:
                raise Misuse(
                    f"the batch {self.batch.start} to {self.batch.stop} of {self!r} was not ended; call gyrostat.batch_end() "
                    "after its update"
                )


class ShardSource:
    """The shards of a training, epoch after epoch. Iterate it once; `gyrostat.batch_end` reports to it."""

    def __init__(self, queues: Queues, *, epochs: int, saves: Saves | None) -> None:
        self._queues, self._epochs, self._saves = queues, epochs, saves
        self._shard: HeldShard | None = None
        self.step = 0
        """Batches ended, over all runs."""
        self.resumed_from: Path | None = None
        """The directory that the program wrote in the save it resumes from; None if this is a first start."""
        self.refused: list[str] = []
        """Why newer saves cannot be used."""
        if saves is not None:
            save, self.refused = saves.newest()
            if save is not None:
                queues.restore(save.queues, now=time.monotonic())
                queues.release(_ME, "started anew")
                self.step, self.resumed_from = save.step, save.path

    @property
    def epoch(self) -> int:
        return self._queues.epoch

    @property
    def left(self) -> int:
        """Samples of this epoch that have not been reported."""
        return self._queues.todo + self._queues.doing

    def __iter__(self) -> Iterator[HeldShard]:
        if _Process.source is not self:
            raise Misuse("this loop over shards is closed; make another with gyrostat.shards(…)")
        for epoch in range(self._queues.epoch, self._epochs):
            while True:
                answer = self._queues.ask(AskShard(_ME, epoch), time.monotonic())
                if isinstance(answer, EpochOver):
                    break
                assert not isinstance(answer, WaitForShard), answer  # no other worker holds shards
                self._shard = HeldShard(answer)
                yield self._shard
                if self._shard is not None:
                    raise Misuse(
                        f"{len(self._shard) - self._shard.offset} samples of {self._shard!r} were not reported; call "
                        "gyrostat.batch_end(samples) after every update, and go through a shard to its end"
                    )
        self._end()

    def batch_end(self, samples: int | None) -> None:
        """An update was made of the next `samples` of the shard."""
        shard = self._shard
        if shard is None:
            raise Misuse("gyrostat.batch_end outside a shard; call it in the loop over gyrostat.shards(…)")
        if samples is None and shard.batch is None:
            raise UsageError(
                "gyrostat.batch_end(samples): say how many samples of the shard the update was made of"
            )
        if shard.batch is not None and samples not in (None, len(shard.batch)):
            raise UsageError(
                f"gyrostat.batch_end({samples}), but its batch has {len(shard.batch)} samples; leave the number out"
            )
        count = len(shard.batch) if shard.batch is not None else samples
        if not isinstance(count, int) or not 0 <= count <= len(shard) - shard.offset:
            raise UsageError(
                f"gyrostat.batch_end({samples!r}): {len(shard) - shard.offset} samples of {shard!r} are left"
            )
        report = ShardReport(_ME, self._queues.term, ((shard.lease, shard.offset + count),))
        verdict = self._queues.report(report, time.monotonic())
        assert verdict.accepted, verdict.reason  # no other worker takes shards
        shard.offset += count
        shard.batch = None
        self.step += 1
        if shard.offset == len(shard):
            self._shard = None

    def save(self, write: Writer) -> Path:
        """Save what `write` writes and the queues, atomically. Call it when every update has been reported."""
        if self._saves is None:
            raise UsageError("there is nowhere to save to; give gyrostat.shards(…, directory=…)")
        if self._shard is not None and self._shard.batch is not None:
            raise Misuse("save after gyrostat.batch_end, or with it: gyrostat.batch_end(save=…)")
        return self._saves.write(self.step, self._queues.to_state(), write)

    def close(self) -> None:
        """Release the directory, as the end of the process does. Samples that were not reported stay in TODO."""
        self._end()
        if self._saves is not None:
            self._saves.close()

    def _end(self) -> None:
        if _Process.source is self:
            _Process.source = None


class _Process:
    """This process's source, to which `batch_end` reports; one at a time."""

    source: ShardSource | None = None


def shards(
    samples: int | None = None,
    *,
    shard_size: int,
    files: Mapping[str, int] | Sequence[tuple[str, int]] | None = None,
    epochs: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    directory: str | os.PathLike[str] | None = None,
    keep: int = 3,
) -> ShardSource:
    """The shards of `samples` indexed samples, or of `files` (names with the number of samples in each), to loop over.

    Every epoch has every sample exactly once, with shards in a new random order (`shuffle=False`: in their own order).
    `directory` holds the newest `keep` saves; a program that is started again resumes from the newest.
    """
    if (samples is None) == (files is None):
        raise UsageError("gyrostat.shards needs either a number of samples or files=…")
    if not isinstance(epochs, int) or epochs < 0:
        raise UsageError(f"epochs must be a whole number of at least 0, got {epochs!r}")
    if not isinstance(seed, int) or seed < 0:
        raise UsageError(f"seed must be a whole number of at least 0, got {seed!r}")
    if _Process.source is not None:
        raise Misuse(
            "this process is in the middle of another gyrostat.shards(…); finish it, or close() it first"
        )
    if samples is not None:
        layout = ShardLayout.of_indices(samples, shard_size)
    else:
        assert files is not None
        pairs = list(files.items() if isinstance(files, Mapping) else files)
        layout = ShardLayout.of_files(pairs, shard_size)
    queues = Queues(layout, seed=seed, shuffle=shuffle, lease_seconds=inf)  # no other worker could take over
    saves = Saves(Path(directory), keep=keep) if directory is not None else None
    try:
        source = ShardSource(queues, epochs=epochs, saves=saves)
    except BaseException:
        if saves is not None:
            saves.close()
        raise
    _Process.source = source
    return source


def batch_end(samples: int | None = None, *, save: Writer | None = None) -> None:
    """An update was made: of the batch that `shard.batches` gave last, or of the next `samples` of the shard.

    With `save`, parameters and queues are then saved together: `save(path)` writes what the program needs to resume into the
    directory `path`, in its own format; after a restart it is at `source.resumed_from`.
    """
    source = _Process.source
    if source is None:
        raise Misuse("gyrostat.batch_end before gyrostat.shards(…), or after its end")
    source.batch_end(samples)
    if save is not None:
        source.save(save)
