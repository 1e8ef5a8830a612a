"""From `up` to `down`: a real cluster in a process of its own, asked by the verbs alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gyrostat.cli.main import build_app
from tests.cli.gyrostat_process import finish, running
from tests.conftest import Launch
from tests.local.clusters import SCRIPT, write_script


def invoke(*args: str) -> str:
    result = CliRunner().invoke(build_app(args[0]), args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def told(*args: str) -> Any:
    return json.loads(invoke(*args))


def test_a_day_in_the_life_of_a_cluster(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write_script(tmp_path, SCRIPT)
    monkeypatch.setenv("GYROSTAT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("GYROSTAT_CLUSTER", raising=False)
    monkeypatch.chdir(tmp_path)
    with running("up", "--devices", "cpu:2", "--listen", "127.0.0.1:0", cwd=tmp_path) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline().startswith("gyrostat: a cluster of 2 cpu at http://127.0.0.1:")

        said = invoke("submit", "--follow", "-n", "4", "--reduction", "ddp", "train.py", "30", "0")
        assert "the end, after step 30\n" in said

        fixed = launch(script, virtual_workers=4, workers=1, args=("30", "0")).digest
        job = told("status", "train", "--json")["job"]
        assert (job["state"], job["step"], job["digest"]) == ("finished", 30, fixed)
        metrics = [json.loads(line) for line in invoke("logs", "--source", "metrics", "train").splitlines()]
        assert [line["step"] for line in metrics] == list(range(30))
        assert len(list((tmp_path / "state/jobs/j1/logs/tensorboard").glob("events.out.tfevents.*"))) == 1

        kinds = [line.split()[3] for line in invoke("events", "--job", "train").splitlines()]
        assert kinds[:2] == ["submitted", "started"]
        assert kinds[-1] == "finished"
        assert told("replay", "--json")["difference"] is None
        assert "0 jobs run, 0 wait, 1 finished" in invoke("top")

        invoke("down")
        assert finish(daemon)[0] == 0
    assert invoke("status") == ""
