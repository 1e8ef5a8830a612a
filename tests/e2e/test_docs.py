"""Documentation is run: complete scripts as jobs, fragments at least compile, links lead somewhere."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from tests.conftest import Launch

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/*.md"),
        *ROOT.glob("benchmarks/*.md"),
    ]
)
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_in_the_docs(launch: Launch, block: str) -> None:
    if "gyrostat.init(" in block and "import gyrostat" in block:
        outcome = launch(block, virtual_workers=2, workers=2)
        assert outcome.steps > 0
        assert outcome.digest == launch(block, virtual_workers=2, reference=True).digest
    else:
        compile(textwrap.dedent(block), "block", "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_says_what_the_scripts_do() -> None:
    readme = (ROOT / "README.md").read_text()
    for script in ("scripts/demo", "scripts/test"):
        assert script in readme
        assert (ROOT / script).stat().st_mode & 0o111
