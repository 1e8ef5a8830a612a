"""Documentation is run: complete scripts as jobs; other Python compiles, and its imports exist. Links, anchors and the
navigation lead somewhere; commands and messages are those of the code."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.core import TyperGroup
from typer.testing import CliRunner

from gyrostat.cli.main import build_app
from gyrostat.cli.verbs import load_verb
from tests.conftest import Launch

ROOT = Path(__file__).parents[2]
SITE: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
DOCS = sorted(ROOT.glob("docs/**/*.md"))
PAGES = sorted([*ROOT.glob("*.md"), *DOCS, *ROOT.glob("examples/*.md"), *ROOT.glob("benchmarks/*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for name, page in zip(NAMES, PAGES, strict=True)
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_in_the_docs(launch: Launch, block: str) -> None:
    if "gyrostat.servers(" in block and "import gyrostat" in block:
        subprocess.run([sys.executable, "-c", block], check=True, timeout=300)
        return
    if "gyrostat.init(" in block and "import gyrostat" in block:
        outcome = launch(block, virtual_workers=2, workers=2)
        assert outcome.steps > 0
        assert outcome.digest == launch(block, virtual_workers=2, reference=True).digest
        return
    for statement in ast.walk(ast.parse(textwrap.dedent(block))):
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("gyrostat"):
            module = importlib.import_module(str(statement.module))
            for name in statement.names:
                assert hasattr(module, name.name), f"{statement.module} has no {name.name}"


def test_examples_of_scheduling_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the simulator, the planner and a policy; the first reads a recording."""
    monkeypatch.chdir(tmp_path)
    Path("jobs.csv").write_text("submitted,duration,devices\n0,60,4\n10,30,8\n")
    options = ["simulate", "--cluster", "v100:2x8", "--no-private", "--record", "ticks.jsonl", "jobs.csv"]
    assert CliRunner().invoke(build_app(), options).exit_code == 0
    for name in ("howto/simulate.md", "howto/plan.md", "reference/elastic-policies.md"):
        for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), re.DOTALL):
            exec(compile(block, name, "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    """To a file, and to one of its headings where an anchor is given."""
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", _prose(page)):
        if "://" in target:
            continue
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in _anchors(linked), f"{page.name} links to {target}#{anchor}; {_anchors(linked)}"


def test_every_page_is_in_the_navigation() -> None:
    pages: dict[str, str] = SITE["extra"]["pages"]
    assert all((ROOT / source).exists() for source in pages.values())
    listed = sorted(_leaves(SITE["nav"]))
    assert listed == sorted([*(str(page.relative_to(ROOT / "docs")) for page in DOCS), *pages])


def test_the_readme_says_what_the_scripts_do() -> None:
    readme = (ROOT / "README.md").read_text()
    for script in ("scripts/demo", "scripts/test"):
        assert script in readme
        assert (ROOT / script).stat().st_mode & 0o111


def test_all_commands_are_listed() -> None:
    shown = CliRunner().invoke(build_app(), ["--help"], env={"COLUMNS": "160"}).stdout
    commands = set(re.findall(r"^│ ([a-z][a-z-]*) {2,}", shown, re.MULTILINE))
    assert {"run", "up", "verify"} <= commands
    page = (ROOT / "docs/reference/commands.md").read_text()
    rows = " ".join(re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE))
    assert commands <= set(re.findall(r"`([a-z-]+)`", rows))


def test_options_of_the_examples_exist() -> None:
    checked = 0
    for name, page in zip(NAMES, PAGES, strict=True):
        fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        blocks = "\n".join(block for language, block in fenced if language in ("", "console", "sh"))
        for line in re.findall(r"^(?:\w*\$ )?(?:[A-Z_]+=\S+ )*gyrostat ([a-z].*)", blocks, re.MULTILINE):
            verb, *words = re.split(r" +(?:#|&&)", line)[0].split()
            command = load_verb(verb)
            if isinstance(command, TyperGroup):
                command = command.commands[words.pop(0)]
            options = {option for parameter in command.params for option in parameter.opts}
            before_script = takewhile(lambda word: not word.endswith(".py"), words)
            for option in (word for word in before_script if re.match("--?[a-z]", word)):
                checked += 1
                assert option in options, f"{name}: {line}"
    assert checked > 50


def test_messages_of_the_troubleshooting_page_are_in_the_code() -> None:
    code = "\n".join(_strings())
    symptoms = re.findall(r"^\| (.*?) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [message for symptom in symptoms for message in re.findall(r"`([^`]+)`", symptom)]
    assert len(quoted) > 40
    for message in quoted:
        for part in (part.strip() for part in message.split("…")):
            assert part in code, f"no message has {part!r}"


def _prose(page: Path) -> str:
    """Without code."""
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _leaves(part)


def _strings() -> Iterator[str]:
    """All text in the code, f-strings with their values left out."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
