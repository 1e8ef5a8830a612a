"""Deaths in a job on several nodes: with the leader, while etcd is away, behind a cut wire. The others go on from what they
have, and end with the same bits. Slow, for every agent is a process that imports everything: with `-m full`."""

from __future__ import annotations

import signal
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import pytest

from gyrostat.core.phase import ReconfigurationPhase
from gyrostat.job.control.control_socket import JobClient
from tests.e2e.test_namespaces import ADDRESSES, Network, etcd, network  # noqa: F401
from tests.faults.test_agents import (
    Start,
    end_of,
    same_bits,  # noqa: F401
    start,  # noqa: F401
    steps_between,
    stop,
    two_that_train,
    wait_until,
)
from tests.job.agents import TRAINING, AgentProcess, Agents
from tests.job.nodes.lease.conftest import own_etcd, shared_etcd  # noqa: F401
from tests.job.nodes.lease.etcd_server import EtcdServer

pytestmark = pytest.mark.full


def nothing_restored(*agents: AgentProcess) -> None:
    said = [line for agent in agents for line in agent.lines if "gyrostat:" in line]
    assert not any("starting again from" in line or "resumed at step" in line for line in said), said


def test_a_worker_is_killed(
    start: Start,  # noqa: F811
    same_bits: Callable[[], None],  # noqa: F811
    tmp_path: Path,
) -> None:
    leader, other = two_that_train(start())
    end_of(tmp_path, member=1)
    leader.wait_for(r"worker 1 was killed by SIGKILL")
    wait_until(ReconfigurationPhase.STEADY)
    with JobClient("job") as job_client:
        assert job_client.scale(3).workers == 3
    stop(leader, other)
    same_bits()
    nothing_restored(leader, other)


@pytest.mark.parametrize("member", [0, 1])
def test_the_leader_and_a_worker_at_once(
    start: Start,  # noqa: F811
    same_bits: Callable[[], None],  # noqa: F811
    tmp_path: Path,
    member: int,
) -> None:
    """Only a leader declares a death: those who are left wait for the next one, and go on then."""
    leader, other = two_that_train(agents := start())
    leader.kill()
    end_of(tmp_path, member=member)
    other.wait_for("leading")
    again = agents.start(leader.node)
    again.wait_for("following")
    wait_until(ReconfigurationPhase.STEADY)
    with JobClient("job") as job_client:
        assert job_client.scale(3).workers == 3
    stop(other, again)
    same_bits()
    nothing_restored(leader, other, again)


def test_a_worker_while_etcd_is_away(
    start: Start,  # noqa: F811
    same_bits: Callable[[], None],  # noqa: F811
    tmp_path: Path,
    own_etcd: EtcdServer,  # noqa: F811
) -> None:
    leader, other = two_that_train(start("--listen", "127.0.0.1", store=f"etcd://{own_etcd.host}"))
    own_etcd.kill()
    leader.wait_for("leading no more")
    end_of(tmp_path, member=1)
    own_etcd.start()
    back = monotonic()
    with JobClient("job") as job_client:
        while not steps_between(tmp_path, back, monotonic()):
            job_client.status()
        while not job_client.scale(2).done:
            pass
    stop(leader, other)
    same_bits()
    nothing_restored(leader, other)


def test_a_node_is_cut_off(
    network: Network,  # noqa: F811
    etcd: EtcdServer,  # noqa: F811
    same_bits: Callable[[], None],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its workers are given up; when the wire is mended they are refused, and others come in their place."""
    monkeypatch.setenv("GYROSTAT_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("GYROSTAT_TOKEN", "between us")
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAINING))
    job = [
        "-n",
        "4",
        "-w",
        "2",
        "--nodes",
        "2",
        "--lease",
        "2",
        "--node-timeout",
        "4",
        "--checkpoint-dir",
        "ckpt",
    ]
    agents = Agents(tmp_path, f"etcd://{etcd.host}", [*job, "--log-dir", "logs", "train.py"])
    try:
        a = agents.start("a", prefix=network.inside("a"))
        a.wait_for(r"leading, at ")
        b = agents.start("b", prefix=network.inside("b"))
        b.wait_for("following")
        with JobClient("job") as job_client:
            while not job_client.status().is_steady:
                pass
            wire(network, "down")
            a.wait_for("was lost")
            while not job_client.status().is_steady:
                pass
            wire(network, "up")
            cut = monotonic()
            assert job_client.scale(1).done
            while not steps_between(tmp_path, cut, monotonic()):
                pass
            assert job_client.stop().done
        assert a.finish() == 128 + signal.SIGTERM
        nothing_restored(a)
    finally:
        agents.close()
    same_bits()


def wire(network: Network, state: str) -> None:  # noqa: F811
    subprocess.run([*network.inside("b"), "ip", "link", "set", "wire", state], check=True)
