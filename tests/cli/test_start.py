"""What the command line imports before a verb's function is entered, for completion and for help. Nothing here is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gyrostat.cli.verbs import VERBS, load_verb

SIDE = Path(__file__).parents[2] / "benchmarks" / "side_verb.py"
HEAVY = {
    *("torch", "numpy", "scipy", "pyarrow", "safetensors", "yaml", "msgspec", "rich"),
    *("grpc", "starlette", "uvicorn", "prometheus_client", "asyncio", "http.client", "sqlite3", "ssl"),
}
OPTION_TYPES: dict[tuple[str, ...], set[str]] = {
    ("jobs",): {"msgspec"},
    ("logs",): {"msgspec"},
    ("reserve",): {"msgspec"},
    ("release",): {"msgspec"},
}
"""Verbs with an option whose type is defined beside the API's records."""
LEAVES = [
    (name, *filter(None, [sub])) for name in VERBS for sub in getattr(load_verb(name), "commands", {"": None})
]
_MAIN = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))
from gyrostat.cli.main import main; main()
"""


def python(*args: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )


@pytest.mark.parametrize("verb", LEAVES, ids=" ".join)
def test_a_verb_imports_its_dependencies_in_its_function(verb: tuple[str, ...]) -> None:
    modules = json.loads(python(SIDE, *verb).stdout)["modules"]
    assert HEAVY & {*modules} <= OPTION_TYPES.get(verb, set())
    own = {name for name in modules if name.startswith("gyrostat.")}
    assert not any(name.startswith(("gyrostat.engine.", "gyrostat.sched.", "gyrostat.sim.")) for name in own)


def complete(line: str) -> tuple[list[str], set[str]]:
    """The completions of a command line in bash, and the modules imported for them."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_GYROSTAT_COMPLETE": "complete_bash"}
    done = python("-c", _MAIN, **words)
    return done.stdout.split(), {*json.loads(done.stderr)}


def test_completion_of_verbs_imports_no_verb() -> None:
    found, modules = complete("gyrostat ")
    assert found == [name for name, verb in VERBS.items() if not verb.hidden]
    assert not HEAVY & modules
    assert not {f"gyrostat.cli.{verb.module}" for verb in VERBS.values()} & modules


def test_completion_of_options_imports_no_dependencies() -> None:
    found, modules = complete("gyrostat run --heart")
    assert found == ["--heartbeat-timeout"]
    assert not HEAVY & modules
    assert complete("gyrostat checkpoint ex")[0] == ["export"]


def test_help_lists_all_verbs_without_importing_them() -> None:
    done = python("-c", _MAIN, "--help", COLUMNS="120")
    modules = {*json.loads(done.stderr)}
    assert not (HEAVY - {"rich"}) & modules
    assert not {f"gyrostat.cli.{verb.module}" for verb in VERBS.values()} & modules
    position = -1
    for name, verb in VERBS.items():
        if not verb.hidden:
            found = done.stdout.index(f"│ {name} ")
            assert done.stdout.rindex("╭─ ", 0, found) == done.stdout.index(f"╭─ {verb.panel} ")
            assert found > position
            position = found
            assert verb.help in done.stdout
