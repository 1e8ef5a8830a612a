"""The examples of parameter servers, with real servers and workers: they learn what a known model says."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
GYROSTAT = Path(sys.executable).with_name("gyrostat")


@pytest.mark.parametrize("name", ["wide_and_deep", "deepfm", "xdeepfm"])
def test_an_example_ranks_clicks(name: str) -> None:
    command = [
        GYROSTAT,
        "run",
        "--servers",
        "1",
        "--workers",
        "2",
        EXAMPLES / f"{name}.py",
        "--small",
        "--epochs",
        "2",
    ]
    run = subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    scores = [float(each) for each in re.findall(r"auc (\S+)", run.stdout + run.stderr)]
    best = float(re.findall(r"best_possible (\S+)", run.stdout + run.stderr)[0])
    assert len(scores) == 2
    assert 0.64 < scores[-1] < best < 0.9


@pytest.fixture
def click_logs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("click_logs")


def test_the_expected_auc_is_the_mean_over_drawn_labels(click_logs: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    probabilities = torch.rand(40, generator=generator)
    scores = (torch.rand(40, generator=generator) * 5).round()  # with ties
    total = 0.0
    weight = 0.0
    for one in range(40):
        for other in range(40):
            if one != other:
                share = float(probabilities[one] * (1 - probabilities[other]))
                weight += share
                total += share * (
                    float(scores[one] > scores[other]) + 0.5 * float(scores[one] == scores[other])
                )
    assert click_logs.expected_auc(scores, probabilities) == pytest.approx(total / weight, abs=1e-6)
    assert click_logs.expected_auc(torch.zeros(40), probabilities) == pytest.approx(0.5)
