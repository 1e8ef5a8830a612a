"""The nodes of a job, as its leader sees them: which are connected, and which worker is where.

Implements `WorkerExecutor`. A node whose agent is away keeps its workers, which train on: messages to them wait until an agent
is back there, and after `node_timeout` seconds the workers count as lost. No I/O: a node is reached through the function with
which it connected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gyrostat.core.job import Assignment
from gyrostat.job.control.executor import LeaderRecord
from gyrostat.job.nodes.messages import Instruct, SignalWorker, StartWorker, TellWorker
from gyrostat.job.processes.protocol import Program, WorkerId

Send = Callable[[Instruct], None]


@dataclass
class NodeEntry:
    send: Send | None
    """None: the agent is away."""
    away_since: float = 0.0
    leaving: bool = False


class NodeRegistry:
    def __init__(
        self,
        program: Program,
        *,
        store: Callable[[int], str],
        keep: Callable[[Callable[[], LeaderRecord]], bool],
        node_timeout: float,
    ) -> None:
        """`store`: the rendezvous of an attempt; `keep`: keeps records; `node_timeout`: seconds for which an agent may be away
        before its workers count as lost."""
        self._program, self._store, self._keep, self._node_timeout = program, store, keep, node_timeout
        self.nodes: dict[str, NodeEntry] = {}
        self._where: dict[WorkerId, str] = {}
        self._missing: dict[WorkerId, float] = {}
        """Workers that no agent has reported yet, and since when."""
        self._awaited: set[str] | None = None
        """The nodes that may have them, and have not connected yet; None: any node may."""
        self._undelivered: dict[WorkerId, list[Instruct]] = {}

    # Nodes.

    def expect(self, worker_ids: Iterable[WorkerId], nodes: Sequence[str] | None, now: float) -> None:
        """Workers of a job that was taken over: an agent will report each. `nodes`: those that had been asked to start them,
        maybe by a leader that was killed while it asked; None: unknown."""
        self._missing.update({worker_id: now for worker_id in worker_ids if worker_id not in self._where})
        self._awaited = None if nodes is None else set(nodes) - self.nodes.keys()

    def may_have_workers(self) -> list[str]:
        """The nodes on which the job's workers may be: what the next leader has to know."""
        return sorted(self.nodes.keys() | (self._awaited or set()))

    def came(self, name: str, send: Send, living: Iterable[WorkerId], now: float) -> list[WorkerId]:
        """An agent connects, with its running workers. Returns the workers that it had before and has no longer."""
        before = {worker_id for worker_id, node in self._where.items() if node == name}
        living = set(living)
        leaving = name in self.nodes and self.nodes[name].leaving
        self.nodes[name] = NodeEntry(send, leaving=leaving)
        if self._awaited is not None:
            self._awaited.discard(name)
        for worker_id in living:
            self._where[worker_id] = name
            self._missing.pop(worker_id, None)
        for worker_id in living:
            for instruct in self._undelivered.pop(worker_id, []):
                send(instruct)
        return sorted(before - living, key=lambda worker_id: (worker_id.attempt, worker_id.member))

    def went(self, name: str, send: Send, now: float) -> None:
        """The agent is away. Nothing happens if it has connected again meanwhile."""
        node = self.nodes.get(name)
        if node is not None and node.send == send:
            node.send, node.away_since = None, now
            if name not in self._where.values():
                del self.nodes[name]

    def gone(self, worker_id: WorkerId) -> None:
        """A worker has exited."""
        self._missing.pop(worker_id, None)
        self._undelivered.pop(worker_id, None)
        name = self._where.pop(worker_id, None)
        if name is not None and self.nodes[name].send is None and name not in self._where.values():
            del self.nodes[name]

    def present(self) -> list[str]:
        return [name for name, node in self.nodes.items() if node.send is not None]

    def workers_of(self, name: str) -> list[WorkerId]:
        return [worker_id for worker_id, node in self._where.items() if node == name]

    def out_of_reach(self) -> list[WorkerId]:
        """Workers whose agent is away."""
        return [
            *(worker_id for worker_id, name in self._where.items() if self.nodes[name].send is None),
            *self._missing,
        ]

    def overdue(self, now: float) -> list[tuple[WorkerId, str]]:
        """Workers that count as lost now, with the reason."""
        lost = [
            (worker_id, f"the agent of {name} has been away for {self._node_timeout:g} s")
            for worker_id, name in self._where.items()
            if self.nodes[name].send is None and now >= self.nodes[name].away_since + self._node_timeout
        ]
        if self._awaited is not None and not self._awaited:
            return lost + [(worker_id, "no agent has started it") for worker_id in self._missing]
        return lost + [
            (worker_id, f"no agent has shown it for {self._node_timeout:g} s")
            for worker_id, since in self._missing.items()
            if now >= since + self._node_timeout
        ]

    def deadline(self) -> float | None:
        """When the next worker counts as lost."""
        away = [self.nodes[name].away_since for name in self._where.values() if self.nodes[name].send is None]
        soonest = min([*away, *self._missing.values()], default=None)
        return None if soonest is None else soonest + self._node_timeout

    # WorkerExecutor.

    def start(self, worker_id: WorkerId, assignment: Assignment) -> None:
        workers = 0 if assignment.joins else assignment.placement.workers
        stays = [name for name in self.present() if not self.nodes[name].leaving]
        name = place(worker_id, workers, sorted(stays or self.present()), self._where)
        self._where[worker_id] = name
        self._send(worker_id, StartWorker(worker_id, assignment, self._program))

    def tell(self, worker_id: WorkerId, message: msgspec.Struct) -> None:
        self._send(worker_id, TellWorker(worker_id, message))  # type: ignore[arg-type]

    def signal(self, worker_id: WorkerId, number: int) -> None:
        self._send(worker_id, SignalWorker(worker_id, number))

    def reaches(self, worker_id: WorkerId) -> bool:
        return worker_id in self._where and self.nodes[self._where[worker_id]].send is not None

    def _send(self, worker_id: WorkerId, instruct: Instruct) -> None:
        name = self._where.get(worker_id)
        send = self.nodes[name].send if name is not None else None
        if send is not None:
            send(instruct)
        elif name is not None or worker_id in self._missing:
            self._undelivered.setdefault(worker_id, []).append(instruct)

    def store(self, attempt: int, generation: int) -> str:
        return self._store(attempt)

    def traces(self, attempt: int) -> Path | None:
        return None

    def keep(self, record: Callable[[], LeaderRecord]) -> bool:
        return self._keep(record)


def place(worker_id: WorkerId, workers: int, nodes: Sequence[str], where: Mapping[WorkerId, str]) -> str:
    """The node of a new worker. The first `workers` of a job are placed in order, because neighbours communicate most; a worker
    that joins goes to the node with the fewest."""
    if workers:
        return nodes[worker_id.member * len(nodes) // workers]
    load = Counter(node for other, node in where.items() if other.attempt == worker_id.attempt)
    return min(nodes, key=lambda node: (load[node], node))
