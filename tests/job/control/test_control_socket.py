"""A running job is asked for something by others: it does it, once, and its bits stay the same."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.core.events import EventKind
from gyrostat.core.job import CheckpointPolicy
from gyrostat.core.phase import JobPhase
from gyrostat.engine.checkpoint import load
from gyrostat.engine.state.digest import digest
from gyrostat.job.control.client import JobClient, RequestFailed
from gyrostat.job.control.control_socket import ControlSocket, running, runtime_directory
from gyrostat.job.control.observer import NullObserver
from gyrostat.job.control.requests import RequestResult
from gyrostat.job.processes.protocol import FromWorker, StepReports
from gyrostat.job.processes.unix_socket import bind_at
from tests.conftest import Launch

LONG = """
    import torch

    import gyrostat

    job = gyrostat.init(seed=5)
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12), torch.nn.Dropout(0.2), torch.nn.Linear(12, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = job.dataloader(torch.utils.data.TensorDataset(torch.randn(96, 6)), batch_size=4, shuffle=True)
    job.track(model=model, optimizer=optimizer)
    for epoch in job.epochs(100_000):
        for step in job.steps(loader):
            for (x,) in step:
                step.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
"""


SHORT = LONG.replace("import torch\n", "import os\n\n    import torch\n", 1).replace(
    "        for step in job.steps(loader):\n",
    "        if os.path.exists('enough'):\n            break\n        for step in job.steps(loader):\n",
)
"""Ends by itself, when a file says so."""


class Asks(NullObserver):
    """When the job trains, asks it for things, in a thread of its own."""

    def __init__(self, ask: Callable[[JobClient], None], name: str, enough: Path | None = None) -> None:
        """`enough`: the file that ends a job that cannot be stopped."""
        self._ask, self._name, self._enough = ask, name, enough
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def heard(self, worker: int, message: FromWorker) -> None:
        if isinstance(message, StepReports) and self._thread is None:
            self._thread = threading.Thread(target=self._run)
            self._thread.start()

    def _run(self) -> None:
        with JobClient(self._name) as job_client:
            try:
                self._ask(job_client)
            except BaseException as error:
                self.error = error
            finally:
                job_client.stop()
                if self._enough is not None:
                    self._enough.touch()

    def check(self) -> None:
        assert self._thread is not None
        self._thread.join()
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GYROSTAT_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_a_running_job_is_resized_and_moved(launch: Launch, tmp_path: Path) -> None:
    answers: list[RequestResult] = []

    def ask(job: JobClient) -> None:
        assert job.status().workers == 1
        answers.extend([job.scale(3), job.migrate((0, 1)), job.scale(2), job.migrate(job.status().members)])
        again = job.scale(4, request="mine")
        assert job.scale(4, request="mine") == again  # the same request: carried out once
        answers.append(again)
        answers.append(job.scale(5))
        status = job.status()
        assert (status.workers, status.generation, status.is_steady) == (4, 6, True)
        assert status.throughput is not None

    asks = Asks(ask, "long")
    policy = CheckpointPolicy(directory=str(tmp_path / "elastic"))
    elastic = launch(
        LONG, virtual_workers=4, workers=1, checkpoint=policy, name="long", observer=asks, check=False
    )
    asks.check()
    assert elastic.stopped
    assert [answer.workers for answer in answers if answer.done] == [3, 3, 2, 2, 4]
    assert not answers[-1].done
    assert "ask for 1 to 4" in answers[-1].text
    moves = [event.to_workers for event in elastic.events if event.kind is EventKind.RESIZE]
    assert moves == [3, 3, 2, 2, 4, 4]
    assert set(elastic.exit_codes) == {0}

    fixed = CheckpointPolicy(directory=str(tmp_path / "fixed"))
    launch(LONG, virtual_workers=4, workers=2, checkpoint=fixed, stop_after=elastic.steps)
    assert contents(policy, elastic.steps) == contents(fixed, elastic.steps)
    assert running() == []


def test_down_to_zero_and_back(launch: Launch, tmp_path: Path) -> None:
    """Suspended, the job is its checkpoint; with workers again it goes on with the same bits."""
    phases: list[tuple[int, JobPhase]] = []

    def ask(job: JobClient) -> None:
        down = job.scale(0, request="down")
        assert (down.done, down.workers) == (True, 0)
        assert job.scale(0, request="down") == down
        status = job.status()
        phases.append((status.workers, status.phase))
        assert status.step == down.step
        assert "ask for 1 to 4" in job.scale(5).text
        assert "ask for 1 to 4" in job.migrate((0,)).text
        assert job.scale(0).done
        assert job.checkpoint().done
        up = job.scale(3)
        assert (up.done, up.workers, up.step) == (True, 3, down.step)
        assert job.scale(1).done
        phases.append((job.status().workers, job.status().phase))
        assert job.scale(0).done  # and so it ends: stopped while suspended

    asks = Asks(ask, "suspended")
    policy = CheckpointPolicy(directory=str(tmp_path / "elastic"))
    elastic = launch(
        LONG, virtual_workers=4, workers=2, checkpoint=policy, name="suspended", observer=asks, check=False
    )
    asks.check()
    assert phases == [(0, JobPhase.SUSPENDED), (1, JobPhase.TRAINING)]
    assert elastic.stopped
    moves = [(e.from_workers, e.to_workers) for e in elastic.events if e.kind is EventKind.RESIZE]
    assert moves == [(2, 0), (0, 3), (3, 1), (1, 0)]

    fixed = CheckpointPolicy(directory=str(tmp_path / "fixed"))
    launch(LONG, virtual_workers=4, workers=2, checkpoint=fixed, stop_after=elastic.steps)
    assert contents(policy, elastic.steps) == contents(fixed, elastic.steps)


def test_without_a_place_for_checkpoints_there_is_no_way_to_zero(launch: Launch, tmp_path: Path) -> None:
    replies: list[RequestResult] = []
    asks = Asks(lambda job: replies.append(job.scale(0)), "short", tmp_path / "enough")
    launch(SHORT, virtual_workers=2, name="short", observer=asks)
    asks.check()
    assert not replies[0].done
    assert "started without --checkpoint-dir" in replies[0].text


def contents(policy: CheckpointPolicy, step: int) -> str:
    """The digest of all state in a checkpoint."""
    snapshot = load(Path(policy.directory) / f"step-{step:08}")
    return digest(shared=snapshot.shared["tracked"], contexts=snapshot.contexts)


def test_more_and_fewer_and_how_fast(launch: Launch, tmp_path: Path) -> None:
    answers: list[RequestResult] = []

    def ask(job: JobClient) -> None:
        answers.append(job.scale_out(2, request="out"))
        answers.append(job.scale_out(2, request="out"))  # the same request: carried out once
        answers.append(job.scale_in(members=(1,)))
        assert job.status().members == (0, 2)
        rows = job.profile(1, 3, steps=3)
        assert [row.workers for row in rows] == [1, 2, 3]
        assert all(row.steps == 3 and row.throughput > 0 and 0 < row.busy <= 1 for row in rows)
        assert max(row.efficiency or 0.0 for row in rows) <= 1.0
        answers.append(job.scale_in())
        (row,) = job.profile(steps=3)
        assert row.workers == 1
        assert row.efficiency is not None  # relative to the sizes that were measured before
        with pytest.raises(UsageError, match="no size from 1 to 5"):
            job.profile(largest=5)
        answers.append(job.scale_in(members=(0,)))  # as many as there are: only by number
        answers.append(job.scale_in())  # down to zero: suspended
        with pytest.raises(RequestFailed, match="suspended"):
            job.profile()

    asks = Asks(ask, "long")
    policy = CheckpointPolicy(directory=str(tmp_path / "elastic"))
    outcome = launch(
        LONG, virtual_workers=4, workers=1, checkpoint=policy, name="long", observer=asks, check=False
    )
    asks.check()
    assert [answer.workers for answer in answers] == [3, 3, 2, 1, 1, 0]
    assert [answer.done for answer in answers] == [True, True, True, True, False, True]
    assert "ask for 1 to 4" in answers[4].text
    moves = [
        event.to_workers for event in outcome.events if event.kind is EventKind.RESIZE and event.pause_ms
    ]
    assert moves == [3, 2, 3, 2, 1, 2, 1]


def test_a_job_without_a_place_for_checkpoints_says_so(launch: Launch, tmp_path: Path) -> None:
    texts: list[str] = []

    def ask(job: JobClient) -> None:
        texts.append(job.checkpoint().text)
        texts.append(job.stop().text)

    asks = Asks(ask, "short", tmp_path / "enough")
    launch(SHORT, virtual_workers=2, name="short", observer=asks)
    asks.check()
    assert all("started without --checkpoint-dir" in text for text in texts)


# The control socket itself.


@pytest.fixture
def control_socket() -> Iterator[ControlSocket]:
    control = ControlSocket("job")
    yield control
    control.close()


def test_one_name_one_job(control_socket: ControlSocket) -> None:
    with pytest.raises(UsageError, match="'job' is running already"):
        ControlSocket("job")
    with pytest.raises(UsageError, match="did you mean 'job'"):
        JobClient("jib")
    with pytest.raises(UsageError, match="letters, digits"):
        ControlSocket("../elsewhere")


def test_what_a_killed_job_left_is_no_obstacle(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(runtime_directory() / "job.socket"))
    with pytest.raises(UsageError, match="no job named 'job' is running"):
        JobClient("job")
    ControlSocket("job").close()
    assert running() == []


def test_a_directory_that_others_may_enter_is_refused(place: Path) -> None:
    runtime_directory().chmod(0o755)
    with pytest.raises(UsageError, match="mode 700"):
        ControlSocket("job")


def test_a_runtime_directory_that_cannot_be_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYROSTAT_RUNTIME_DIR", "/proc/x")
    with pytest.raises(UsageError, match="set GYROSTAT_RUNTIME_DIR to another place"):
        runtime_directory()


def test_a_job_that_was_killed_is_not_shown_as_running(place: Path) -> None:
    alive = ControlSocket("alive")
    bind_at(runtime_directory() / "dead.socket").close()
    with pytest.raises(UsageError, match=r"no job named 'nosuch' is running; running: alive$"):
        JobClient("nosuch")
    assert not (runtime_directory() / "dead.socket").exists()
    alive.close()
    assert running() == []
