"""A worker is killed, wherever it is: the others go on, and the result is that of a run in which nobody was.

Every case asserts the digest, all losses, the samples, from where the job recovered (never from a checkpoint, unless it says
so), and that at most the pass that was running is done again. A short choice of cases runs always; all of them with
`-m full`.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from gyrostat.core.events import Event, EventKind
from gyrostat.core.job import CheckpointPolicy
from gyrostat.core.placement import Placement
from gyrostat.job.control.outcome import Outcome
from gyrostat.job.processes.start import WorkerForkServer
from tests.conftest import Launch
from tests.faults.injector import Faults, fail_at

N = 5
SCRIPT = """
    import sys

    import torch

    import gyrostat

    job = gyrostat.init(seed=4)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(60, 4))
    loader = job.dataloader(data, batch_size=2, shuffle=True)
    held_out = job.dataloader(data, batch_size=4)
    job.track(model=model, optimizer=optimizer)
    for epoch in job.epochs(2):
        for step in job.steps(loader, accumulate=int(sys.argv[1])):
            for (x,) in step:
                step.local["seen"] = step.local.get("seen", 0) + 1
                step.backward(model(x).square().mean() * step.local["seen"])
            optimizer.step()
            optimizer.zero_grad()
        job.log(error=sum(job.evaluate(held_out, lambda batch: float(model(batch[0]).square().sum()))))
