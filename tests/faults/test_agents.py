"""Several agents share a job. Whoever leads may leave or be killed, in any phase of a change: training goes on, every request
is answered, and not a bit is different."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import pytest

from gyrostat.core.checkpoint_names import list_checkpoints
from gyrostat.core.job import CheckpointPolicy
from gyrostat.core.phase import JobPhase, ReconfigurationPhase
from gyrostat.engine.checkpoint import load
from gyrostat.engine.state.digest import digest
from gyrostat.job.control.client import JobClient, RequestFailed
from gyrostat.job.control.requests import RequestResult
from gyrostat.job.processes.fork_server import STORE_NAME
from tests.conftest import Launch
from tests.job.agents import NODE_TIMEOUT_S, TRAINING, AgentProcess, Agents, end_fork_server
from tests.job.nodes.lease.conftest import own_etcd, shared_etcd  # noqa: F401
from tests.job.nodes.lease.etcd_server import EtcdServer

VIRTUAL = 4
LEASE = ("--lease", "4")

Start = Callable[..., Agents]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Prepares agents of a job of four virtual workers on two workers."""
    monkeypatch.setenv("GYROSTAT_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAINING))
    made: list[Agents] = []

    def agents(*more: str, nodes: int = 2, workers: int = 2, store: str | None = None) -> Agents:
        job = ["-n", str(VIRTUAL), "-w", str(workers), "--nodes", str(nodes)]
        options = [*LEASE, *job, "--checkpoint-dir", "ckpt", "--log-dir", "logs", *more, "train.py"]
        made.append(Agents(tmp_path, store or f"file://{tmp_path}/store", options))
        return made[-1]

    yield agents
    for each in made:
        each.close()


@pytest.fixture
def same_bits(launch: Launch, tmp_path: Path) -> Callable[[], None]:
    """Stops the job, and compares its checkpoint with that of a run that nothing happened to."""

    def compare() -> None:
        newest = list_checkpoints(tmp_path / "ckpt")[-1]
        steps = load(newest).progress.step
        undisturbed = CheckpointPolicy(directory=str(tmp_path / "undisturbed"))
        launch(TRAINING, virtual_workers=VIRTUAL, workers=2, checkpoint=undisturbed, stop_after=steps)
        assert contents(newest) == contents(tmp_path / "undisturbed" / newest.name)

    return compare


def contents(path: Path) -> str:
    snapshot = load(path)
    return digest(shared=snapshot.shared["tracked"], contexts=snapshot.contexts)


def stop(*agents: AgentProcess) -> None:
    with JobClient("job") as job_client:
        assert job_client.stop().done
    assert [agent.finish() for agent in agents] == [128 + signal.SIGTERM] * len(agents)


def steps_between(directory: Path, begin: float, end: float) -> int:
    """How many steps were complete in that time."""
    lines = [line for log in (directory / "logs").glob("*.log") for line in log.read_text().splitlines()]
    return sum(begin < float(line.split()[1]) < end for line in lines if line.startswith("at "))


class Asking(threading.Thread):
    """A client that waits for its answer."""

    def __init__(self, ask: Callable[[JobClient], RequestResult]) -> None:
        super().__init__()
        self._ask = ask
        self.answered: RequestResult | None = None
        self.start()

    def run(self) -> None:
        with JobClient("job") as job_client:
            self.answered = self._ask(job_client)

    def answer(self) -> RequestResult:
        self.join()
        assert self.answered is not None
        return self.answered


def test_two_agents_share_a_job_and_one_leaves(
    start: Start, same_bits: Callable[[], None], tmp_path: Path
) -> None:
    leader, other = two_that_train(start())
    with JobClient(f"job.{other.node}") as far:
        assert far.scale(3).workers == 3
        assert far.migrate((0,)).done
    with JobClient(f"job.{other.node}") as far:
        assert "Expected `array` of length <= 10000" in far.migrate(tuple(range(300_000))).text
    leader.signal(signal.SIGTERM)
    assert leader.finish() == 0
    other.wait_for("leading")
    wait_until(ReconfigurationPhase.STEADY)
    with JobClient("job") as job_client:
        assert 1 <= job_client.status().workers < 3
        assert job_client.scale(4).workers == 4
    stop(other)
    same_bits()
    assert {path.read_text() for path in (tmp_path / "logs").glob("*.exit")} == {"0\n"}


PHASES = {
    ReconfigurationPhase.STEADY: None,
    ReconfigurationPhase.STARTING_WORKERS: "starting-2.fifo",
    ReconfigurationPhase.CONNECTING: "connecting-2.fifo",
    ReconfigurationPhase.FENCED: "fenced-1.fifo",
}
IN_CI = (ReconfigurationPhase.FENCED,)


@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=() if phase in IN_CI else pytest.mark.full) for phase in PHASES]
)
def test_the_leader_is_killed(
    start: Start, same_bits: Callable[[], None], tmp_path: Path, phase: ReconfigurationPhase
) -> None:
    """Its workers train on without it, another agent leads, and when it is started again it finds them. The client that had
    asked it for a change gets its answer from the next leader."""
    gate = PHASES[phase]
    if gate is not None:
        os.mkfifo(tmp_path / gate)
    agents = start("--report", "report.json")
    leader, other = two_that_train(agents)
    client = Asking(lambda job: job.scale(3, request="mine")) if gate is not None else None
    wait_until(phase)
    leader.kill()
    killed = monotonic()
    other.wait_for("leading")
    assert steps_between(tmp_path, killed, monotonic()) > 0
    again = agents.start(leader.node)
    again.wait_for("found [12] worker")
    again.wait_for("following")
    if gate is not None:
        open_gate(tmp_path / gate)
    if client is not None:
        assert client.answer().workers == 3
    with JobClient("job") as job_client:
        assert job_client.scale(3, request="mine").workers == 3
        status = job_client.status()
        assert (status.is_steady, status.workers) == (True, 3)
    check_idle(other, tmp_path)
    stop(again, other)
    same_bits()
    assert [path.name for path in tmp_path.iterdir() if "report" in path.name] == ["report.json"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["stopped_by"] == "SIGTERM"
    assert 0 < len(report["losses"]) <= report["steps"] - report["reported_from"]
    assert not any("starting again from" in line for line in [*other.lines, *again.lines])


def two_that_train(agents: Agents) -> tuple[AgentProcess, AgentProcess]:
    """The agent that leads, and the other, of a job that trains."""
    a, b = agents.start("a"), agents.start("b")
    for agent in (a, b):
        agent.wait_for("leading|following")
    wait_until(ReconfigurationPhase.STEADY)
    with JobClient("job") as job_client:
        leads = job_client.status().pid
    return (a, b) if a.process.pid == leads else (b, a)


def wait_until(phase: ReconfigurationPhase) -> None:
    """Until the job is in that phase."""
    with JobClient("job") as job_client:
        while (
            status := job_client.status()
        ).phase is not JobPhase.TRAINING or status.reconfiguration is not phase:
            os.sched_yield()


@pytest.mark.full
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase is not ReconfigurationPhase.STEADY])
def test_the_leader_is_asked_to_leave(
    start: Start, same_bits: Callable[[], None], tmp_path: Path, phase: ReconfigurationPhase
) -> None:
    """In the midst of a change: it brings that to its end, its workers leave at the next fence, and another leads."""
    gate = tmp_path / str(PHASES[phase])
    os.mkfifo(gate)
    leader, other = two_that_train(start())
    client = Asking(lambda job: job.scale(3))
    wait_until(phase)
    leader.signal(signal.SIGTERM)
    leader.wait_for("this node leaves")
    open_gate(gate)
    assert client.answer().workers == 3
    assert leader.finish() == 0
    other.wait_for("leading")
    wait_until(ReconfigurationPhase.STEADY)
    with JobClient("job") as job_client:
        assert job_client.scale(2).workers == 2
    stop(other)
    same_bits()


