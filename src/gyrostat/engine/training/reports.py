"""What workers exchange at the end of a pass besides gradients, and what all of them know afterwards.

A report carries virtual worker 0's losses, the values of `job.mean`, requests from outside, the fence that its worker
acknowledges, changed contexts for the backups of the others, and the data positions of virtual workers that will move. All
workers see the same reports, so `merge` gives the same outcome on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from gyrostat.core.phase import AgentPresence
from gyrostat.engine.state import statetree
from gyrostat.engine.training.mean import MeanWire


@dataclass(frozen=True)
class Requests:
    """Requests to any worker from outside. Once the pass has settled, all workers know them."""

    checkpoint: bool = False
    stop: bool = False
    written: bool = False
    """No request, but a notice that takes the same way: worker 0 has written its checkpoint and can take another."""

    def __or__(self, other: Requests) -> Requests:
        return Requests(
            self.checkpoint or other.checkpoint, self.stop or other.stop, self.written or other.written
        )


class RequestBox:
    """Where requests wait for the next pass to settle.

    Filled by signal handlers and by the thread that writes checkpoints, so every change is one assignment.
    """

    def __init__(self) -> None:
        self.checkpoint = False
        self.stop = False
        self.written = False
        self.agent = AgentPresence.PRESENT
        """A state, not a request."""

    def set_agent(self, agent: AgentPresence) -> None:
        self.agent = agent

    def put(self, requests: Requests) -> None:
        if requests.checkpoint:
            self.checkpoint = True
        if requests.stop:
            self.stop = True
        if requests.written:
            self.written = True

    def take(self) -> Requests:
        """The waiting requests. Only those seen are cleared: one that arrives meanwhile waits for the next pass."""
        requests = Requests(self.checkpoint, self.stop, self.written)
        if requests.checkpoint:
            self.checkpoint = False
        if requests.stop:
            self.stop = False
        if requests.written:
            self.written = False
        return requests


class Fence(msgspec.Struct, frozen=True, array_like=True):
    """A generation, and the step at whose boundary it begins."""

    generation: int
    step: int


Acknowledge = Callable[[int, int], Fence | None]
"""The fence that this worker acknowledges in the reduction of a step, given the steps that it needs to hand over data."""


def acknowledge_nothing(step: int, lead: int) -> Fence | None:
    """The generation of this worker never changes."""
    return None


class PassReport(msgspec.Struct, frozen=True, array_like=True):
    """What a worker sends to the others when its virtual workers have run."""

    losses: list[float]
    means: list[MeanWire]
    requests: Requests
    agent: AgentPresence
    """Whether it has an agent."""
    samples: int
    fence: Fence | None
    """The fence that this worker acknowledges."""
    busy: float
    """Seconds that its virtual workers took, before it waits for other workers."""
    participation: bytes
    """Per module: which virtual workers ran a backward through it."""
    contexts: bytes
    """What the pass changed in the contexts of its virtual workers; empty without backups."""
    dropped: list[int]
    """Virtual workers of a dead worker that are left out of this pass: in approximate recovery only."""
    leaving: bytes
    """Data positions of virtual workers that will move, at the fence: a tree by rank, or empty."""


@dataclass
class PassOutcome:
    """What is known on every worker after a pass."""

    loss: float | None = None
    requests: Requests = field(default_factory=Requests)
    samples: int = 0
    """Fetched by all virtual workers together in this step."""
    fence: Fence | None = None
    """The fence that all workers have acknowledged: it holds."""
    busy: tuple[float, ...] = ()
    """Seconds that the virtual workers of worker 0, 1, 2 … took."""
    leaving: dict[int, Any] = field(default_factory=dict)
    """Data positions of virtual workers that will move, at the fence, as trees."""


_REPORT = msgspec.msgpack.Decoder(PassReport)


def decode(payloads: Sequence[bytes]) -> list[PassReport]:
    return [_REPORT.decode(payload) for payload in payloads]


def merge(reports: Sequence[PassReport], *, recovers: bool) -> PassOutcome:
    """`recovers`: the job goes on without a worker that dies, so orphaned workers stop it only if no worker has an agent."""
    requests = Requests()
    leaving: dict[int, Any] = {}
    for report in reports:
        requests |= report.requests
        if report.leaving:
            leaving |= statetree.decode(report.leaving)
    orphaned = any(report.agent is AgentPresence.ORPHANED for report in reports)
    led = any(report.agent is AgentPresence.PRESENT for report in reports)
    if orphaned and not (recovers and led):
        requests |= Requests(stop=True)  # with a checkpoint, before their fork servers kill them
    losses = [loss for report in reports for loss in report.losses]
    return PassOutcome(
        sum(losses) / len(losses) if losses else None,
        requests,
        sum(report.samples for report in reports),
        agreed_fence([report.fence for report in reports]),
        tuple(report.busy for report in reports),
        leaving,
    )


def agreed_fence(fences: Sequence[Fence | None]) -> Fence | None:
    """It holds if all workers acknowledge it, at the latest of their steps; otherwise on no worker."""
    given = [fence for fence in fences if fence is not None]
    if len(given) < len(fences) or len({fence.generation for fence in given}) > 1:
        return None
    return Fence(given[0].generation, max(fence.step for fence in given))


def scalar(loss: torch.Tensor) -> float:
    """A loss as one number: its mean, if the script has not reduced it."""
    return float((loss if loss.numel() == 1 else loss.double().mean()).item())
