"""Checkpoints of a run in one process; tables and modules as plain safetensors files, and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from typer.testing import CliRunner

from gyrostat.cli.checkpoint import app
from gyrostat.core.errors import ForeignCheckpoint, UsageError
from gyrostat.ps.checkpoint.plain_tables import describes_servers, export_tables, import_tables
from tests.ps.script_jobs import IDS, train


@pytest.mark.parametrize(("staleness", "ranks"), [(None, 1), (0, 3), (1, 2)])
def test_a_killed_run_goes_on_with_the_same_bits(tmp_path: Path, staleness: int | None, ranks: int) -> None:
    """One process has one order, so that the digest is that of a run that was not killed."""
    whole = train(staleness, ranks)
    killed = train(staleness, ranks, checkpoint_dir=tmp_path, stop_after=13)
    assert not killed.digest
    resumed = train(staleness, ranks, checkpoint_dir=tmp_path)
    # Batches since the last checkpoint are trained again.
    assert len(resumed.seen) < len(whole.seen)
    assert set(killed.seen) | set(resumed.seen) == set(whole.seen)
    assert resumed.digest == whole.digest


def test_checkpoints_of_another_job_are_refused(tmp_path: Path) -> None:
    train(None, epochs=1, checkpoint_dir=tmp_path)
    with pytest.raises(ForeignCheckpoint, match="is of another job"):
        train(0, epochs=1, checkpoint_dir=tmp_path)


def test_tables_and_modules_are_plain_and_come_back(tmp_path: Path) -> None:
    saved, file, again = tmp_path / "saved", tmp_path / "plain.safetensors", tmp_path / "again"
    train(None, epochs=1, checkpoint_dir=saved)
    run = CliRunner().invoke(app, ["export", str(saved), str(file)])
    assert run.exit_code == 0, run.output
    plain = safetensors.numpy.load_file(file)
    assert plain.keys() == {
        "items.ids",
        "items.rows",
        "model.0.weight",
        "model.0.bias",
        "model.3.weight",
        "model.3.bias",
    }
    assert plain["items.ids"].tolist() == list(range(IDS))
    assert plain["items.rows"].shape == (IDS, 4)
    assert plain["model.0.weight"].shape == (8, 12)
    assert describes_servers(file)
    run = CliRunner().invoke(app, ["import", str(file), str(again)])
    assert run.exit_code == 0, run.output
    _, back = export_tables(again, tmp_path / "back.safetensors")
    assert all(np.array_equal(back[name], plain[name]) for name in plain)
    # A run that begins there trains from its values, from the first epoch on.
    resumed = train(None, epochs=1, checkpoint_dir=again)
    assert len(resumed.seen) == 10
    assert torch.tensor(resumed.losses).mean() < torch.tensor(train(None, epochs=1).losses).mean()


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    train(None, epochs=1, checkpoint_dir=tmp_path / "saved")
    file = tmp_path / "plain.safetensors"
    _, plain = export_tables(tmp_path / "saved", file)
    with safetensors.safe_open(file, framework="np") as opened:
        metadata = opened.metadata()
    changed = tmp_path / "changed.safetensors"
    for name, array, message in (
        ("items.rows", plain["items.rows"][:, :3].copy(), "needs one row of 4"),
        ("items.ids", np.zeros(IDS, np.int64), "needs one row"),
        ("model.0.bias", plain["model.0.bias"].astype(np.float64), "is float64, not float32"),
        ("model.0.bias", plain["model.0.bias"][:5].copy(), r"has shape \(5,\)"),
    ):
        safetensors.numpy.save_file({**plain, name: array}, changed, metadata)
        with pytest.raises(UsageError, match=message):
            import_tables(changed, tmp_path)
    safetensors.numpy.save_file(plain, changed)
    with pytest.raises(UsageError, match="does not describe a job with servers"):
        import_tables(changed, tmp_path)
