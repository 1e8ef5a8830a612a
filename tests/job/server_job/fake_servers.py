"""Parameter servers that are only numbers, and a job whose processes are only orders: for tests of the leader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyrostat.core.events import Event
from gyrostat.core.evidence import NO_EVIDENCE, Evidence
from gyrostat.core.job import Assignment, CheckpointPolicy, TrainingOptions
from gyrostat.core.placement import Placement
from gyrostat.core.roles import ServerRole
from gyrostat.job.control.failure_policy import FailurePolicy
from gyrostat.job.control.observer import NullObserver
from gyrostat.job.control.requests import Reply, Request, ServerInfo
from gyrostat.job.control.run_request import RunRequest, ServerSettings
from gyrostat.job.processes.protocol import (
    FromWorker,
    Ping,
    Program,
    Started,
    StepReport,
    StepReports,
    WorkerEnded,
    WorkerId,
)
from gyrostat.job.server_job.leader import ServerJobLeader
from gyrostat.job.server_job.poison import ShardInHand
from gyrostat.job.server_job.port import Done, ServerProgress

STARTED = Started(0, None, [], 0.0)


@dataclass
class FakeServers:
    count: int = 2
    progress: ServerProgress = field(default_factory=lambda: ServerProgress(opened=True))
    resumed_from: str | None = None
    refused: Sequence[str] = ()
    failure: str | None = None
    settled: bool = True
    address: tuple[str, int] = ("127.0.0.1", 1)
    token: bytes = b"t"
    held: dict[str, ShardInHand] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    scaling: list[tuple[int, Done]] = field(default_factory=list)
    saving: list[Done] = field(default_factory=list)
    digesting: list[Callable[[str], None]] = field(default_factory=list)

    def begin(self) -> None:
        pass

    def tick(self, now: float) -> None:
        pass

    def deadline(self) -> float | None:
        return None

    def servers(self) -> tuple[ServerInfo, ...]:
        return tuple(ServerInfo(f"server-{number}", 1, 4) for number in range(self.count))

    def worker_lost(self, worker: str) -> None:
        self.lost.append(worker)

    def held_by(self, worker: str) -> ShardInHand | None:
        return self.held.get(worker)

    def scale(self, servers: int, done: Done) -> None:
        self.scaling.append((servers, done))

    def checkpoint(self, done: Done) -> None:
        self.saving.append(done)

    def digest(self, done: Callable[[str], None]) -> None:
        self.digesting.append(done)

    def close(self) -> None:
        pass


class Seen(NullObserver):
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.heard_of: list[FromWorker] = []

    def heard(self, worker: int, message: FromWorker) -> None:
        self.heard_of.append(message)

    def happened(self, event: Event) -> None:
        self.events.append(event)


class Client:
    """Keeps the replies."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []

    def answer(self, reply: Reply) -> None:
        self.replies.append(reply)


class FakeJob:
    """A leader, and the orders that it has given to processes."""

    def __init__(self, directory: Path, workers: int = 2, **request: Any) -> None:
        script = directory / "train.py"
        script.write_text("")
        checkpoint = request.pop("checkpoints", False)
        policy = CheckpointPolicy(directory=str(directory)) if checkpoint else None
        self.servers, self.seen = FakeServers(), Seen()
        self.started: dict[int, Assignment] = {}
        self.signals: list[tuple[int, int]] = []
        self.pinged: list[int] = []
        self.request = RunRequest(
            program=Program(name=str(script)),
            placement=Placement.even(1, 1),
            options=TrainingOptions(checkpoint=policy),
            failures=FailurePolicy(**request.pop("failures", {})),
            servers=ServerSettings(role=ServerRole(count=2), workers=workers),
            **request,
        )
        self.leader = ServerJobLeader(self.request, self, self.servers, self.seen)
        self.leader.begin()
        self.leader.tick()

    def begin_training(self) -> None:
        for member in list(self.started):
            self.hear(member, STARTED)
        self.leader.tick()

    def hear(self, member: int, message: FromWorker) -> None:
        self.leader.heard(WorkerId(0, member), message)

    def steps(self, member: int, *losses: float) -> None:
        self.hear(member, StepReports([StepReport(1, 0, loss, 4, 0.0) for loss in losses]))

    def train(self, updates: int, samples: int) -> None:
        self.servers.progress = ServerProgress(updates, samples, 0, opened=True)
        self.leader.tick()

    def exit(self, member: int, code: int, evidence: Evidence = NO_EVIDENCE) -> None:
        self.leader.exited(WorkerId(0, member), code, evidence)
        self.leader.tick()

    def finish(self, member: int) -> None:
        self.hear(member, WorkerEnded(stopped=False))
        self.exit(member, 0)

    def leave(self, member: int) -> None:
        self.hear(member, WorkerEnded(stopped=True))
        self.exit(member, 0)

    def ask(self, request: Request) -> Client:
        client = Client()
        self.leader.asked(request, client)
        self.leader.tick()
        return client

    # ServerJobExecutor.

    def start(self, worker_id: WorkerId, assignment: Assignment) -> None:
        self.started[worker_id.member] = assignment

    def tell(self, worker_id: WorkerId, message: Ping) -> None:
        self.pinged.append(worker_id.member)

    def signal(self, worker_id: WorkerId, number: int) -> None:
        self.signals.append((worker_id.member, number))
