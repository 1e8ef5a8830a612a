"""Jobs with parameter servers through the verbs and the API of a cluster that runs nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyrostat.cluster.api.server import serving
from gyrostat.cluster.records import JobState
from gyrostat.core.errors import UsageError, WrongState
from tests.cli.test_cluster_verbs import invoke
from tests.cluster.quiet_cluster import Quiet, quiet_cluster


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Quiet]:
    """A cluster that this process finds as its own. It has 8 server cores."""
    with quiet_cluster(tmp_path) as found, serving(found.service, "127.0.0.1:0") as server:
        monkeypatch.setenv("GYROSTAT_STATE_DIR", str(found.home.path))
        monkeypatch.setenv("GYROSTAT_RUNTIME_DIR", str(tmp_path / "run"))
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.chdir(found.workdir)
        found.home.announce(server.url)
        yield found


def submit(*options: str) -> None:
    invoke("submit", "--servers", "2", "--workers", "3", *options, "train.py")


def test_submit_states_both_roles(quiet: Quiet) -> None:
    submit("--server-cores", "2", "--server-memory", "1G", "--server-recovery", "replica")
    spec = quiet.service.job("train", None).spec
    assert (spec.servers, spec.min, spec.max) == (2, 1, 3)
    assert spec.server_role is not None
    assert (spec.server_role.needs.cores, spec.server_role.needs.memory) == (4, 2 << 30)
    page = invoke("status", "train")
    assert "2 with 4 cores and 2147483648 bytes of memory; when one dies: replica" in page
    assert "servers" in invoke("jobs").splitlines()[0].split()


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        (("workers=4", "servers=3"), (4, 4, 3)),
        (("servers=+1",), (1, 3, 3)),
        (("workers=+1", "servers=-1"), (3, 3, 1)),
    ],
)
def test_scale_by_role(quiet: Quiet, sizes: tuple[str, ...], wanted: tuple[int, int, int]) -> None:
    submit()
    quiet.registry.move("j1", JobState.STARTING, "its turn", devices=(0, 1))
    invoke("scale", "train", *sizes)
    spec = quiet.service.job("j1", None).spec
    assert (spec.min, spec.max, spec.servers) == wanted


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (("workers=0",), "to release all devices: gyrostat pause train"),
        (("servers=-2",), "would have 0 servers"),
        (("workers=2", "servers=x"), "sizes are workers=P and servers=P"),
    ],
)
def test_what_scale_refuses(quiet: Quiet, sizes: tuple[str, ...], message: str) -> None:
    submit()
    with pytest.raises(UsageError, match=message):
        invoke("scale", "train", *sizes)


def test_roles_are_for_jobs_with_servers(quiet: Quiet) -> None:
    invoke("submit", "-n", "4", "train.py")
    with pytest.raises(UsageError, match="it was submitted without --servers"):
        invoke("scale", "train", "servers=2")
    with pytest.raises(UsageError, match="it was submitted without --servers"):
        quiet.service.scale("train", None, servers=2)


def test_more_servers_than_are_free_are_refused_while_others_run(quiet: Quiet) -> None:
    submit("--name", "first")
    submit("--name", "second", "--server-cores", "3")
    for id_ in ("j1", "j2"):
        quiet.registry.move(id_, JobState.STARTING, "its turn", devices=(0,))
    with pytest.raises(WrongState, match="3 servers of job j1 need 3 cores, and default has 2 cores"):
        invoke("scale", "first", "servers=3")
    assert quiet.service.job("j1", None).spec.servers == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--workers", "2"), "--workers is for a job with servers"),
        (("--servers", "2", "--workers", "2", "--max", "3"), "two names of one number"),
        (("--servers", "1", "--server-recovery", "replica"), "needs at least 2 servers"),
        (("--servers", "2", "--reduction", "tree"), "reduction: tree is for a synchronous job"),
        (("--servers", "2", "--recovery", "checkpoint"), "recovery: checkpoint is for a synchronous job"),
        (("--server-cores", "2"), "are for a job with servers"),
        (("--servers", "2", "--min", "3", "--max", "2"), "1 <= min <= max"),
        (("--servers", "2000"), "1024"),
    ],
)
def test_what_submit_refuses(quiet: Quiet, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        invoke("submit", *options, "train.py")


def test_records_have_servers(quiet: Quiet) -> None:
    submit()
    quiet.registry.progress("j1", servers=2)
    assert json.loads(invoke("status", "train", "--json"))["job"]["servers"] == 2