@pytest.mark.full
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase is not ReconfigurationPhase.STEADY])
def test_a_newcomer_is_killed(
    start: Start, same_bits: Callable[[], None], tmp_path: Path, phase: ReconfigurationPhase
) -> None:
    gate = tmp_path / str(PHASES[phase])
    os.mkfifo(gate)
    leader, other = two_that_train(start())
    client = Asking(lambda job: job.scale(3))
    wait_until(phase)
    end_of(tmp_path, member=2)
    assert "was killed by SIGKILL before it joined" in client.answer().text
    if phase is ReconfigurationPhase.FENCED:
        open_gate(gate)
    with JobClient("job") as job_client:
        assert job_client.status().workers == 2
        assert job_client.scale(3).workers == 3
    stop(leader, other)
    same_bits()


def open_gate(gate: Path) -> None:
    """Who waits there goes on, and nobody will wait there any more."""
    both_ends = os.open(gate, os.O_RDWR)
    gate.unlink()
    os.close(both_ends)


def end_of(directory: Path, member: int) -> None:
    """Kills the worker of that number, the one that prints into its log, as soon as it is there."""
    log, deadline = (
        os.path.realpath(directory / "logs" / f"worker-{member}.log"),
        monotonic() + NODE_TIMEOUT_S,
    )
    while monotonic() < deadline:
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(process / "fd" / "1") == log:
                    os.kill(int(process.name), signal.SIGKILL)
                    return
    raise AssertionError(f"nobody prints into {log}")


