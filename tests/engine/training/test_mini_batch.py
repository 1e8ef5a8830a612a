"""One pass, with fake parts and a fake group: in which order the parts are called, and what becomes of the reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import msgspec
import pytest
import torch

from gyrostat.core.errors import Misuse, PeerLost
from gyrostat.core.phase import AgentPresence
from gyrostat.core.placement import Placement
from gyrostat.core.progress import Progress
from gyrostat.engine.supervisor import NullSupervisor
from gyrostat.engine.trace import NoTracer
from gyrostat.engine.training.collectives import CollectiveLog, NoRecovery
from gyrostat.engine.training.generation import CurrentGeneration
from gyrostat.engine.training.mini_batch import MiniBatchParts, MiniBatchRunner
from gyrostat.engine.training.parts import Batches, Buffers, Contexts, Gradients, RealDevice
from gyrostat.engine.training.plan import StepPlan
from gyrostat.engine.training.relocation import NoRelocation
from gyrostat.engine.training.reports import (
    Fence,
    PassReport,
    RequestBox,
    Requests,
    acknowledge_nothing,
)
from gyrostat.engine.transport.group import WorkerGroup

Calls = list[tuple[Any, ...]]
HERE = Progress(step=7)


class Part:
    """Notes every call of a method of some part."""

    def __init__(self, name: str, calls: Calls, **answers: Any) -> None:
        self._name, self._calls, self._answers = name, calls, answers

    def __getattr__(self, method: str) -> Any:
        if method in self._answers:
            answer = self._answers[method]
            if not callable(answer):
                return answer

        def call(*args: Any, **options: Any) -> Any:
            self._calls.append((f"{self._name}.{method}", *args, *options.values()))
            answer = self._answers.get(method)
            return answer(*args) if callable(answer) else answer

        return call


class Group:
    """Two workers, or one. The other one's report is given; an error instead of it is raised once."""

    generation = 1
    rank = 0

    def __init__(self, *others: PassReport | PeerLost) -> None:
        self.size = 2 if others else 1
        self.tracer = NoTracer()
        self._others = list(others)
        self.sent: list[PassReport] = []

    def begin_exchange(self, kind: str, progress: Progress, payload: bytes) -> Callable[[], list[bytes]]:
        assert (kind, progress) == ("reduce", HERE)
        self.sent.append(msgspec.msgpack.decode(payload, type=PassReport))
        other = self._others.pop(0)

        def finish() -> list[bytes]:
            if isinstance(other, PeerLost):
                raise other
            return [payload, msgspec.msgpack.encode(other)]

        return finish


class Relocation(NoRelocation):
    def __init__(self) -> None:
        self.arrivals: Sequence[int] = ()
        self.completed: list[Sequence[bytes]] = []

    def changed_contexts(self, pass_: int) -> bytes:
        return b"mine"

    def pass_completed(self, changes: Sequence[bytes]) -> None:
        self.completed.append(changes)


class World:
    """A runner of worker 0, which runs virtual workers 0 and 1 of four, or of two."""

    def __init__(self, *others: PassReport | PeerLost, acknowledge: Any = acknowledge_nothing) -> None:
        self.calls: Calls = []
        self.group, self.relocation, self.log = Group(*others), Relocation(), CollectiveLog()
        workers = self.group.size
        self.requests = RequestBox()
        self.recovery: Any = NoRecovery()
        self.generation = CurrentGeneration(
            Placement.even(2 * workers, workers), cast(WorkerGroup, self.group)
        )
        fetch = lambda plan, rank, number, pass_: (rank, number)  # noqa: E731
        self.parts = MiniBatchParts(
            generation=self.generation,
            contexts=cast(Contexts, Part("contexts", self.calls)),
            batches=cast(Batches, Part("batches", self.calls, samples=6, fetch=fetch)),
            gradients=cast(Gradients, Part("gradients", self.calls, participation=lambda: b"part")),
            buffers=cast(Buffers, Part("buffers", self.calls)),
            relocation=self.relocation,
            recovery=self,
            log=self.log,
            device=RealDevice(),
        )
        self.runner = MiniBatchRunner(
            self.parts, supervisor=NullSupervisor(), requests=self.requests, acknowledge=acknowledge
        )

    available = True

    def recover(self, lost: PeerLost, plan: StepPlan | None) -> list[bytes] | None:
        return cast("list[bytes] | None", self.recovery.recover(lost, plan))

    def run(self, micro_batches: int = 1) -> list[Any]:
        """A pass of a script whose loss is the rank; returns the micro-batches it got."""
        seen = []
        for batch in self.begin(micro_batches):
            seen.append(batch)
            self.runner.backward(loss(batch[0]))
        return seen

    def begin(self, micro_batches: int = 1) -> Iterator[Any]:
        plan = StepPlan(loader=cast(Any, None), order=None, first_batch=0, micro_batches=micro_batches)
        return self.runner.run_pass(plan, HERE)

    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]


def loss(value: float) -> torch.Tensor:
    return torch.tensor(float(value), requires_grad=True)


