"""Options of `gyrostat run` with and without parameter servers: what has no meaning is refused by name, with exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyrostat.cli.main import build_app
from gyrostat.cli.scale import RoleSizes, parse_roles
from gyrostat.cli.server_options import REFUSED, choose_servers
from gyrostat.core.errors import UsageError
from gyrostat.core.roles import ServerRecovery, ServerRole

_VALUES = {
    "placement": "3,1",
    "reduction": "tree",
    "recovery": "checkpoint",
    "min_workers": "1",
    "paced": "100",
    "stragglers": "re-place",
    "straggler_factor": "2",
    "straggler_steps": "5",
    "straggler_pause": "1",
    "straggler_return": "1",
    "store": "file:///tmp/x",
    "nodes": "2",
    "node": "a",
    "listen": "127.0.0.1",
    "token_file": "t",
    "node_timeout": "5",
    "lease": "5",
    "trace": "t.json",
}


def refusal(*args: str) -> str:
    with pytest.raises(UsageError) as found:
        CliRunner().invoke(build_app(), ["run", *args, "train.py"], catch_exceptions=False)
    return str(found.value)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_options_without_meaning_are_refused_by_name(name: str) -> None:
    option = f"--{name.replace('_', '-')}"
    text = refusal("--servers", "2", option, _VALUES[name])
    assert text == f"{option} does not go together with --servers: {REFUSED[name]}"


@pytest.mark.parametrize(
    ("option", "value"),
    [("--server-cores", "2"), ("--server-recovery", "partial"), ("--server-adjust", "5"), ("--record", "f")],
)
def test_options_of_servers_need_servers(option: str, value: str) -> None:
    assert refusal(option, value) == f"{option} is for a job with parameter servers: --servers S"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--servers", "1", "--server-recovery", "replica"), "replica needs at least 2 servers"),
        (("--servers", "2000"), "a server job has 1 to 1024 servers, got 2000"),
        (("--servers", "1", "--workers", "0"), "a server job begins with 1 to 65536 workers, got 0"),
        (("--servers", "1", "--schedule", "5:2,5:3"), "the steps of --schedule must increase"),
        (("--servers", "1", "--schedule", "0:0"), "has 0 workers at update 0"),
        (("--servers", "1", "--schedule", "0:2", "--workers", "3"), "but --workers says 3"),
    ],
)
def test_bad_values_say_what_is_wrong(args: tuple[str, ...], text: str) -> None:
    assert text in refusal(*args)


def test_the_schedule_begins_with_its_workers() -> None:
    settings, entries = choose_servers(ServerRole(count=2), None, "0:3,100:1,200:0", None)
    assert (settings.workers, entries) == (3, ((100, 1), (200, 0)))
    settings, entries = choose_servers(ServerRole(count=2), None, None, Path("r"))
    assert (settings.workers, entries, settings.record) == (1, (), Path("r"))


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        (["workers=6", "servers=3"], RoleSizes(6, 3)),
        (["servers=3"], RoleSizes(None, 3)),
        (["workers=+2", "servers=-1"], RoleSizes(2, -1, relative=True)),
    ],
)
def test_sizes_by_role(sizes: list[str], wanted: RoleSizes) -> None:
    assert parse_roles(sizes) == wanted


@pytest.mark.parametrize(
    "sizes",
    [["workers=a"], ["devices=3"], ["workers=1", "workers=2"], ["workers=+1", "servers=2"], ["4", "5"]],
)
def test_bad_sizes_are_refused(sizes: list[str]) -> None:
    with pytest.raises(UsageError, match=r"workers=P and servers=P|both"):
        parse_roles(sizes)


def test_recovery_by_replica_needs_a_second_server() -> None:
    ServerRole(count=2, recovery=ServerRecovery.REPLICA)
    with pytest.raises(UsageError, match="at least 2 servers"):
        ServerRole(count=1, recovery=ServerRecovery.REPLICA)