def test_a_lost_node(start: Start, same_bits: Callable[[], None], tmp_path: Path) -> None:
    """Agent, fork server and workers of a node are gone at once: the others go on, and another worker takes its place."""
    leader, other = two_that_train(start("--node-timeout", "1"))
    other.kill()
    end_fork_server(other.node)
    leader.wait_for("went on after")
    leader.wait_for("in place of worker")
    with JobClient("job") as job_client:
        assert job_client.status().workers == 2
    stop(leader)
    same_bits()


def test_an_agent_stays_away(start: Start, same_bits: Callable[[], None], tmp_path: Path) -> None:
    """Its workers train on until they are given up; then the others go on, and another worker takes their place."""
    leader, other = two_that_train(start("--node-timeout", "2"))
    other.kill()
    leader.wait_for("went on after")
    leader.wait_for("in place of worker")
    with JobClient("job") as job_client:
        assert job_client.status().workers == 2
    assert list_checkpoints(tmp_path / "ckpt") == []
    stop(leader)
    same_bits()


@pytest.mark.full
def test_an_agent_comes_back_after_the_end(start: Start) -> None:
    """It reports the outcome that it has missed, and does not wait for the others to begin the job anew."""
    agents = start("--node-timeout", "20")
    leader, other = two_that_train(agents)
    other.kill()
    end_fork_server(other.node)
    wait_until(ReconfigurationPhase.STEADY)
    stop(leader)
    again = agents.start(other.node)
    assert again.finish() == 128 + signal.SIGTERM


def test_an_agent_stays_away_from_a_job_without_backups(start: Start, same_bits: Callable[[], None]) -> None:
    """Its workers wait for another for some time, then stop the job at a boundary, with a checkpoint; from that the agents
    that are left go on."""
    leader, other = two_that_train(start("--node-timeout", "6", "--recovery", "checkpoint"))
    other.kill()
    leader.wait_for("resumed at step")
    wait_until(ReconfigurationPhase.STEADY)
    with JobClient("job") as job_client:
        assert job_client.status().workers == 2
    stop(leader)
    same_bits()


def test_an_agent_is_back_before_its_workers_are_given_up(
    start: Start, same_bits: Callable[[], None], tmp_path: Path
) -> None:
    """It was away for more than half of the time that it may be: nothing has stopped, and nothing does."""
    agents = start("--node-timeout", "20")
    leader, other = two_that_train(agents)
    other.kill()
    wait_for_steps(tmp_path, after=monotonic() + 10.5)
    again = agents.start(other.node)
    again.wait_for("found 1 worker of the previous agent")
    again.wait_for("following")
    wait_for_steps(tmp_path, after=monotonic())
    assert list_checkpoints(tmp_path / "ckpt") == []
    with JobClient("job") as job_client:
        status = job_client.status()
        assert (status.members, status.reconfiguration) == ((0, 1), ReconfigurationPhase.STEADY)
    stop(leader, again)
    same_bits()


