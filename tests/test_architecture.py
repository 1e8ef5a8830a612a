"""ARCHITECTURE.md names every module, and no file, module or class that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.source_tree import PACKAGE, classes

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()


def _section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_module_is_listed_once() -> None:
    listed = []
    for part in _section("Modules").split("\n### ")[1:]:
        package = part.splitlines()[0].replace("/", ".")
        listed += [f"{package}.{name}" for name in re.findall(r"^- `(\w+)`: \S", part, re.MULTILINE)]
    existing = [name for name, path in _modules().items() if path.name != "__init__.py" and "." in name]
    assert sorted(listed) == sorted(existing)


def test_files_that_the_journeys_name_exist() -> None:
    files = {str(path.relative_to(ROOT / "src" / "gyrostat")) for path in _modules().values()}
    prose = PAGE.split("\n## Modules\n")[0]
    named = set(re.findall(r"`([\w/]+\.py)`", prose))
    assert len(named) > 60
    for name in named:
        assert any(file == name or file.endswith(f"/{name}") for file in files) or (ROOT / name).exists(), (
            name
        )


def test_new_names_of_the_map_exist() -> None:
    moved, renamed = _section("Names that have changed").split("| class | is now |")
    known = _modules()
    for new in re.findall(r"\| `([\w., ]+)` \|$", moved, re.MULTILINE):
        first, *others = new.split(", ")
        package = first.rpartition(".")[0]
        for name in (first, *(f"{package}.{other}" for other in others)):
            assert name in known, name
    names = {definition.node.name for definition in classes()} | {"PolicyAction"}
    for new in re.findall(r"\| `([\w, ]+)` \|$", renamed, re.MULTILINE):
        assert set(new.split(", ")) <= names, new


def test_environment_variables_are_read_in_one_place_per_kind_of_process() -> None:
    reads = {name for name, path in _modules().items() if re.search(r"\bos\.(environ\b|getenv)", _code(path))}
    packages = ("cli", "local", "job", "engine", "integrations")
    assert reads == {f"{package}.environment" for package in packages} | {"core.logs"}


def _code(path: Path) -> str:
    """Without docstrings and other text."""
    return re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)


def _modules() -> dict[str, Path]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return {".".join(_parts(path)): path for path in paths}


def _parts(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts
