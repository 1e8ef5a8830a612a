"""`gyrostat checkpoint`: what is shown, what is refused, and the way of states in and out."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner, Result

from gyrostat.cli import main as main_module
from gyrostat.cli.checkpoint import app
from gyrostat.core.errors import CheckpointError, UsageError
from gyrostat.core.job import CheckpointPolicy
from gyrostat.core.progress import Progress
from gyrostat.engine.checkpoint import CheckpointStore, JobSnapshot, load
from gyrostat.engine.state.digest import digest
from gyrostat.job.control import run_file
from tests.conftest import Launch


def make_model() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight  # tied
    return model


def make_states() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def ddp_state_dict(model: nn.Module) -> dict[str, Any]:
    """What `DistributedDataParallel(model).state_dict()` returns, but without its processes."""
    return nn.ModuleDict({"module": model}).state_dict()


def snapshot(step: int) -> JobSnapshot:
    model, optimizer = make_states()
    return JobSnapshot(
        job={"virtual_workers": 2, "seed": 7},
        fingerprint={"torch": "2.13.0", "threads": "1"},
        progress=Progress(step=step, epoch=4, done=3),
        shared={"tracked": {"model": model.state_dict(), "optimizer": optimizer.state_dict()}},
        contexts=[{"rng": torch.zeros(10, dtype=torch.uint8)}] * 2,
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two checkpoints, of steps 10 and 20."""
    store = CheckpointStore(tmp_path / "ckpt", now=lambda: 1_700_000_000.0)
    store.save(snapshot(10))
    store.save(snapshot(20))
    return tmp_path / "ckpt"


def gyrostat(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def printed(*arguments: str | Path) -> str:
    result = gyrostat(*arguments)
    assert result.exception is None, result.output
    return result.stdout


def error_of(*arguments: str | Path, kind: type[Exception] = UsageError) -> str:
    result = gyrostat(*arguments)
    assert type(result.exception) is kind, result.output
    return str(result.exception)


def damage(path: Path) -> None:
    with (path / "shared.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")


def test_show_a_directory(directory: Path) -> None:
    damage(directory / "step-00000010")
    lines = printed("show", directory).splitlines()
    assert lines[0].split() == [
        "step",
        "epoch",
        "virtual",
        "workers",
        "size",
        "written",
        "fingerprint",
        "state",
    ]
    assert lines[1].split()[:3] == ["20", "4", "2"]
    assert lines[1].split()[-1] == "valid"
    assert lines[2].split()[-1] == "damaged"
    assert "step-00000010 is damaged: shared.safetensors: its checksum is wrong" in " ".join(lines[3:])


def test_show_a_single_one(directory: Path) -> None:
    shown = printed("show", directory / "step-00000020")
    for expected in ("step 20 (epoch 4", "job.seed", "fingerprint.torch", "shared: 13 tensors"):
        assert expected in shown
    line = next(line for line in shown.splitlines() if line.startswith("tracked.model.0.weight"))
    assert line.split() == ["tracked.model.0.weight", "float32", "4×4", "64", "B"]


def test_show_what_is_not_there(tmp_path: Path) -> None:
    assert "there are no checkpoints in" in error_of("show", tmp_path)
    (tmp_path / "file").write_text("")
    assert "is not a directory" in error_of("verify", tmp_path / "file")


def test_verify(directory: Path) -> None:
    assert printed("verify", directory).count("is complete and undamaged") == 2
    damage(directory / "step-00000010")
    result = gyrostat("verify", directory)
    assert result.exit_code == 1
    assert "step-00000010 is damaged" in result.stdout
    assert gyrostat("verify", directory / "step-00000010").exit_code == 1
    assert gyrostat("verify", directory / "step-00000020").exit_code == 0


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_export_of_the_newest_whole_one(directory: Path, tmp_path: Path, suffix: str) -> None:
    damage(directory / "step-00000020")
    output = tmp_path / f"model{suffix}"
    assert "model of step 10" in printed("export", directory, output)
    read: Callable[[Path], Any] = load_file if suffix == ".safetensors" else torch.load
    model = make_model()
    model.load_state_dict(read(output))
    assert digest(model=model) == digest(model=snapshot(10).shared["tracked"]["model"])
    assert sorted(os.listdir(tmp_path)) == ["ckpt", output.name]


def test_export_of_what_cannot_be(directory: Path, tmp_path: Path) -> None:
    assert "nothing is tracked as 'net'" in error_of("export", directory, tmp_path / "x.pt", "--name", "net")
    assert "has no known ending" in error_of("export", directory, tmp_path / "x.bin")
    optimizer = tmp_path / "x.safetensors"
    assert "export to .pt" in error_of("export", directory, optimizer, "--name", "optimizer")
    for name in ("x.pt", "x.safetensors"):
        assert "there is no directory" in error_of("export", directory, tmp_path / "no" / name)
    assert sorted(os.listdir(tmp_path)) == ["ckpt"]
    assert "momentum" in str(torch.load(export_optimizer(directory, tmp_path))["param_groups"])


def export_optimizer(directory: Path, tmp_path: Path) -> Path:
    printed("export", directory / "step-00000020", tmp_path / "optimizer.pth", "--name", "optimizer")
    return tmp_path / "optimizer.pth"


def test_import_of_a_ddp_checkpoint_and_export_again(tmp_path: Path) -> None:
    model, optimizer = make_states()
    saved = {
        "model_state_dict": ddp_state_dict(model),
        "optimizer": optimizer.state_dict(),
        "epoch": 12,
    }
    torch.save(saved, tmp_path / "ddp.pt")
    result = gyrostat("import", tmp_path / "ddp.pt", tmp_path / "new", "--epoch", "13", "--step", "1300")
    assert result.exit_code == 0
    assert "model, optimizer; continues with epoch 13 at step 1300" in result.stdout
    assert "not imported: epoch" in result.stderr

    found = CheckpointStore(tmp_path / "new").find({"virtual_workers": 5}, {"torch": "any"}).usable()
    assert found is not None
    assert not found.contexts
    assert found.progress == Progress(step=1300, epoch=13, epochs_run=14)
    tracked = found.shared["tracked"]
    assert digest(**tracked) == digest(model=model, optimizer=optimizer)
    assert tracked["model"]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]

    printed("export", tmp_path / "new", tmp_path / "again.safetensors")
    assert digest(model=load_file(tmp_path / "again.safetensors")) == digest(model=model)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "ddp"])
