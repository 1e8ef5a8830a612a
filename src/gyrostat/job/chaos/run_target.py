"""A job of `gyrostat run`: led by the process that starts it, or by one of several agents, all on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gyrostat.core.errors import GyrostatError, UsageError
from gyrostat.core.roles import ServerRecovery
from gyrostat.job.chaos.plan import OF_AGENTS, OF_ETCD, OF_SERVERS, OF_WORKERS, Fault, FaultKind, StoreKind
from gyrostat.job.chaos.processes import RunProcesses
from gyrostat.job.chaos.record import JobTotals
from gyrostat.job.chaos.target import Ended, ManagedProcess, RoundSettings
from gyrostat.job.control.client import JobClient
from gyrostat.job.control.requests import RequestResult
from gyrostat.job.nodes.leader_term import STORE_LOST
from gyrostat.job.processes.fork_server import STORE_NAME

_LEASE_S = 2.0
_NODE_TIMEOUT_S = 20.0
_POLL_S = 0.02
_BUSY_S = 5.0
"""A resize is repeated for this long while the job is busy."""
_READY_S = 60.0
_SILENT_S = 2.0
"""A worker or server of a job with servers that is stopped for longer is given up."""
_SERVER = "gyrostat.ps.server"


class EtcdProcess:
    """An etcd of the run's own on loopback: killed, stopped, and deprived of its data."""

    def __init__(self, directory: Path, processes: RunProcesses) -> None:
        binary = shutil.which("etcd")
        assert binary is not None  # `check_etcd`
        self._data, self._processes = directory / "etcd", processes
        self.lost_data = False
        self._port, peer_port = _free_ports(2)
        client, peer = self.url("http"), f"http://127.0.0.1:{peer_port}"
        command = [
            *(binary, "--name", "chaos", "--data-dir", str(self._data), "--logger", "zap"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"chaos={peer}"),
        ]
        self._process = ManagedProcess("etcd", command, directory / "etcd.log", processes.environment())
        deadline = time.monotonic() + _READY_S
        while not self._accepts():
            if self._process.ended or time.monotonic() > deadline:
                lines = "\n".join(self._process.last_lines())
                raise GyrostatError(f"etcd did not start; its last lines:\n{lines}")
            time.sleep(_POLL_S)

    def url(self, scheme: str) -> str:
        return f"{scheme}://127.0.0.1:{self._port}"

    def inject(self, fault: Fault) -> str | None:
        if fault.kind is FaultKind.ETCD_STOP:
            stopped = self._processes.stop(self._process.process.pid, fault.seconds)
            return f"etcd for {fault.seconds:.2f} s" if stopped else None
        if not self._process.kill(fault.seconds):
            return None
        if fault.kind is FaultKind.ETCD_DATA:
            self.lost_data = True
            shutil.rmtree(self._data, ignore_errors=True)
        return f"etcd for {fault.seconds:.2f} s"

    def supervise(self) -> None:
        self._process.supervise()

    def _accepts(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1.0):
            return True
        return False


def check_etcd() -> None:
    """Raise `UsageError` if there is no etcd to run."""
    if shutil.which("etcd") is None:
        raise UsageError(
            "--store etcd runs an etcd of its own, and there is no program `etcd`; install Debian's etcd-server"
        )


