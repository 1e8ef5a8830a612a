"""A cluster that runs nothing: the real service, registry and store over a backend that only records requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gyrostat.cluster.api.server import ApiServer, serving
from gyrostat.cluster.api.tokens import Principal, new_token, write_tokens
from gyrostat.cluster.client import ClusterClient
from gyrostat.cluster.job_spec import JobSpec
from gyrostat.cluster.records import DeviceRecord, Waiting
from gyrostat.cluster.registry import Registry
from gyrostat.cluster.service import ClusterService
from gyrostat.core.errors import Unplaceable, WrongState
from gyrostat.core.roles import ServerCapacity
from gyrostat.job.control.profiling import SizeMeasured
from gyrostat.job.control.requests import RequestResult
from gyrostat.local.home import Home
from gyrostat.local.job_files import LocalJobFiles
from gyrostat.local.store import Store

ROWS = (SizeMeasured(workers=1, steps=20, step_seconds=0.5, throughput=64.0, busy=0.9),)


@dataclasses.dataclass
class QuietMachine:
    """Four slots on which nothing ever runs."""

    asked: list[tuple[object, ...]] = dataclasses.field(default_factory=list)
    vcs: Sequence[str] = ("default",)
    holders: dict[int, tuple[str, str]] = dataclasses.field(default_factory=dict)
    """By device: job and tenant."""
    reserved: int = 0
    why: str = "all 4 devices are busy"

    def virtual_clusters(self) -> Sequence[str]:
        return self.vcs

    def check_placeable(self, spec: JobSpec, vc: str) -> None:
        if spec.min > 4:
            raise Unplaceable(f"the job needs at least {spec.min} devices, and there are 4")

    def wake(self, id_: str) -> None:
        pass

    def devices(self) -> list[DeviceRecord]:
        return [
            DeviceRecord(
                id=number,
                name=f"cpu-0/{number}",
                type="cpu",
                node="cpu-0",
                cell="cpu-0",
                job=self.holders.get(number, (None, None))[0],
                tenant=self.holders.get(number, (None, None))[1],
                reserved=number < self.reserved,
            )
            for number in range(4)
        ]

    def capacity(self) -> Mapping[str, int]:
        return {"cpu": 4}

    def server_capacity(self, vc: str) -> ServerCapacity:
        return ServerCapacity(cores=8, memory=8 << 30)

    def waiting(self, id_: str) -> Waiting | None:
        return Waiting(job=id_, position=1, why=self.why, what_helps="one device less for others")

    def migrate(self, id_: str, workers: tuple[int, ...]) -> RequestResult:
        self.asked.append(("migrate", id_, workers))
        return RequestResult(True, "moved", 7, 2, 1.5, 20.0)

    def profile(
        self, id_: str, smallest: int | None, largest: int | None, steps: int
    ) -> tuple[SizeMeasured, ...]:
        self.asked.append(("profile", id_, smallest, largest, steps))
        if largest == 9:
            raise WrongState(f"job {id_} is queued; only a running one can be measured")
        return ROWS

    def reserve(self, wanted: Mapping[str, int], wait: float) -> bool:
        self.asked.append(("reserve", dict(wanted), wait))
        self.reserved = wanted.get("cpu", 0)
        return True

    def shut_down(self, checkpoint: bool) -> None:
        self.asked.append(("shut down", checkpoint))


@dataclasses.dataclass
class Quiet:
    """A cluster that runs nothing, and all its parts."""

    service: ClusterService
    machine: QuietMachine
    registry: Registry
    home: Home
    files: LocalJobFiles
    workdir: Path

    def spec(self, **fields: Any) -> JobSpec:
        return JobSpec(**{"script": "train.py", "workdir": str(self.workdir), "name": "train", **fields})


@contextmanager
def quiet_cluster(directory: Path) -> Iterator[Quiet]:
    home = Home(directory / "state")
    home.make()
    workdir = directory / "work"
    workdir.mkdir()
    (workdir / "train.py").write_text("print('hello')\n")
    store = Store(home.database)
    registry, machine, files = Registry(store), QuietMachine(), LocalJobFiles(home)
    yield Quiet(ClusterService(registry, machine, files), machine, registry, home, files, workdir)
    store.close()


@dataclasses.dataclass
class Guarded:
    """A cluster with tokens for alice, mallory and an operator."""

    server: ApiServer
    secrets: dict[str, str]
    tokens: Path
    root: Callable[[str], Path]

    def cluster(self, who: str) -> ClusterClient:
        return ClusterClient(self.server.url, self.secrets[who])

    def spec(self, who: str, **fields: Any) -> JobSpec:
        return JobSpec(**{"script": "train.py", "workdir": str(self.root(who)), **fields})


@contextmanager
def guarded_cluster(quiet: Quiet, directory: Path) -> Iterator[Guarded]:
    def root(tenant: str) -> Path:
        return directory / "tenants" / tenant

    secrets, tokens = {}, []
    for tenant in ("alice", "mallory", "operator"):
        root(tenant).mkdir(parents=True)
        (root(tenant) / "train.py").write_text("print('hello')\n")
        principal = (
            Principal(tenant=tenant, operator=True)
            if tenant == "operator"
            else Principal(tenant=tenant, root=str(root(tenant)), vcs=(tenant,))
        )
        secrets[tenant], token = new_token(principal)
        tokens.append(token)
    file = directory / "tokens.json"
    write_tokens(file, tuple(tokens))
    with serving(quiet.service, "127.0.0.1:0", file) as listening:
        yield Guarded(listening, secrets, file, root)