@pytest.mark.full
def test_the_only_agent_is_back_after_its_workers_have_stopped_the_job(
    start: Start, same_bits: Callable[[], None], tmp_path: Path
) -> None:
    """No worker had an agent, so the job has stopped with a checkpoint. Nobody had asked for that: it goes on."""
    agents = start("--node-timeout", "20", nodes=1)
    only = agents.start("a")
    only.wait_for("leading")
    wait_until(ReconfigurationPhase.STEADY)
    only.kill()
    while not list_checkpoints(tmp_path / "ckpt"):
        os.sched_yield()
    again = agents.start("a")
    again.wait_for("stopped the job, because its agent was away")
    again.wait_for("resumed at step")
    stop(again)
    same_bits()


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.full)])
def test_the_leader_is_killed_while_its_workers_start(start: Start, tmp_path: Path, nodes: int) -> None:
    """Workers have not met yet: they meet without it, train, and are found when it is back."""
    for member in range(2):
        os.mkfifo(tmp_path / f"starting-{member}.fifo")
    agents = start("--node-timeout", "60", nodes=nodes)
    a = agents.start("a")
    a.wait_for("leading")
    others = [agents.start("b")] if nodes == 2 else []
    wait_for_process(tmp_path, member=1)
    a.kill()
    for member in range(2):
        open_gate(tmp_path / f"starting-{member}.fifo")
    wait_for_steps(tmp_path, after=0.0)
    again = agents.start("a")
    again.wait_for(f"found {2 // nodes} workers")
    wait_until(ReconfigurationPhase.STEADY)
    stop(again, *others)


@pytest.mark.parametrize("connected", [0, 1])
def test_the_rendezvous_is_killed_while_workers_start(start: Start, tmp_path: Path, connected: int) -> None:
    """The process in which workers find each other, before any has connected to it or when the first one waits there."""
    for member in range(2):
        os.mkfifo(tmp_path / f"starting-{member}.fifo")
    agent = start(nodes=1).start("a")
    agent.wait_for("leading")
    wait_for_process(tmp_path, member=1)
    (store,) = rendezvous_processes(tmp_path)
    before = sockets(store)
    for member in range(connected):
        open_gate(tmp_path / f"starting-{member}.fifo")
    while sockets(store) < before + connected:
        os.sched_yield()
    os.kill(store, signal.SIGKILL)
    for member in range(connected, 2):
        open_gate(tmp_path / f"starting-{member}.fifo")
    if connected:  # its attempt cannot succeed
        agent.wait_for("lost a peer")
    wait_until(ReconfigurationPhase.STEADY)
    stop(agent)


def test_the_rendezvous_is_killed_while_workers_train(
    start: Start, same_bits: Callable[[], None], tmp_path: Path
) -> None:
    """The next change finds another process at the same address; one that was connecting meanwhile is tried again."""
    os.mkfifo(tmp_path / "connecting-1.fifo")
    agent = start(nodes=1).start("a")
    agent.wait_for("leading")
    wait_until(ReconfigurationPhase.STEADY)
    (store,) = rendezvous_processes(tmp_path)
    before = sockets(store)
    scaling = Asking(lambda client: client.scale(3))
    while sockets(store) < before + 2:  # worker 0 and the new one wait there for worker 1
        os.sched_yield()
    os.kill(store, signal.SIGKILL)
    answer = scaling.answer()
    assert (answer.done, answer.retryable) == (False, True)
    assert "workers could not connect to each other" in answer.text
    open_gate(tmp_path / "connecting-1.fifo")
    with JobClient("job") as job_client:
        assert job_client.scale(3).workers == 3
    stop(agent)
    same_bits()


