"""Every example at small size as a job of real processes, and the plain DDP form of one against it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import socket
import textwrap
from pathlib import Path
from statistics import fmean

import pytest

from gyrostat.job.control.outcome import Outcome
from tests.conftest import Launch

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

needs_fashion_mnist = pytest.mark.skipif(
    not Path("/usr/share/datasets/fashion-mnist").is_dir(),
    reason="no Fashion-MNIST; install it with: apt-get install dataset-fashion-mnist",
)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("mlp", ["--epochs", "2"]),
        pytest.param("resnet", ["--epochs", "1", "--batch-size", "16"], marks=needs_fashion_mnist),
        ("gpt", ["--limit", "40"]),
        ("recommender", ["--epochs", "4", "--batch-size", "64"]),
    ],
)
def test_the_loss_of_an_example_falls(launch: Launch, name: str, args: list[str]) -> None:
    outcome = launch(EXAMPLES / f"{name}.py", virtual_workers=3, workers=2, args=["--small", *args])
    losses = [loss for loss in outcome.losses if loss is not None]
    quarter = len(losses) // 4
    assert len(losses) == outcome.steps >= 8
    assert fmean(losses[-quarter:]) < fmean(losses[:quarter])


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("transformers_text", ["--steps", "12"]),
        ("lightning_net", ["--epochs", "1"]),
        ("accelerate_text", ["--epochs", "1"]),
    ],
)
def test_the_loss_falls_in_the_loop_of_another_framework(launch: Launch, name: str, args: list[str]) -> None:
    outcome = launch(EXAMPLES / f"{name}.py", virtual_workers=4, workers=2, args=args)
    losses = [loss for loss in outcome.losses if loss is not None]
    quarter = len(losses) // 4
    assert len(losses) == outcome.steps >= 12
    assert fmean(losses[-quarter:]) < fmean(losses[:quarter])


@needs_fashion_mnist
def test_the_gan_comes_closer_to_real_images(launch: Launch) -> None:
    outcome = launch(EXAMPLES / "gan.py", virtual_workers=3, workers=2, args=["--small", "--epochs", "2"])
    distances = _logged(outcome, "frechet")
    assert len(distances) == 3, "one before training and one per epoch"
    assert distances[-1] < 0.95 * distances[0]


def test_the_limit_holds_in_every_epoch(launch: Launch) -> None:
    outcome = launch(EXAMPLES / "mlp.py", args=["--small", "--epochs", "3", "--limit", "2"])
    assert outcome.steps == 6


def unused_port() -> int:
    """One that nobody gets by asking for any: those are above 32768, and other tests ask for them all the time."""
    for port in range(20000 + os.getpid() % 10000, 32768):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError("no port is free")


def test_the_mlp_ends_with_the_bits_of_its_plain_ddp_form(launch: Launch, tmp_path: Path) -> None:
    args = ["--small", "--epochs", "2", "--limit", "5"]
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port())}
    # The DDP form knows nothing of jobs; its processes are only started as workers, instead of by torchrun.
    launch(
        EXAMPLES / "ddp" / "mlp_ddp.py",
        placement=[1, 1, 1],
        args=args,
        env=rendezvous,
        log_dir=tmp_path / "logs",
    )
    ddp = (tmp_path / "logs" / "worker-0.log").read_text()
    outcome = launch(EXAMPLES / "mlp.py", placement=[2, 1], args=args)
    assert re.findall(r"digest (\S+)", ddp) == [outcome.digest]
    assert re.findall(r"loss (\S+)", ddp) == [f"{loss:.6g}" for loss in _logged(outcome, "loss")]
    assert re.findall(r"accuracy (\S+)", ddp) == [f"{share:.6g}" for share in _logged(outcome, "accuracy")]


def test_missing_data_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("fashion_mnist", EXAMPLES / "fashion_mnist.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DIRECTORY", tmp_path)
    with pytest.raises(SystemExit, match="apt-get install dataset-fashion-mnist"):
        module.load("train", 10)


def test_from_ddp_quotes_the_examples_as_they_are() -> None:
    guide = (ROOT / "docs" / "howto" / "from-ddp.md").read_text()
    quotes = re.findall(r"^<!-- from (\S+) -->\n+```python\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    assert {path for path, _ in quotes} == {"examples/mlp.py", "examples/ddp/mlp_ddp.py"}
    for path, quote in quotes:
        body = (ROOT / path).read_text().partition("def main() -> None:\n")[2].partition("\nif __name__")[0]
        assert quote in textwrap.dedent(body), f"docs/howto/from-ddp.md quotes {path} as it is no longer"


def _logged(outcome: Outcome, metric: str) -> list[float]:
    """The values that the script logged under this name."""
    return [record.metrics[metric] for record in outcome.logs if metric in record.metrics]
