"""`gyrostat probe` as its users start it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.gyrostat_process import gyrostat


def test_a_machine_agrees_with_itself_until_an_operator_differs(tmp_path: Path) -> None:
    code, out, err = gyrostat("probe", "--pool", "avx2,sse", "--json", "here.json", cwd=tmp_path)
    assert (code, err) == (0, [])
    assert "pinned for avx2, sse, ATen computes with DEFAULT" in out[0]
    written = json.loads((tmp_path / "here.json").read_text())
    assert written["all"] in "\n".join(out)
    assert [line.split()[0] for line in out[2:-1]] == list(written["families"])

    written["operators"]["matmul/linear f32"] = "another"
    (tmp_path / "there.json").write_text(json.dumps(written))
    code, out, err = gyrostat("probe", "--pool", "avx2,sse", "--compare", "there.json", cwd=tmp_path)
    assert (code, err) == (1, [])
    assert [line for line in out if line.startswith("differs")] == ["differs: matmul/linear f32"]
    assert out[-1].startswith("The two do NOT agree: 1 of ")


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    code, _, err = gyrostat("probe", "--compare", "other.json", cwd=tmp_path)
    assert code == 2
    assert "other.json was not written by `gyrostat probe --json`" in "\n".join(err)
