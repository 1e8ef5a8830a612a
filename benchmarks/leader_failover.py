"""How fast 64 agents get a new leader when theirs is killed: light processes, each with a campaign of its own, on a real etcd.

Each repetition sends SIGKILL to the leader and waits until every other agent follows the next one, and one that it
leads; then a new agent takes the dead one's place. Two spans, by the machine's monotonic clock: from the first moment that any
agent saw the key gone, and from the kill. Needs Debian's etcd-server.
"""

from __future__ import annotations

import contextlib
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from figures import Figure, Options, Target, main
from pairs import Pair

ROOT = Path(__file__).parents[1]
AGENTS = 64
TTL_S = 2.0
BUDGET_MS = 50.0
NODE_TIMEOUT_S = 60.0
AT_ONCE = 8
"""So many processes are started together."""


@dataclass(frozen=True)
class Takeover:
    """Spans in milliseconds."""

    kill_to_gone: float
    gone_to_leader: float
    gone_to_all: float

    @property
    def kill_to_all(self) -> float:
        return self.kill_to_gone + self.gone_to_all


def measure(options: Options) -> Iterator[Figure]:
    with etcd() as address, contextlib.closing(Flock(address)) as flock:
        takeovers = []
        print("  kill to key gone   gone to leader   gone to all   (ms)", flush=True)
        for _ in range(options.pairs):
            takeover = flock.kill_leader()
            takeovers.append(takeover)
            spans = (takeover.kill_to_gone, takeover.gone_to_leader, takeover.gone_to_all)
            print("  {:16.1f} {:16.1f} {:13.1f}".format(*spans), flush=True)
        print(f"  {'worst':>16} {'':16} {max(takeover.gone_to_all for takeover in takeovers):13.1f}")
    yield Figure(
        name=f"leader killed, {AGENTS} agents on etcd: from key gone to all following",
        ours="taken",
        theirs="budget",
        unit="ms",
        pairs=[Pair(takeover.gone_to_all, BUDGET_MS) for takeover in takeovers],
        target=Target(at_most=1.0),
    )
    yield Figure(
        name=f"leader killed, {AGENTS} agents on etcd: from the kill to all following",
        ours="taken",
        theirs="TTL + 1 s",
        unit="ms",
        pairs=[Pair(takeover.kill_to_all, 1000 * (TTL_S + 1)) for takeover in takeovers],
        target=Target(at_most=1.0),
    )


@dataclass
class Agent:
    name: str
    process: subprocess.Popen[bytes]
    heard: bytes = b""
    notices: list[tuple[str, int]] = field(default_factory=list)
    """What it said since the last kill, and when."""


class Flock:
    """All agents. Listens to them while it waits for something."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._selector = selectors.DefaultSelector()
        self._agents: dict[str, Agent] = {}
        self._born = 0
        for number in range(AGENTS):
            self._add()
            if number % AT_ONCE == 0:
                self._await_all()
        self._await_all()

    def kill_leader(self) -> Takeover:
        leader = self._leader()
        for agent in self._agents.values():
            agent.notices.clear()
        killed = time.monotonic_ns()
        self._remove(leader)
        self._await_all()
        notices = [entry for agent in self._agents.values() for entry in agent.notices]
        gone = min(when for what, when in notices if what == "vacant")
        led = max(when for what, when in notices if what == "lead")
        settled = max(when for what, when in notices if what != "vacant")
        self._add()
        self._await_all()
        return Takeover((gone - killed) / 1e6, (led - gone) / 1e6, (settled - gone) / 1e6)

    def close(self) -> None:
        for agent in list(self._agents.values()):
            self._remove(agent)
        self._selector.close()

    def _leader(self) -> Agent:
        (leader,) = [
            agent for agent in self._agents.values() if agent.notices and agent.notices[-1][0] == "lead"
        ]
        return leader

    def _add(self) -> None:
        self._born += 1
        name = f"agent-{self._born}"
        process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("side_agent.py")),
                *(self._address, name, str(TTL_S), str(AGENTS)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._agents[name] = Agent(name, process)
        assert process.stdout is not None
        self._selector.register(process.stdout, selectors.EVENT_READ, self._agents[name])

    def _remove(self, agent: Agent) -> None:
        agent.process.kill()
        agent.process.wait()
        assert agent.process.stdout is not None
        assert agent.process.stdin is not None
        self._selector.unregister(agent.process.stdout)
        agent.process.stdout.close()
        agent.process.stdin.close()
        del self._agents[agent.name]

    def _await_all(self) -> None:
        """Until one leads and all others follow it."""
        while not self._settled():
            ready = self._selector.select(NODE_TIMEOUT_S)
            if not ready:
                raise RuntimeError(f"no agent says anything for {NODE_TIMEOUT_S} s, and not all follow")
            for key, _ in ready:
                self._listen(key.data)

    def _listen(self, agent: Agent) -> None:
        assert agent.process.stdout is not None
        data = agent.process.stdout.raw.read(65536)  # type: ignore[attr-defined]
        if not data:
            raise RuntimeError(f"{agent.name} ended by itself")
        *lines, agent.heard = (agent.heard + data).split(b"\n")
        for line in lines:
            what, when = line.decode().rsplit(" ", 1)
            agent.notices.append((what, int(when)))

    def _settled(self) -> bool:
        last = {agent.name: agent.notices[-1][0] if agent.notices else "" for agent in self._agents.values()}
        leaders = [name for name, said in last.items() if said == "lead"]
        return len(leaders) == 1 and all(
            said == f"follow {leaders[0]}" for name, said in last.items() if name != leaders[0]
        )


@contextlib.contextmanager
def etcd() -> Iterator[str]:
    """A server for this benchmark alone, as the tests start theirs."""
    sys.path.append(str(ROOT))
    from tests.job.nodes.lease.etcd_server import BINARY, MISSING, EtcdServer

    if BINARY is None:
        raise SystemExit(MISSING)
    with tempfile.TemporaryDirectory() as directory:
        server = EtcdServer(Path(directory))
        server.start()
        try:
            yield server.address("jobs/benchmark")
        finally:
            server.stop()


if __name__ == "__main__":
    main(__doc__ or "", measure, pairs=20)