def test_a_killed_fork_server_is_replaced(
    start: Start, same_bits: Callable[[], None], tmp_path: Path
) -> None:
    """With it die the node's workers, and the rendezvous: the job goes on from its checkpoint, and can be resized."""
    agent = start("--checkpoint-every", "5", nodes=1).start("a")
    agent.wait_for("checkpoint of step")
    (store,) = rendezvous_processes(tmp_path)
    fork_server = int(Path(f"/proc/{store}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(fork_server, signal.SIGKILL)
    agent.wait_for("was killed by SIGKILL; restarting from step")
    wait_until(ReconfigurationPhase.STEADY)
    with JobClient("job") as job_client:
        assert job_client.scale(3).workers == 3
    stop(agent)
    same_bits()


def rendezvous_processes(directory: Path) -> list[int]:
    """Those that serve the rendezvous of a job whose sockets are below this directory."""
    ours, found = f"GYROSTAT_RUNTIME_DIR={directory}/run".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name, strings = (process / "comm").read_text(), (process / "environ").read_bytes().split(b"\0")
            if name.strip() == STORE_NAME and ours in strings:
                found.append(int(process.name))
    return found


def sockets(pid: int) -> int:
    """How many a process has open."""
    found = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += os.readlink(file).startswith("socket:")
    return found


def check_idle(agent: AgentProcess, directory: Path) -> None:
    """While workers train, an agent mostly waits."""
    began, before = monotonic(), processor_time(agent)
    wait_for_steps(directory, after=began + 2.0)
    assert processor_time(agent) - before < 0.5 * (monotonic() - began)


def processor_time(agent: AgentProcess) -> float:
    """Seconds."""
    fields = Path(f"/proc/{agent.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for_process(directory: Path, member: int) -> None:
    """Until a worker has made its black box: its log is opened before it is forked."""
    while not list((directory / "run").rglob(f"box-0-{member}")):
        os.sched_yield()


def wait_for_steps(directory: Path, after: float) -> None:
    while not steps_between(directory, after, float("inf")):
        os.sched_yield()


def test_etcd_loses_its_data(
    start: Start,
    same_bits: Callable[[], None],
    own_etcd: EtcdServer,  # noqa: F811
) -> None:
    """Nobody can lead any more: all agents say so, the job stops with a checkpoint, and no command returns 0."""
    agents = two_that_train(start("--listen", "127.0.0.1", store=f"etcd://{own_etcd.host}"))
    own_etcd.lose_data()
    own_etcd.start()
    for agent in agents:
        agent.wait_for("the lease store has lost its data")
    assert [agent.finish() for agent in agents] == [1, 1]
    same_bits()


def test_an_agent_waits_for_etcd(start: Start, own_etcd: EtcdServer) -> None:  # noqa: F811
    own_etcd.kill()
    agent = start("--listen", "127.0.0.1", nodes=1, store=f"etcd://{own_etcd.host}").start("a")
    agent.wait_for("no answer from etcd .*; trying again for 60 s")
    own_etcd.start()
    agent.wait_for("leading")
    wait_until(ReconfigurationPhase.STEADY)
    stop(agent)


def test_etcd_is_restarted(
    start: Start,
    same_bits: Callable[[], None],
    tmp_path: Path,
    own_etcd: EtcdServer,  # noqa: F811
) -> None:
    """Without it nobody leads, and training goes on."""
    store = f"etcd://{own_etcd.host}"
    leader, other = two_that_train(start("--listen", "127.0.0.1", store=store))
    own_etcd.kill()
    killed = monotonic()
    leader.wait_for("leading no more")
    assert steps_between(tmp_path, killed, monotonic()) > 0
    with JobClient("job") as job_client:  # nobody can answer, and a client is not left waiting
        with pytest.raises(RequestFailed, match=r"has no leader at the moment .*no answer from etcd .*retry"):
            job_client.status()
        refused = job_client.scale(3)
        assert (refused.done, refused.retryable) == (False, True)
    own_etcd.start()
    with JobClient("job") as job_client:
        while not (scaled := job_client.scale(3)).done:
            assert scaled.retryable, scaled
        assert scaled.workers == 3
    stop(leader, other)
    same_bits()
