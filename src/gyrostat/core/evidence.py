"""What is known of a worker's last moments."""

from __future__ import annotations

from dataclasses import dataclass

_SHOWN = 64


@dataclass(frozen=True, kw_only=True)
class RunningMicroBatch:
    """A micro-batch that the script was working on."""

    step: int
    """So many steps were complete."""
    rank: int
    """The virtual worker whose micro-batch it is."""
    number: int
    """Among those that the virtual worker has in this step."""
    samples: tuple[int, ...] | None = None
    """Indices of its samples, or the first of them if there are very many; None where the job does not order them."""
    size: int = 0
    """How many indices there are."""

    @property
    def content(self) -> tuple[int, ...]:
        """Equal for the same micro-batch, whoever runs it, and whenever that is tried again."""
        place = (-1, self.step, self.rank, self.number)
        return place if self.samples is None else self.samples

    def __str__(self) -> str:
        where = f"micro-batch {self.number} of virtual worker {self.rank} in the step after step {self.step}"
        if self.samples is None:
            return where
        shown = ", ".join(map(str, self.samples[:_SHOWN]))
        more = f" … ({self.size} in all)" if self.size > _SHOWN else ""
        return f"{where}, samples {shown}{more}"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a worker leaves behind when it ends."""

    running: RunningMicroBatch | None = None
    """None: it was between micro-batches, or nobody knows."""
    lines: tuple[str, ...] = ()
    """The last ones it printed."""
    out_of_memory: str | None = None
    """How the kernel marks that it killed something because memory ran out; None: it does not."""

    def told(self) -> list[str]:
        """In lines, for the user."""
        told = []
        if self.out_of_memory is not None:
            told.append(f"out of memory: {self.out_of_memory}")
        if self.running is not None:
            told.append(f"it was running {self.running}")
        if self.lines:
            told.append("the last it printed:")
            told += [f"    {line}" for line in self.lines]
        return told


NO_EVIDENCE = Evidence()
