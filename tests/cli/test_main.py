"""What all verbs have in common."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gyrostat.cli import later
from gyrostat.cli.main import build_app
from gyrostat.cli.verbs import VERBS, load_verb
from tests.cli.gyrostat_process import gyrostat


def test_version_and_help() -> None:
    import gyrostat as package

    runner = CliRunner()
    assert runner.invoke(build_app(), ["--version"]).output == f"gyrostat {package.__version__}\n"
    result = runner.invoke(build_app(), ["--help"])
    assert result.exit_code == 0
    assert "gyrostat run --virtual-workers 4 --workers 2 train.py" in result.output
    for verb in ("run", "checkpoint"):
        assert verb in result.output
    assert "operator" not in result.output
    result = runner.invoke(build_app(), ["run", "--help"])
    for option in (
        "--virtual-workers",
        "--workers",
        "--placement",
        "--checkpoint-dir",
        "--report",
        "--log-dir",
    ):
        assert option in result.output


def test_every_verb_of_a_module_is_in_the_table() -> None:
    for name in VERBS:
        assert load_verb(name).name == name
    for module in {verb.module for verb in VERBS.values()}:
        app = typer.Typer()
        import_module(f"gyrostat.cli.{module}").register(app)
        commands = typer.main.get_group(app).commands
        assert {*commands} == {name for name, verb in VERBS.items() if verb.module == module}
    assert {name for name, verb in VERBS.items() if verb.hidden} == {*later.VERBS}


@pytest.mark.parametrize(
    ("old", "new", "verb"),
    [
        ("--silence", "--heartbeat-timeout", "run"),
        ("--patience", "--node-timeout", "run"),
        ("--patience", "--timeout", "down"),
    ],
)
def test_old_option_names_are_accepted_with_a_note(
    old: str, new: str, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = ["train.py", old, "3"] if verb == "run" else []  # what follows the script is the script's
    for spelling in ([old, "7"], [f"{old}=7"]):
        parameters = load_verb(verb).make_context(verb, [*spelling, *script]).params
        assert capsys.readouterr().err == f"gyrostat: {old} is now {new}\n"
        assert parameters[new.removeprefix("--").replace("-", "_")] == 7.0
        assert list(parameters.get("args", ())) == script[1:]
    assert old not in CliRunner().invoke(build_app(), [verb, "--help"], env={"COLUMNS": "200"}).output


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
            "gyrostat: error: --report no/r.json cannot be written: there is no directory no",
        ),
        (["fly"], "No such command 'fly'"),
    ],
)
def test_bad_input_is_refused_with_exit_code_2(args: list[str], message: str, tmp_path: Path) -> None:
    code, out, err = gyrostat(*args, cwd=tmp_path)
    assert (code, out) == (2, [])
    assert message in "\n".join(err)