class RunTarget:
    """One job of `gyrostat run`."""

    def __init__(
        self,
        run: Sequence[str],
        settings: RoundSettings,
        *,
        agents: int = 0,
        store: StoreKind = StoreKind.FILE,
    ) -> None:
        """`run` is the command `gyrostat run`. `agents` 0: the process that starts the job leads it."""
        self._run, self._settings, self._agents, self._store = run, settings, agents, store
        self._job = f"chaos-{os.getpid()}-{settings.number}"
        self._nodes: list[ManagedProcess] = []
        self._etcd: EtcdProcess | None = None
        etcd = OF_ETCD if store is StoreKind.ETCD else ()
        self.kinds: Sequence[FaultKind] = (*OF_WORKERS, *OF_AGENTS, *etcd) if agents else OF_WORKERS
        self.records: Sequence[Path] = [settings.directory]
        self.timeouts_s = 2 * _LEASE_S + _NODE_TIMEOUT_S if agents else 0.0
        if settings.servers:
            self.kinds = (*OF_WORKERS, *OF_SERVERS, FaultKind.LEADER)
            self.timeouts_s = 2 * _SILENT_S

    def start(self, processes: RunProcesses) -> None:
        self._processes = processes
        directory = self._settings.directory
        if self._agents and self._store is StoreKind.ETCD:
            self._etcd = EtcdProcess(directory, processes)
        self._nodes = [
            ManagedProcess(
                f"node {node}", self._command(node), directory / f"node-{node}.log", processes.environment()
            )
            for node in range(max(1, self._agents))
        ]

    def supervise(self) -> list[Ended]:
        if self._etcd is not None:
            self._etcd.supervise()
        ends = []
        for node in self._nodes:
            for ended in node.supervise():
                if self._asks_to_start_again(ended):
                    node.start_again()
                else:
                    ends.append(replace(ended, totals=self._totals()) if self._settings.servers else ended)
        return ends

    def _asks_to_start_again(self, ended: Ended) -> bool:
        """Without the data of etcd nobody may lead: agents end with an error, and the same command continues the job."""
        lost_data = self._etcd is not None and self._etcd.lost_data
        return lost_data and ended.code == 1 and STORE_LOST in "".join(ended.last_lines[-1:])

    def _totals(self) -> JobTotals | None:
        """Of a job with servers: its report. None: it has not ended well."""
        with contextlib.suppress(OSError, ValueError):
            report = json.loads(self._report.read_text())
            if report["digest"] is not None:
                samples = report["samples"] if not report["first_step"] else None
                return JobTotals(updates=report["steps"], samples=samples, digest=report["digest"])
        return None

    @property
    def _report(self) -> Path:
        return self._settings.directory / "report.json"

    @property
    def over(self) -> bool:
        return all(node.reported for node in self._nodes)

    def fork_servers(self) -> list[int]:
        return self._processes.fork_servers()

    def inject(self, fault: Fault) -> str | None:
        if fault.kind in OF_SERVERS:
            return self._inject_into_servers(fault)
        if fault.kind in OF_ETCD:
            assert self._etcd is not None
            return self._etcd.inject(fault)
        if fault.kind is FaultKind.RENDEZVOUS:
            stores = [one.pid for one in self._processes.living() if one.name == STORE_NAME]
            killed = [pid for pid in fault.victims(stores, 1) if self._processes.signal(pid, signal.SIGKILL)]
            return f"process {killed[0]}" if killed else None
        node = self._leader() if fault.kind is not FaultKind.AGENT else None
        if node is None:  # there is no leader yet, or none at the moment
            running = [node for node in self._nodes if not node.killed and not node.ended]
            node = next(iter(fault.victims(running, 1)), None)
        if node is None or not node.kill(fault.seconds):
            return None
        return f"{node.name} for {fault.seconds:.2f} s"

    def _inject_into_servers(self, fault: Fault) -> str | None:
        if fault.kind is FaultKind.SERVER_RESIZE:
            least = 2 if self._settings.server_recovery is ServerRecovery.REPLICA else 1
            servers = max(least, fault.size(self._settings.most_servers))
            return self._scale(lambda job_client: job_client.scale_roles(servers=servers))
        servers_now = [one.pid for one in self._processes.living() if _SERVER in one.command]
        for pid in fault.victims(servers_now, 1):
            if fault.kind is FaultKind.SERVER_STOP:
                stopped = self._processes.stop(pid, fault.seconds)
                return f"process {pid} for {fault.seconds:.2f} s" if stopped else None
            return f"process {pid}" if self._processes.signal(pid, signal.SIGKILL) else None
        return None

    def resize(self, workers: int) -> str | None:
        return self._scale(lambda job_client: job_client.scale(workers))

    def _scale(self, scale: Callable[[JobClient], RequestResult]) -> str | None:
        until = time.monotonic() + _BUSY_S
        try:
            with JobClient(self._job) as job_client:
                result = scale(job_client)
                while not result.done and time.monotonic() < until:
                    time.sleep(_POLL_S)
                    result = scale(job_client)
        except GyrostatError:
            return None  # it is starting, or has ended meanwhile
        return result.text if result.done else None

    def close(self) -> None:
        """Nothing to ask: `gyrostat run` may be killed."""

    def _leader(self) -> ManagedProcess | None:
        try:
            with JobClient(self._job) as job_client:
                leader = job_client.status().pid
        except GyrostatError:
            return None
        return next((node for node in self._nodes if not node.killed and node.process.pid == leader), None)

    def _command(self, node: int) -> list[str]:
        settings = self._settings
        module, arguments = settings.recording_program(settings.directory)
        command = [
            *(*self._run, "--name", self._job, "--virtual-workers", str(settings.virtual_workers)),
            *("--workers", str(settings.workers), "--restarts", "1000000", "--poison-limit", "0"),
        ]
        if settings.checkpoints:
            command += ["--checkpoint-dir", str(settings.directory / "checkpoints")]
            command += ["--checkpoint-every", str(settings.checkpoint_every)]
        if settings.servers:
            command += ["--servers", str(settings.servers), "--server-recovery", settings.server_recovery]
            command += ["--heartbeat-timeout", str(_SILENT_S), "--report", str(self._report)]
        if settings.paced is not None:
            command += ["--paced", settings.paced]
        if self._agents:
            store = f"file://{settings.directory}/lease" if self._etcd is None else self._etcd.url("etcd")
            command += ["--store", store, "--nodes", str(self._agents), "--node", f"node{node}"]
            command += ["--lease", str(_LEASE_S), "--node-timeout", str(_NODE_TIMEOUT_S)]
        return [*command, "-m", module, *arguments]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_together:
        sockets = [open_together.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
