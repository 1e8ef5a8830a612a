"""What launcher, fork parent and workers say to one another: typed messages, framed, over Unix sockets.

A frame is a length (4 bytes, big endian) and one message in msgpack. Every message is a tagged struct, so
that a reader knows what it got and refuses what it does not know; adding a message or a field with a default
keeps old readers alive, anything else raises VERSION, which both sides name in their first message. A frame
may carry open files beside it (SCM_RIGHTS): that is how a worker gets its pipes. No pickle, ever.

    agent ──Fork, ServeStore, Signal──▶ fork parent ──Forked, Exited, Children──▶ agent
    worker ──Rejoin, Steps, Logged, Probed, Checkpointed, NotCheckpointed, Finished, Failed, Ended──▶ agent
    worker ──Ready, Prepared, Switched, Leaving──▶ agent ──Prepare, SetFence, Cancel, Terminate──▶ worker

`forkparent` and `start` are the two ends of the first line; `messenger` and `crew` those of the others. What is an agent on
several machines is `launcher` on one.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from gyrostat.core.job import Assignment, NextGeneration, ReductionChoice
from gyrostat.core.placement import Placement

VERSION = 2


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker runs: a script, or with `module` the module of that name, as `python [-m] name args…`
    would.
    """

    name: str
    module: bool = False
    args: tuple[str, ...] = ()


class WorkerId(msgspec.Struct, frozen=True, array_like=True):
    """A worker process among all that a job has ever had."""

    attempt: int
    """How often the job was started again before it."""
    member: int
    """Its number since then."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a new worker needs to know."""

    assignment: Assignment
    program: Program
    cwd: str
    env: dict[str, str]
    worker_id: WorkerId = WorkerId(0, 0)
    agent: str | None = None
    """Path of the socket at which the agent's successor is found, if it goes away; None: the worker ends with it."""
    agent_timeout_s: float = float("inf")
    """How long the agent may be away before the worker counts as orphaned."""
    box: str | None = None
    """Path of the file in which the worker notes what it runs (`blackbox`)."""
    shows_stacks: bool = False
    """It answers a signal with the stacks of its threads, in a file beside that (`stacks`)."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message in either direction."""

    version: int
    pid: int


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a worker. Three files come with it: its stdout, its stderr, and its end of the socket to the
    launcher.
    """

    spec: WorkerSpec


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to a worker, or nothing if it has gone."""

    pid: int
    number: int


class Forked(msgspec.Struct, frozen=True, tag=True):
    pid: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A worker has gone, and whatever it left running in its process group with it."""

    pid: int
    code: int
    """Its exit code, or the negated number of the signal that killed it."""


class Children(msgspec.Struct, frozen=True, tag=True):
    """All workers that a fork parent has forked, for an agent that comes after another."""

    living: dict[int, WorkerId]
    """By process id."""
    exited: list[tuple[WorkerId, int]]


class ServeStore(msgspec.Struct, frozen=True, tag=True):
    """Fork a process that serves a rendezvous. Two files come with it: the socket it listens on, and one to the agent, by whose
    closing it is ended."""


class Rejoin(msgspec.Struct, frozen=True, tag=True):
    """The first word, after Hello, of a worker that has lost its agent to the next one. What it said of lasting meaning
    follows once more."""

    worker_id: WorkerId


class Started(msgspec.Struct, frozen=True, tag=True):
    step: int
    resumed_from: str | None
    refused: list[str]
    at: float
    """Seconds of the machine's monotonic clock, as everywhere below."""
    virtual_workers: int | None = None
    """Their number, which the script may have chosen."""
    reduction: ReductionChoice | None = None
    alike: dict[str, str] = {}
    """What must be equal on every worker that joins."""


class StepReport(msgspec.Struct, frozen=True, array_like=True):
    step: int
    epoch: int
    loss: float | None
    samples: int
    at: float
    busy: tuple[float, ...] = ()
    """Seconds for which worker 0, 1, 2 … ran its virtual workers, before it waited for others."""


class StepReports(msgspec.Struct, frozen=True, tag=True):
    """Some finished steps; several in one message when they are short."""

    steps: list[StepReport]


class Logged(msgspec.Struct, frozen=True, tag=True):
    step: int
    metrics: dict[str, float]


class Probed(msgspec.Struct, frozen=True, tag=True):
    step: int
    digest: str
    tensors: dict[str, str]


