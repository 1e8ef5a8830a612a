"""The messages between launcher or agent, fork server and workers. `channel` sends and receives them.

Every message is a tagged struct, so a reader knows its type and refuses an unknown one. Adding a message or a field with a
default keeps old readers working; any other change increments VERSION, which both sides send in their first message.

    agent ──Fork, ServeStore, Signal──▶ fork server ──Forked, Exited, Children──▶ agent
    worker ──Started, StepReports, Logged, Probed, Checkpointed, NotCheckpointed──▶ agent
    worker ──Rejoin, Failed, WorkerFinished, WorkerLeaving, WorkerEnded, Pong──▶ agent
    worker ──Ready, GenerationPrepared, Switched, PeerLossReported, Recovered──▶ agent
    agent ──Prepare, SetFence, Cancel, BeginRecovery, Ping, Terminate──▶ worker

`fork_server` and `start` are the two ends of the first line; `agent_connection` and `worker_pool` those of the others. On one
machine, `launcher` takes the place of the agent.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from gyrostat.core.job import Assignment, NextGeneration, ReductionChoice
from gyrostat.core.placement import Placement

VERSION = 4


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The program of a worker: a script, or with `module` the module of that name, run as `python [-m] name args…`."""

    name: str
    module: bool = False
    args: tuple[str, ...] = ()
    beneath: tuple[tuple[str, ...], ...] = ()
    """Directories below which it and its working directory must lie (`confined.Beneath`); empty: anywhere."""


class WorkerId(msgspec.Struct, frozen=True, array_like=True):
    """Identifies a worker process among all that the job has had."""

    attempt: int
    """The number of restarts of the job before this worker started."""
    member: int
    """Its number since that restart."""

    @property
    def log_fields(self) -> dict[str, object]:
        """Fields of a log record about this worker."""
        return {"worker": self.member, "attempt": self.attempt}


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a new worker needs to know."""

    assignment: Assignment
    program: Program
    cwd: str
    env: dict[str, str]
    worker_id: WorkerId = WorkerId(0, 0)
    run: str = ""
    """The run of the job that it belongs to, if agents outlive one another: numbers of workers begin anew in each."""
    agent: str | None = None
    """Path of the socket of the agent's successor, if the agent ends; None: the worker ends with its agent."""
    agent_timeout_s: float = float("inf")
    """Seconds without an agent after which the worker is orphaned."""
    black_box: str | None = None
    """Path of the file in which the worker notes the running micro-batch (`diagnostics.black_box`)."""
    shows_stacks: bool = False
    """It writes the stacks of its threads to a file beside that upon a signal (`diagnostics.stacks`)."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message in either direction."""

    version: int
    pid: int


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a worker. Carries three files: its stdout, its stderr, and its end of the socket to the launcher."""

    spec: WorkerSpec


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to a worker; ignored if it has exited."""

    pid: int
    number: int


class Forked(msgspec.Struct, frozen=True, tag=True):
    pid: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A worker has exited, and the rest of its process group was killed."""

    pid: int
    code: int
    """Its exit code, or the negated number of the signal that killed it."""


class Children(msgspec.Struct, frozen=True, tag=True):
    """All workers that the fork server has forked in the last run of the job, for an agent that adopts it."""

    living: dict[int, WorkerId]
    """By process id."""
    exited: list[tuple[WorkerId, int]]
    run: str = ""


class ServeStore(msgspec.Struct, frozen=True, tag=True):
    """Serve a rendezvous until the fork server ends. Carries a file: the listening socket."""


class Rejoin(msgspec.Struct, frozen=True, tag=True):
    """Sent after Hello to the next agent by a worker whose agent has ended. The messages of `LASTING` follow again."""

    worker_id: WorkerId


class Started(msgspec.Struct, frozen=True, tag=True):
    step: int
    resumed_from: str | None
    refused: list[str]
    at: float
    """Seconds of the machine's monotonic clock, as everywhere below."""
    virtual_workers: int | None = None
    """The number of virtual workers, which the script may have chosen."""
    reduction: ReductionChoice | None = None
    compatibility: dict[str, str] = {}
    """Values that must be equal on every worker that joins."""


class StepReport(msgspec.Struct, frozen=True, array_like=True):
    step: int
    epoch: int
    loss: float | None
    samples: int
    at: float
    busy: tuple[float, ...] = ()
    """Seconds for which worker 0, 1, 2 … ran its virtual workers before it waited for the others."""