def other(**changes: Any) -> PassReport:
    report = PassReport(
        [], [], Requests(), AgentPresence.PRESENT, 4, None, 0.5, b"theirs", b"changed", [], b""
    )
    return msgspec.structs.replace(report, **changes)


def test_a_pass_of_a_lone_worker_calls_its_parts_in_order() -> None:
    world = World()
    assert world.run(micro_batches=2) == [(0, 0), (0, 1), (1, 0), (1, 1)]

    def of_rank(rank: int, *, last: bool) -> Calls:
        return [
            ("contexts.switch_in", rank),
            ("gradients.begin_rank", rank, None, last),
            ("batches.fetch", plan, rank, 0, 0),
            ("contexts.begin_micro_batch", False),
            ("gradients.begin_micro_batch", False),
            ("gradients.before_backward", True),
            ("gradients.after_backward", False),
            ("batches.fetch", plan, rank, 1, 0),
            ("contexts.begin_micro_batch", True),
            ("gradients.begin_micro_batch", True),
            ("gradients.before_backward", False),
            ("gradients.after_backward", True),
            ("contexts.switch_out", rank),
        ]

    plan = StepPlan(loader=cast(Any, None), order=None, first_batch=0, micro_batches=2)
    assert world.calls == [
        ("batches.begin_pass", plan, 0),
        ("contexts.begin_pass",),
        ("gradients.begin_pass",),
        *of_rank(0, last=False),
        *of_rank(1, last=True),
        ("contexts.end_pass",),
        ("gradients.participation",),
        ("gradients.settle", [b"part"]),
        ("buffers.settle",),
    ]
    assert world.runner.outcome.loss == 0.0
    assert (world.log.completed, world.log.last_was_pass) == (1, True)


def test_reports_are_exchanged_while_the_reduction_runs_and_merged() -> None:
    fence = Fence(2, 9)
    world = World(other(fence=Fence(2, 8)), acknowledge=lambda step, lead: fence)
    world.requests.put(Requests(checkpoint=True))
    world.run()
    tail = world.names()[world.names().index("contexts.end_pass") :]
    assert tail == [
        "contexts.end_pass",
        "gradients.participation",
        "gradients.send_off",
        "buffers.send_off",
        "gradients.complete",
        "buffers.complete",
        "gradients.settle",
        "buffers.settle",
    ]
    assert ("gradients.complete", [b"part", b"theirs"]) in world.calls
    outcome = world.runner.outcome
    assert (outcome.samples, outcome.fence, outcome.requests) == (10, fence, Requests(checkpoint=True))
    assert outcome.busy[1] == 0.5
    assert world.relocation.completed == [[b"mine", b"changed"]]
    assert world.requests.take() == Requests()


def test_survivors_run_the_arrivals_and_repeat_the_reduction() -> None:
    world = World(PeerLost("worker 1"), other())
    world.requests.put(Requests(stop=True))

    class Recovery:
        def recover(self, lost: PeerLost, plan: StepPlan | None) -> None:
            assert plan is not None
            world.relocation.arrivals = (2,)

    world.recovery = Recovery()
    assert world.run() == [(0, 0), (1, 0), (2, 0)]
    assert ("gradients.begin_rank", 2, None, False) in world.calls
    assert world.names().count("gradients.send_off") == 2
    assert world.names().count("gradients.settle") == 1
    assert [report.requests.stop for report in world.group.sent] == [True, True]  # not taken twice
    assert world.log.completed == 1


def test_a_worker_that_missed_the_end_of_a_pass_settles_with_what_it_receives() -> None:
    world = World(PeerLost("worker 1"))
    missed = [msgspec.msgpack.encode(other(losses=[3.0])), msgspec.msgpack.encode(other(samples=1))]

    class Recovery:
        def recover(self, lost: PeerLost, plan: StepPlan | None) -> list[bytes]:
            return missed

    world.recovery = Recovery()
    assert world.run() == [(0, 0), (1, 0)]
    assert "gradients.complete" not in world.names()
    assert ("gradients.settle", [b"theirs", b"theirs"]) in world.calls
    assert (world.runner.outcome.loss, world.runner.outcome.samples) == (3.0, 5)
    assert world.log.last == missed


def test_without_recovery_a_lost_worker_is_an_error() -> None:
    world = World(PeerLost("worker 1"))
    with pytest.raises(PeerLost, match="worker 1"):
        world.run()


def test_virtual_workers_that_are_left_out_are_compensated_for() -> None:
    world = World(other(dropped=[3]))
    world.run()
    assert ("gradients.compensate", 1) in world.calls


def test_job_mean_is_known_after_the_pass() -> None:
    world = World()
    means = []
    for rank, _ in world.begin():
        means.append(world.runner.mean(float(rank)))
        world.runner.backward(loss(rank))
    assert means[0].item() == 0.5


def test_backward_is_called_exactly_once_in_a_micro_batch() -> None:
    world = World()
    batches = world.begin()
    next(batches)
    world.runner.backward(loss(1))
    with pytest.raises(Misuse, match="called twice"):
        world.runner.backward(loss(1))
    next(batches)
    with pytest.raises(Misuse, match="ended without"):
        next(batches)
    with pytest.raises(Misuse, match="inside the inner loop"):
        world.runner.backward(loss(1))