class Checkpointed(msgspec.Struct, frozen=True, tag=True):
    step: int
    path: str
    seconds: float
    """Until it was in place."""
    blocked: float
    """For which training stood still."""


class NotCheckpointed(msgspec.Struct, frozen=True, tag=True):
    """A checkpoint could not be written; the worker trains on."""

    reason: str


class WorkerFinished(msgspec.Struct, frozen=True, tag=True):
    step: int
    digest: str
    at: float


class FailureKind(StrEnum):
    """Whose fault a failure is: that decides what the user is shown, and the exit code."""

    SCRIPT = "script"
    USAGE = "usage"
    PEER_LOST = "peer lost"
    """Another worker's: only its consequence was seen here."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The script raised."""

    kind: FailureKind
    summary: str
    traceback: str


class WorkerEnded(msgspec.Struct, frozen=True, tag=True):
    """The last word of a worker that leaves in good order."""

    stopped: bool
    """It left early, at a boundary, because some worker was asked to stop, or no worker had an agent."""
    left: bool = False
    """It left a job that goes on without it."""
    asked_by: int | None = None
    """The signal by which this worker was asked to stop the job, by the leader or directly."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A newcomer has built everything and waits to join."""

    alike: dict[str, str]


class GenerationPrepared(msgspec.Struct, frozen=True, tag=True):
    """Connected to the members of a generation to come."""

    generation: int


class Switched(msgspec.Struct, frozen=True, tag=True):
    """A generation has begun, on this worker."""

    generation: int
    step: int
    workers: int
    paused: float
    """Seconds for which this worker stood still; on a newcomer, for which the others would have to wait for it."""
    why_all: str | None = None
    """Why a newcomer could not follow the others, and was told all state at the fence."""


class WorkerLeaving(msgspec.Struct, frozen=True, tag=True):
    """This worker was sent SIGTERM: it wants to leave at the next boundary that can be."""


class Stacks(msgspec.Struct, frozen=True, tag=True):
    """What each thread of the worker is doing. Its agent says that for it: the worker itself may be stuck."""

    text: str


class PeerLossReported(msgspec.Struct, frozen=True, tag=True):
    """This worker has lost another one of its generation, and waits to be told who is left."""

    generation: int
    why: str


class Recovered(msgspec.Struct, frozen=True, tag=True):
    """This worker has found those that are left."""

    generation: int
    placement: Placement
    """Which they have agreed on."""
    again: int
    """Micro-batches that it runs because the one that had run them is lost."""
    paused: float
    """Seconds for which it stood still."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Are you there?"""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The process runs. What its script does, another thread does."""


class BeginRecovery(msgspec.Struct, frozen=True, tag=True):
    """Somebody is lost: the members of this generation go on, at once and in the middle of whatever they are doing."""

    plan: NextGeneration


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Connect to the members of a generation to come, while training goes on."""

    plan: NextGeneration


class SetFence(msgspec.Struct, frozen=True, tag=True):
    """All are connected: the generation begins at the boundary of step `not_before`, or the next that all agree on."""

    generation: int
    not_before: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The generation will not be."""

    generation: int


class Terminate(msgspec.Struct, frozen=True, tag=True):
    """The job is to end: do as a program does that is sent SIGTERM, or checkpoint at the next boundary and stop.

    The signal itself, to a single worker, means that this one is to leave.
    """

    final: bool = False
    """The job has failed, or is complete: nobody comes to the rescue of who has lost another."""


ToForkServer = Hello | Fork | Signal | ServeStore
FromForkServer = Hello | Forked | Exited | Children
ToWorker = Hello | Prepare | SetFence | Cancel | BeginRecovery | Ping | Terminate
FromWorker = (
    Hello
    | Rejoin
    | Started
    | StepReports
    | Logged
    | Probed
    | Checkpointed
    | NotCheckpointed
    | WorkerFinished
    | Failed
    | WorkerEnded
    | Ready
    | GenerationPrepared
    | Switched
    | WorkerLeaving
    | Stacks
    | PeerLossReported
    | Recovered
    | Pong
)

LASTING = (
    Started,
    Ready,
    GenerationPrepared,
    Switched,
    PeerLossReported,
    Recovered,
    WorkerLeaving,
    WorkerFinished,
    Failed,
    WorkerEnded,
)
"""What a worker says that counts also for those who have not been there when it was said."""
