"""docs/reference/cells.md does what it says, from top to bottom."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples/clusters").mkdir(parents=True)
    shutil.copy(ROOT / "examples/clusters/cells.yaml", tmp_path / "examples/clusters")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/reference/cells.md").read_text()
    exec(
        compile(
            "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), "docs/reference/cells.md", "exec"
        ),
        {},
    )


def test_the_page_shows_the_example() -> None:
    shown, *_ = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/reference/cells.md").read_text(), re.DOTALL)
    assert (ROOT / "examples/clusters/cells.yaml").read_text().endswith(shown)
