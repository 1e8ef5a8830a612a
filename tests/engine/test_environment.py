"""The environment variables of a worker, and how those of libraries are pinned."""

from __future__ import annotations

import os

import pytest

from gyrostat.engine.environment import WorkerEnvironment, pin_variables, worker_environment


@pytest.mark.parametrize(
    ("variables", "local_rank", "shared_memory"),
    [
        ({}, 0, True),
        ({"LOCAL_RANK": "3", "GYROSTAT_SHARED_MEMORY": "1"}, 3, True),
        ({"GYROSTAT_SHARED_MEMORY": "0"}, 0, False),
    ],
)
def test_variables_have_types_and_defaults(
    variables: dict[str, str], local_rank: int, shared_memory: bool
) -> None:
    environment = WorkerEnvironment(variables)
    assert (environment.local_rank, environment.shared_memory) == (local_rank, shared_memory)


def test_pinned_variables_replace_existing_ones_unless_these_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {"ATEN_CPU_CAPABILITY": "default"})
    pin_variables({"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2"}, keep_existing=True)
    assert worker_environment().variables == {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "AVX2"}
    pin_variables({"ATEN_CPU_CAPABILITY": "avx2"})
    assert worker_environment().variables == {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2"}