"""
STEP = 3
PLACES = ("micro_batch", "backward", "exchange", "reduce", "reduced", "update", "updated", "boundary")


@pytest.fixture(scope="module")
def undisturbed(
    fork_server: WorkerForkServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Outcome]:
    """By `accumulate`. The number of workers does not matter, nor whether there are checkpoints."""
    launch = Launch(fork_server, tmp_path_factory.mktemp("undisturbed"))
    return {each: launch(SCRIPT, virtual_workers=N, workers=2, args=[str(each)]) for each in (1, 2)}


def failures(outcome: Outcome) -> list[Event]:
    return [event for event in outcome.events if event.kind is EventKind.FAILURE]


def check(
    outcome: Outcome, undisturbed: Outcome, *, lost: int, recovered: Sequence[str] = ("peers",), each: int = 1
) -> None:
    """`lost`: virtual workers whose worker was; `each`: micro-batches that they have in a pass."""
    assert outcome.digest == undisturbed.digest
    assert outcome.losses == undisturbed.losses
    assert outcome.samples == undisturbed.samples
    assert [record.metrics for record in outcome.logs] == [record.metrics for record in undisturbed.logs]
    died = failures(outcome)
    assert [event.recovered_from for event in died] == list(recovered)
    redone = sum(event.micro_batches_redone or 0 for event in died if event.recovered_from == "peers")
    assert redone <= lost * each
    assert all(event.pause_ms is not None and event.pause_ms >= 0 for event in died)


def held_by(worker: int, workers: int) -> int:
    return len(Placement.even(N, workers).held_by(worker))


def kill(
    launch: Launch, undisturbed: dict[int, Outcome], where: str, worker: int, workers: int, each: int = 1
) -> Outcome:
    outcome = fail_at(step=STEP, where=where, worker=worker).run(
        launch, SCRIPT, virtual_workers=N, workers=workers, args=[str(each)]
    )
    check(outcome, undisturbed[each], lost=held_by(worker, workers), each=each)
    return outcome


# Every place, every role, 2 to 5 workers.

CASES = [
    (where, worker, workers)
    for where in PLACES
    for workers in (2, 3, 4, 5)
    for worker in sorted({0, 1, workers - 1})
]
SHORT = {(where, number % 2, 2) for number, where in enumerate(PLACES)} | {
    ("micro_batch", 3, 4),
    ("reduce", 0, 3),
    ("reduced", 2, 5),
    ("update", 1, 4),
}


@pytest.mark.parametrize(
    ("where", "worker", "workers"),
    [case if case in SHORT else pytest.param(*case, marks=pytest.mark.full) for case in CASES],
)
def test_killed_anywhere(
    launch: Launch, undisturbed: dict[int, Outcome], where: str, worker: int, workers: int
) -> None:
    outcome = kill(launch, undisturbed, where, worker, workers)
    (death,) = failures(outcome)
    assert death.reason == f"worker {worker} was killed by SIGKILL"
    if where in ("micro_batch", "backward", "exchange"):  # nobody can have completed that reduction
        assert death.micro_batches_redone == held_by(worker, workers)


@pytest.mark.parametrize("where", ["micro_batch", "reduce", "update"])
def test_under_accumulation(launch: Launch, undisturbed: dict[int, Outcome], where: str) -> None:
    """A pass has two micro-batches of each virtual worker."""
    outcome = kill(launch, undisturbed, where, 1, 2, each=2)
    if where == "micro_batch":
        assert failures(outcome)[0].micro_batches_redone == 2 * held_by(1, 2)


@pytest.mark.parametrize("worker", [0, 1])
def test_in_an_evaluation(launch: Launch, undisturbed: dict[int, Outcome], worker: int) -> None:
    outcome = fail_at(step=6, where="evaluate", worker=worker).run(
        launch, SCRIPT, virtual_workers=N, workers=2, args=["1"]
    )
    check(outcome, undisturbed[1], lost=held_by(worker, 2))


@pytest.mark.parametrize("worker", [0, 1])
def test_at_the_end_of_the_script(launch: Launch, undisturbed: dict[int, Outcome], worker: int) -> None:
    outcome = fail_at(step=0, where="end", worker=worker).run(
        launch, SCRIPT, virtual_workers=N, workers=2, args=["1"]
    )
    check(outcome, undisturbed[1], lost=0)


@pytest.mark.parametrize(
    ("before", "after", "where", "worker"),
    [
        (2, 3, "fence", 0),
        (2, 3, "fenced", 1),
        (3, 2, "fence", 2),  # it was about to leave
        (3, 2, "fenced", 0),
        pytest.param(2, 3, "fence", 1, marks=pytest.mark.full),
        pytest.param(2, 3, "fenced", 0, marks=pytest.mark.full),
        pytest.param(3, 2, "fence", 0, marks=pytest.mark.full),
        pytest.param(3, 2, "fence", 1, marks=pytest.mark.full),
        pytest.param(3, 2, "fenced", 1, marks=pytest.mark.full),
    ],
)
def test_at_a_fence(
    launch: Launch, undisturbed: dict[int, Outcome], before: int, after: int, where: str, worker: int
) -> None:
    """Old members die when the next generation is about to begin, or has just begun."""
    outcome = fail_at(step=STEP, where=where, worker=worker).run(
        launch, SCRIPT, virtual_workers=N, workers=before, args=["1"], schedule=((STEP, after),)
    )
    check(outcome, undisturbed[1], lost=N)


def test_a_fence_that_only_some_have_come_to(launch: Launch) -> None:
    """Worker 2 was asked to leave, and dies at the fence. Worker 0 is there, too; worker 1 is slow, and hears of the death
    before: for it there is no fence any more."""
    script = SCRIPT.replace(
        "import sys\n", "import os\n    import signal\n    import sys\n    import time\n"
    ).replace(
        "            optimizer.step()\n",
        """            optimizer.step()
            if os.environ["RANK"] == "2" and job.step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if os.environ["RANK"] == "1":
                time.sleep(0.2)
