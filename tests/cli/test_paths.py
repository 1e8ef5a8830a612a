"""A place that cannot be written is refused with one line before anything is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.cli.main import build_app
from gyrostat.core.errors import UsageError


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("run --checkpoint-dir afile x.py", "--checkpoint-dir afile cannot be used as a directory: File exists"),
        ("run --checkpoint-dir afile/x x.py", "--checkpoint-dir afile/x cannot be used as a directory: Not a directory"),
        ("run --checkpoint-dir /proc/x x.py", "--checkpoint-dir /proc/x cannot be used as a directory: No such file"),
        ("run --log-dir afile x.py", "--log-dir afile cannot be used as a directory: File exists"),
        ("run --store file:///tmp/s --name n --log-dir /proc/x x.py", "--log-dir /proc/x cannot be used as a directory"),
        ("run --trace /proc/x x.py", "--trace /proc/x cannot be written: No such file"),
        ("run --trace nodir/x.json x.py", "--trace nodir/x.json cannot be written: there is no directory nodir"),
        ("run --report . x.py", "--report . cannot be written: that is a directory"),
        ("chaos --keep afile x.py", "--keep afile cannot be used as a directory: File exists"),
        ("chaos --json /proc/x x.py", "--json /proc/x cannot be written"),
        ("verify -n 2 --report /proc/x x.py", "--report /proc/x cannot be written"),
        ("profile-device --profile afile/x x.py", "--profile afile/x cannot be written: there is no directory afile"),
        ("simulate --cluster v100:1x1 --report afile jobs.csv", "--report afile cannot be used as a directory"),
        ("simulate --cluster v100:1x1 --record /proc/x jobs.csv", "--record /proc/x cannot be written"),
        ("experiment virtualflow-3-jobs --page /proc/x", "--page /proc/x cannot be written"),
        ("replay --save /proc/x", "--save /proc/x cannot be written"),
        ("checkpoint export ckpt afile/x.pt", "the file afile/x.pt cannot be written"),
        ("checkpoint import model.pt /proc/x", "the directory /proc/x cannot be used as a directory"),
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_written_is_refused(
    args: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "afile").write_text("")
    (tmp_path / "x.py").write_text("raise SystemExit('it ran')")
    (tmp_path / "jobs.csv").write_text("submitted,duration,devices\n0,10,1\n")
    if "import" in args:
        import torch

        torch.save({"model": {"weight": torch.zeros(1)}}, tmp_path / "model.pt")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError) as refused:
        build_app()(args.split(), standalone_mode=False)
    assert str(refused.value).startswith(message)
    assert sorted(tmp_path.iterdir()) == before
