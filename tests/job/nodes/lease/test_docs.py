"""The example of docs/explanation/leases.md does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[4] / "docs" / "explanation" / "leases.md"


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(block, str(PAGE), "exec"), {})
    assert capsys.readouterr().out == (
        "the lease with token 1 is over (10.0.0.2:4100 leads now, with token 2); nothing was written. Stop leading\n"
    )
