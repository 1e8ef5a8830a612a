"""Evidence of what a worker did before it ended."""

from __future__ import annotations

from dataclasses import dataclass

_SHOWN = 64


@dataclass(frozen=True, kw_only=True)
class RunningMicroBatch:
    """A micro-batch in progress."""

    step: int
    """Number of completed steps."""
    rank: int
    """The virtual worker of the micro-batch."""
    number: int
    """Its number among the virtual worker's micro-batches in this step."""
    samples: tuple[int, ...] | None = None
    """Indices of its samples, or the first of them if there are very many; None if the job does not order samples."""
    size: int = 0
    """Number of indices."""

    @property
    def content(self) -> tuple[int, ...]:
        """Equal for the same micro-batch on any worker and in any retry."""
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
    """Evidence that a worker leaves when it ends."""

    running: RunningMicroBatch | None = None
    """None: it was between micro-batches, or unknown."""
    lines: tuple[str, ...] = ()
    """The last lines of its output."""
    out_of_memory: str | None = None
    """The kernel's message that it killed the process because memory ran out; None: there is none."""

    def describe(self) -> list[str]:
        """Lines of text for the user."""
        text = []
        if self.out_of_memory is not None:
            text.append(f"out of memory: {self.out_of_memory}")
        if self.running is not None:
            text.append(f"it was running {self.running}")
        if self.lines:
            text.append("the last it printed:")
            text += [f"    {line}" for line in self.lines]
        return text


NO_EVIDENCE = Evidence()
