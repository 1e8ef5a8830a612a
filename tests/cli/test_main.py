"""What all verbs have in common."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gyrostat.cli import later
from gyrostat.cli.main import _MODULES, build_app
from tests.cli.gyrostat_process import gyrostat


def test_the_command_line_needs_no_torch_to_start() -> None:
    program = (
        "import sys; from gyrostat.cli.main import build_app; build_app(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_version_and_help() -> None:
    import gyrostat as package
    from gyrostat.cli.main import app

    runner = CliRunner()
    assert runner.invoke(app, ["--version"]).output == f"gyrostat {package.__version__}\n"
    told = runner.invoke(app, ["--help"])
    assert told.exit_code == 0
    assert "gyrostat run --virtual-workers 4 --workers 2 train.py" in told.output
    for verb in ("run", "checkpoint"):
        assert verb in told.output
    assert "operator" not in told.output
    told = runner.invoke(app, ["run", "--help"])
    for option in (
        "--virtual-workers",
        "--workers",
        "--placement",
        "--checkpoint-dir",
        "--report",
        "--log-dir",
    ):
        assert option in told.output


def test_a_verb_is_found_without_the_others() -> None:
    whole = typer.main.get_group(build_app()).commands
    assert {*itertools.chain(*_MODULES.values()), *later.VERBS} == set(whole)
    for verbs in _MODULES.values():
        for verb in verbs:
            assert list(typer.main.get_group(build_app(verb)).commands) == list(verbs)


@pytest.mark.parametrize("verb", list(later.VERBS))
def test_verbs_of_later_versions_say_so(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gyrostat.cli import main

    monkeypatch.setattr(sys, "argv", ["gyrostat", verb, "--some", "option", "--help"])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"gyrostat: error: `gyrostat {verb}` (")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "--nope", "x.py"], "No such option: --nope"),
        (["run"], "Missing argument"),
        (["run", "--workers", "many", "x.py"], "Invalid value for '--workers'"),
        (["run", "--reduction", "odd", "x.py"], "Invalid value for '--reduction'"),
        (["run", "nosuch.py"], "gyrostat: error: there is no script 'nosuch.py'; for a module use -m"),
        (["run", "-n", "2", "-w", "3", "x.py"], "gyrostat: error: 3 workers cannot share 2 virtual workers"),
        (
            ["run", "--determinism", "heterogeneous", "x.py"],
            "gyrostat: error: --determinism heterogeneous needs the device types that the job may use",
        ),
        (
            ["run", "--report", "no/r.json", "x.py"],
            "gyrostat: error: the report cannot be written to no/r.json",
        ),
        (["fly"], "No such command 'fly'"),
    ],
)
def test_bad_input_is_refused_with_exit_code_2(args: list[str], message: str, tmp_path: Path) -> None:
    code, out, err = gyrostat(*args, cwd=tmp_path)
    assert (code, out) == (2, [])
    assert message in "\n".join(err)
