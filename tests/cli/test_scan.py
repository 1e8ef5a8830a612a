"""`gyrostat scan` as its users start it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from gyrostat.core.job import DeviceMix
from tests.cli.gyrostat_process import gyrostat
from tests.job.test_scan import SCRIPT


def test_the_answer_is_printed_and_written(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("rand(40,", "rand(80,"))
    options = ["--steps", "3", "--threshold", "1000", "--json", "answer.json"]
    code, out, err = gyrostat("scan", *options, "train.py", cwd=tmp_path)
    assert (code, err) == (0, [])
    assert out[0].startswith("train.py on a CPU of type ")
    assert [line.split()[0] for line in out if line.endswith("adds ")] == ["operator", "module"]
    assert out[-1].startswith("May the job mix types? Yes: pins for avx512, avx2 make a step ")
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert "convolution_backward" in [row["name"] for row in answer["operators"]]
    assert "model.0 (Conv2d)" in [row["name"] for row in answer["modules"]]
    mix = msgspec.convert(answer["mix"], DeviceMix)
    assert mix == DeviceMix(pool=("avx512", "avx2"), slowdown=answer["slowdown"], mixes_types=True)


def test_a_missing_script_is_refused(tmp_path: Path) -> None:
    code, out, err = gyrostat("scan", "nosuch.py", cwd=tmp_path)
    assert (code, out) == (2, [])
    assert err == ["gyrostat: error: there is no script 'nosuch.py'; for a module use -m"]