""",
    )
    undisturbed = launch(SCRIPT, virtual_workers=N, workers=2, args=["1"])
    outcome = fail_at(step=None, where="fence", worker=2).run(
        launch, script, virtual_workers=N, workers=3, args=["1"]
    )
    check(outcome, undisturbed, lost=held_by(2, 3))


@pytest.mark.parametrize("worker", [0, 1])
def test_while_a_checkpoint_is_written(
    launch: Launch, undisturbed: dict[int, Outcome], tmp_path: Path, worker: int
) -> None:
    """Worker 0 writes it; the other one dies in the micro-batch after that."""
    where, step = ("checkpoint", None) if worker == 0 else ("micro_batch", STEP)
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"), every=STEP)
    outcome = fail_at(step=step, where=where, worker=worker).run(
        launch, SCRIPT, virtual_workers=N, workers=2, args=["1"], checkpoint=policy
    )
    check(outcome, undisturbed[1], lost=held_by(worker, 2))
    assert outcome.checkpoints[-1].step == 12


# Several at once.


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("micro_batch", "micro_batch"),
        ("reduce", "reduce"),
        *(
            pytest.param(*places, marks=pytest.mark.full)
            for places in itertools.product(
                ("backward", "exchange", "reduced", "update", "boundary"), repeat=2
            )
        ),
    ],
)
def test_two_at_once(launch: Launch, undisturbed: dict[int, Outcome], first: str, second: str) -> None:
    """Of four; whether that is one recovery or two depends on when the second is noticed."""
    faults = fail_at(step=STEP, where=first, worker=1).and_at(step=STEP, where=second, worker=2)
    outcome = faults.run(launch, SCRIPT, virtual_workers=N, workers=4, args=["1"])
    died = failures(outcome)
    check(outcome, undisturbed[1], lost=2 * N, recovered=["peers"] * len(died))
    assert len(died) in (1, 2)


@pytest.mark.parametrize("worker", [0, 2])
def test_during_recovery(launch: Launch, undisturbed: dict[int, Outcome], worker: int) -> None:
    """Worker 1 of three is killed, and when the others are about to agree, another one."""
    faults = fail_at(step=STEP, where="micro_batch", worker=1).and_at(
        step=STEP, where="recovery", worker=worker
    )
    outcome = faults.run(launch, SCRIPT, virtual_workers=N, workers=3, args=["1"])
    died = failures(outcome)
    check(outcome, undisturbed[1], lost=2 * N, recovered=["peers"] * len(died))


def test_one_after_the_other_until_one_is_left(launch: Launch, undisturbed: dict[int, Outcome]) -> None:
    faults = Faults()
    for step, worker in ((2, 3), (3, 0), (4, 1)):
        faults = faults.and_at(step=step, where="micro_batch", worker=worker)
    outcome = faults.run(launch, SCRIPT, virtual_workers=N, workers=4, args=["1"])
    check(outcome, undisturbed[1], lost=3 * N, recovered=["peers"] * 3)


def test_all_of_them(launch: Launch, undisturbed: dict[int, Outcome], tmp_path: Path) -> None:
    """Nobody is left who could go on: from the newest checkpoint, with the same bits."""
    policy = CheckpointPolicy(directory=str(tmp_path / "checkpoints"), every=2)
    faults = fail_at(step=STEP, where="micro_batch", worker=0).and_at(
        step=STEP, where="micro_batch", worker=1
    )
    outcome = faults.run(
        launch, SCRIPT, virtual_workers=N, workers=2, args=["1"], checkpoint=policy, restarts=1
    )
    assert outcome.digest == undisturbed[1].digest
    assert outcome.losses == undisturbed[1].losses
    assert outcome.samples == undisturbed[1].samples
    # They are written in the background: whether one was in place when both died depends on the machine.
    assert failures(outcome)[-1].recovered_from in ("checkpoint", "start")


# Stopped instead of killed.


@pytest.mark.parametrize("where", ["micro_batch", "reduce", pytest.param("update", marks=pytest.mark.full)])
def test_stopped_for_a_moment(launch: Launch, undisturbed: dict[int, Outcome], where: str) -> None:
    """Shorter than anybody's patience: the others wait, and nothing is lost."""
    faults = fail_at(step=STEP, where=where, worker=1, signal=signal.SIGSTOP, seconds=0.3)
    outcome = faults.run(launch, SCRIPT, virtual_workers=N, workers=3, args=["1"])
    check(outcome, undisturbed[1], lost=0, recovered=[])


@pytest.mark.parametrize("where", ["micro_batch", pytest.param("reduce", marks=pytest.mark.full)])
def test_stopped_for_too_long(launch: Launch, undisturbed: dict[int, Outcome], where: str) -> None:
    """It is silent, so it is given up; the others go on from peers."""
    faults = fail_at(step=STEP, where=where, worker=1, signal=signal.SIGSTOP, seconds=60.0)
    outcome = faults.run(launch, SCRIPT, virtual_workers=N, workers=3, args=["1"], heartbeat_timeout_s=4.0)
    check(outcome, undisturbed[1], lost=held_by(1, 3))