class StepReports(msgspec.Struct, frozen=True, tag=True):
    """Completed steps; several in one message when they are short."""

    steps: list[StepReport]


class Logged(msgspec.Struct, frozen=True, tag=True):
    step: int
    metrics: dict[str, float]

    def __str__(self) -> str:
        """As it is shown among the output of workers."""
        return f"step {self.step}  " + "  ".join(
            f"{name} {value:.6g}" for name, value in self.metrics.items()
        )


class Probed(msgspec.Struct, frozen=True, tag=True):
    step: int
    digest: str
    tensors: dict[str, str]


class Checkpointed(msgspec.Struct, frozen=True, tag=True):
    step: int
    path: str
    seconds: float
    """Seconds until the checkpoint was in place."""
    blocked: float
    """Seconds for which training paused."""


class NotCheckpointed(msgspec.Struct, frozen=True, tag=True):
    """A checkpoint could not be written; the worker trains on."""

    reason: str


class WorkerFinished(msgspec.Struct, frozen=True, tag=True):
    step: int
    digest: str
    at: float


class FailureKind(StrEnum):
    """The origin of a failure. It decides what the user is shown, and the exit code."""

    SCRIPT = "script"
    USAGE = "usage"
    REFUSED = "refused"
    """The job cannot use what it was given, such as another job's checkpoint; where the script noticed does not matter."""
    PEER_LOST = "peer lost"
    """Another worker failed; this one only saw the consequence."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The script raised."""

    kind: FailureKind
    summary: str
    traceback: str


class WorkerEnded(msgspec.Struct, frozen=True, tag=True):
    """The last message of a worker that ends without error."""

    stopped: bool
    """It stopped early, at a boundary, because a worker was asked to stop, or no worker had an agent."""
    left: bool = False
    """It left a job that continues without it."""
    asked_by: int | None = None
    """The signal that asked this worker to stop the job, from the leader or directly."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A newcomer has built everything and waits to join."""

    compatibility: dict[str, str]


class GenerationPrepared(msgspec.Struct, frozen=True, tag=True):
    """The worker is connected to the members of the next generation."""

    generation: int


class Switched(msgspec.Struct, frozen=True, tag=True):
    """A generation has begun on this worker."""

    generation: int
    step: int
    workers: int
    paused: float
    """Seconds for which this worker paused; for a newcomer, those for which the others had to wait for it."""
    why_all: str | None = None
    """Why a newcomer could not catch up before the fence, and received all state there."""


class WorkerLeaving(msgspec.Struct, frozen=True, tag=True):
    """This worker received SIGTERM: it leaves the job at the next possible boundary."""


class Stacks(msgspec.Struct, frozen=True, tag=True):
    """The stacks of the worker's threads. Its agent sends this: the worker itself may hang."""

    text: str


class PeerLossReported(msgspec.Struct, frozen=True, tag=True):
    """This worker has lost a peer of its generation, and waits for `BeginRecovery`."""

    generation: int
    why: str


class Recovered(msgspec.Struct, frozen=True, tag=True):
    """This worker is connected to the surviving members and goes on."""

    generation: int
    placement: Placement
    """The placement that the survivors agreed on."""
    again: int
    """Micro-batches that it runs again because the worker that had run them is lost."""
    paused: float
    """Seconds for which it paused."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat request."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat: the process runs. A thread of its own sends it, whatever the script does."""


class BeginRecovery(msgspec.Struct, frozen=True, tag=True):
    """A worker is lost: the members of this generation go on at once, in the middle of the step."""

    plan: NextGeneration


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Connect to the members of the next generation while training goes on."""

    plan: NextGeneration


class SetFence(msgspec.Struct, frozen=True, tag=True):
    """All are connected: the generation begins at the boundary of step `not_before`, or at a later one that all agree on."""

    generation: int
    not_before: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The generation is cancelled."""

    generation: int


class Terminate(msgspec.Struct, frozen=True, tag=True):
    """The job ends: save a checkpoint at the next boundary and stop, or do what SIGTERM does to a Python program.

    SIGTERM itself, to a single worker, asks that worker to leave the job.
    """

    final: bool = False
    """The job has failed or is complete: there is no recovery from a lost peer any more."""


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
"""Messages that a worker sends again to the next agent: they describe its state, not an event."""
