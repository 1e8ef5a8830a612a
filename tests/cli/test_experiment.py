"""`gyrostat experiment`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyrostat.cli.main import build_app
from gyrostat.core.errors import UsageError
from gyrostat.sim.experiments.registry import EXPERIMENTS
from tests.sim.experiments.test_experiments import DATA, needs_data


def experiment(*options: str) -> str:
    result = CliRunner().invoke(build_app(), ["experiment", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_without_a_name_it_lists_them() -> None:
    output = experiment()
    assert [line.split()[0] for line in output.splitlines()] == list(EXPERIMENTS)


@needs_data
def test_it_runs_one_and_writes_a_page(tmp_path: Path) -> None:
    output = experiment("virtualflow-3-jobs", "--data", str(DATA), "--page", str(tmp_path / "page.md"))
    assert "JCT of the most urgent job" in output
    assert "## VirtualFlow: 3 jobs" in (tmp_path / "page.md").read_text()
    assert (tmp_path / "page" / "virtualflow-3-jobs.svg").exists()


def test_a_name_and_all_contradict_each_other() -> None:
    with pytest.raises(UsageError, match="either a name or --all"):
        experiment("gavel-mixed", "--all")
