"""Options of a job on several nodes: what is refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.cli.nodes import job_address, read_token
from gyrostat.core.errors import UsageError
from gyrostat.job.nodes.service import own_host
from tests.cli.gyrostat_process import gyrostat


@pytest.mark.parametrize(
    ("store", "address"),
    [
        ("etcd://10.0.0.1:2379", "etcd://10.0.0.1:2379/gyrostat/mnist"),
        ("etcd://10.0.0.1:2379/", "etcd://10.0.0.1:2379/gyrostat/mnist"),
        ("etcd://a:1,b:2/team", "etcd://a:1,b:2/team/mnist"),
        ("etcds://u:p@a:1/team?ca=x.pem", "etcds://u:p@a:1/team/mnist?ca=x.pem"),
        ("file:///var/jobs", "file:///var/jobs/mnist"),
    ],
)
def test_every_job_has_a_place_of_its_own_in_the_store(store: str, address: str) -> None:
    assert job_address(store, "mnist") == address


def test_tokens_come_from_files_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GYROSTAT_TOKEN", raising=False)
    assert read_token(None) is None
    monkeypatch.setenv("GYROSTAT_TOKEN", "of the environment")
    assert read_token(None) == "of the environment"
    file = tmp_path / "token"
    with pytest.raises(UsageError, match="cannot be read"):
        read_token(file)
    file.write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        read_token(file)
    file.write_text("of the file\n")
    assert read_token(file) == "of the file"


def test_the_address_towards_the_store() -> None:
    assert own_host("127.0.0.1:2379") == "127.0.0.1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--store", "file:///tmp/x"], "--store needs --name JOB"),
        (["--store", "file:///tmp/x", "--name", "j", "--nodes", "0"], "--nodes must be 1 or more"),
        (
            ["--store", "file:///tmp/x", "--name", "j", "--trace", "t.json"],
            "--trace is for a job on one machine",
        ),
        (["--store", "file:///tmp/x", "--name", "j", "--node", "a/b"], "letters, digits"),
        (["--store", "file:///tmp/x", "--name", "j", "--listen", "h:x"], "--listen takes HOST or HOST:PORT"),
        (["--store", "ftp://x", "--name", "j"], "is not the address of a lease store"),
        (["--store", "etcd://127.0.0.1:1", "--name", "j", "--node-timeout", "1"], "cannot be used"),
    ],
    ids=["no name", "no nodes", "trace", "node", "listen", "scheme", "nobody there"],
)
def test_what_is_refused(tmp_path: Path, options: list[str], message: str) -> None:
    (tmp_path / "train.py").write_text("")
    code, _, err = gyrostat("run", *options, "train.py", cwd=tmp_path)
    assert code == 2
    assert message in " ".join(err)


def test_an_agent_that_can_be_reached_needs_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GYROSTAT_TOKEN", raising=False)
    monkeypatch.setenv("GYROSTAT_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "train.py").write_text("")
    store = ["--store", f"file://{tmp_path}/store", "--name", "j", "--listen", "0.0.0.0"]
    code, _, err = gyrostat("run", *store, "train.py", cwd=tmp_path)
    assert code == 2
    assert "needs a token: set GYROSTAT_TOKEN" in err[-1]