def test_import_of_a_bare_state_dict(tmp_path: Path, wrapped: bool) -> None:
    model = make_model()
    state = ddp_state_dict(model) if wrapped else model.state_dict()
    torch.save(state, tmp_path / "model.pt")
    save_file({name: tensor.clone() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    for name in ("model.pt", "model.safetensors"):
        printed("import", tmp_path / name, tmp_path / f"{name}-new")
        path = tmp_path / f"{name}-new" / "step-00000000"
        assert digest(**load(path).shared["tracked"]) == digest(model=model)


def test_import_with_a_map(tmp_path: Path) -> None:
    model, optimizer = make_states()
    saved = {"nested": {"generator": ddp_state_dict(model)}, "opt": optimizer.state_dict()}
    torch.save(saved, tmp_path / "gan.pt")
    arguments = ("--map", "net=nested.generator", "--map", "sgd=opt", "--keep-prefix")
    printed("import", tmp_path / "gan.pt", tmp_path / "new", *arguments)
    tracked = load(tmp_path / "new" / "step-00000000").shared["tracked"]
    assert digest(**tracked) == digest(net=ddp_state_dict(model), sgd=optimizer)


GOES_ON = """
    import torch, gyrostat

    job = gyrostat.init(seed=7)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = job.dataloader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=2)
    job.track(model=model, optimizer=optimizer)
    for epoch in job.epochs(3):
        for step in job.steps(loader):
            for (x,) in step:
                step.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
"""


def test_a_job_goes_on_from_what_was_imported(launch: Launch, tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 1.25)
    torch.save(ddp_state_dict(model), tmp_path / "ddp.pt")
    printed("import", tmp_path / "ddp.pt", tmp_path / "new", "--epoch", "2", "--step", "40")
    policy = CheckpointPolicy(directory=str(tmp_path / "new"))
    outcome = launch(GOES_ON, virtual_workers=2, checkpoint=policy)
    assert outcome.first_step == 40
    assert outcome.steps == 42  # the last of three epochs
    last = load(tmp_path / "new" / "step-00000042")
    assert last.progress.epochs_run == 3
    assert len(last.contexts) == 2
    # One step of the gradient (2, 2), then one of the same with momentum.
    weight = last.shared["tracked"]["model"]["weight"]
    assert weight[0, 0].item() == pytest.approx(1.25 - 0.1 * 2 - 0.1 * (0.9 * 2 + 2))


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("pwned",))


def test_import_of_what_cannot_be(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file, new = tmp_path / "file.pt", tmp_path / "new"
    assert "cannot be read: No such file" in error_of("import", file, new)
    file.write_bytes(b"nonsense")
    assert "cannot be imported" in error_of("import", file, new)
    torch.save({"model": Malicious()}, file)
    error = error_of("import", file, new)
    assert "nothing but tensors and plain values" in error
    assert "weights_only" not in error
    assert not (tmp_path / "pwned").exists()
    torch.save([1, 2], file)
    assert "the file holds a list" in error_of("import", file, new)
    torch.save({}, file)
    assert "the file is empty" in error_of("import", file, new)
    torch.save({"weights": {"w": torch.zeros(1)}, "epoch": 3}, file)
    assert "--map model=weights" in error_of("import", file, new)
    assert "no entry 'model'; it has weights, epoch" in error_of("import", file, new, "--map", "model=model")
    assert "'epoch' is a int, not a state_dict" in error_of("import", file, new, "--map", "model=epoch")
    assert "--map takes NAME=ENTRY" in error_of("import", file, new, "--map", "weights")
    assert "give an empty directory" in error_of("import", file, directory, "--map", "model=weights")
    assert not new.exists()


@pytest.fixture
def running(directory: Path) -> Iterator[list[str]]:
    """This process runs a job in `directory`. What it does when asked for a checkpoint is in the list."""
    behaviour = ["save"]

    def asked(*_: object) -> None:
        match behaviour.pop(0):
            case "save":
                CheckpointStore(directory).save(snapshot(25))
            case "replace":
                CheckpointStore(directory).save(snapshot(20))
            case "end":
                (directory / run_file.NAME).unlink()

    before = signal.signal(signal.SIGUSR1, asked)
    with run_file.holding(directory, "train.py"):
        yield behaviour
    signal.signal(signal.SIGUSR1, before)


def test_save_asks_the_running_job(directory: Path, running: list[str]) -> None:
    assert printed("save", directory) == f"{directory / 'step-00000025'}\n"
    assert running == []


def test_save_of_a_step_that_was_saved_before(directory: Path, running: list[str]) -> None:
    running[:] = ["replace"]
    assert printed("save", directory) == f"{directory / 'step-00000020'}\n"


def test_a_save_that_fails(directory: Path, running: list[str]) -> None:
    running[:] = ["nothing", "end"]
    late = error_of("save", directory, "--timeout", "0", kind=CheckpointError)
    assert "no new checkpoint has appeared" in late
    ended = error_of("save", directory, kind=CheckpointError)
    assert "ended before it wrote a checkpoint" in ended


def test_save_does_not_kill_a_process_that_would_not_listen(directory: Path, running: list[str]) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    late = error_of("save", directory, "--timeout", "0", kind=CheckpointError)
    assert "no new checkpoint has appeared" in late


def test_save_without_a_job(directory: Path) -> None:
    assert "no job is running" in error_of("save", directory)
    (directory / run_file.NAME).write_text(json.dumps({"pid": os.getpid(), "program": "x"}))
    assert "no job is running" in error_of("save", directory)


def test_errors_end_as_a_message_and_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gyrostat", "checkpoint", "show", str(tmp_path)])
    with pytest.raises(SystemExit) as exited:
        main_module.main()
    assert exited.value.code == 2
    assert f"there are no checkpoints in {tmp_path}" in capsys.readouterr().err
