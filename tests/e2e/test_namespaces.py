"""A job on two nodes that share nothing but a wire: network namespaces joined by a pair of virtual interfaces."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gyrostat.core.checkpoint_names import list_checkpoints
from gyrostat.core.job import CheckpointPolicy
from gyrostat.engine.checkpoint import load
from gyrostat.engine.state.digest import digest
from gyrostat.job.control.client import JobClient
from tests.conftest import Launch
from tests.job.agents import TRAINING, Agents
from tests.job.nodes.lease.etcd_server import BINARY, MISSING, EtcdServer

ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}


class Network:
    """Two namespaces of this test's own."""

    def __init__(self) -> None:
        self._names = {node: f"gyrostat-{os.getpid()}-{node}" for node in ADDRESSES}

    def inside(self, node: str) -> Sequence[str]:
        """The command by which others run there."""
        return ("ip", "netns", "exec", self._names[node])

    def open(self) -> None:
        for name in self._names.values():
            ip("netns", "add", name)
        a, b = self._names.values()
        ip("link", "add", "wire", "netns", a, "type", "veth", "peer", "name", "wire", "netns", b)
        for node, name in self._names.items():
            ip("-n", name, "addr", "add", f"{ADDRESSES[node]}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def close(self) -> None:
        for name in self._names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot make network namespaces: {done.stderr.strip()}")


@pytest.fixture
def network() -> Iterator[Network]:
    if shutil.which("ip") is None or os.getuid() != 0:
        pytest.skip("needs root and the command ip")
    made = Network()
    try:
        made.open()
        yield made
    finally:
        made.close()


@pytest.fixture
def etcd(network: Network, tmp_path: Path) -> Iterator[EtcdServer]:
    if BINARY is None:
        pytest.skip(MISSING)
    server = EtcdServer(tmp_path, at=ADDRESSES["a"], prefix=network.inside("a"))
    server.start()
    yield server
    server.stop()


def gyrostat(network: Network, node: str, *args: str) -> str:
    """A command on that node."""
    return subprocess.check_output(
        [*network.inside(node), sys.executable, "-c", "from gyrostat.cli.main import main; main()", *args],
        text=True,
        timeout=200,
    )


def test_a_job_on_two_nodes(
    network: Network,
    etcd: EtcdServer,
    launch: Launch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GYROSTAT_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("GYROSTAT_TOKEN", "between us")
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAINING))
    job = ["-n", "4", "-w", "2", "--nodes", "2", "--lease", "2", "--checkpoint-dir", "ckpt"]
    agents = Agents(tmp_path, f"etcd://{etcd.host}", [*job, "--log-dir", "logs", "train.py"])
    try:
        a = agents.start("a", prefix=network.inside("a"))
        address = a.wait_for(r"leading, at 10\.77\.0\.1:").split()[-1]
        b = agents.start("b", prefix=network.inside("b"))
        b.wait_for(rf"following the agent at {address}")
        with JobClient("job") as job_client:
            while not job_client.status().is_steady:
                os.sched_yield()
        assert f"on a, b, led at {address}" in gyrostat(network, "b", "status", "job", "--agent", address)
        assert "3 workers since step" in gyrostat(network, "b", "scale", "job", "3", "--agent", address)
        assert "3 workers since step" in gyrostat(network, "a", "migrate", "job", "0", "--agent", address)
        assert "at the next step boundary" in gyrostat(network, "b", "stop", "job", "--agent", address)
        assert [a.finish(), b.finish()] == [128 + signal.SIGTERM] * 2
    finally:
        agents.close()
    newest = list_checkpoints(tmp_path / "ckpt")[-1]
    undisturbed = CheckpointPolicy(directory=str(tmp_path / "undisturbed"))
    steps = load(newest).progress.step
    launch(TRAINING, virtual_workers=4, workers=1, checkpoint=undisturbed, stop_after=steps)
    one, other = (load(path) for path in (newest, tmp_path / "undisturbed" / newest.name))
    assert digest(shared=one.shared["tracked"], contexts=one.contexts) == digest(
        shared=other.shared["tracked"], contexts=other.contexts
    )
