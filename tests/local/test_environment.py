"""A job's environment is built from the daemon's: what training needs, and what the operator passes."""

from __future__ import annotations

import pytest

from gyrostat.core.errors import UsageError
from gyrostat.local.environment import job_environment

DAEMON = {
    "PATH": "/bin",
    "LC_ALL": "C.UTF-8",
    "CUDA_VISIBLE_DEVICES": "0",
    "OMP_NUM_THREADS": "2",
    "GYROSTAT_LOG": "INFO",
    "GYROSTAT_TOKEN": "gyr_secret",
    "GYROSTAT_ETCD_PASSWORD": "secret",
    "GYROSTAT_STATE_DIR": "/state",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "HF_TOKEN": "secret",
    "WANDB_MODE": "offline",
    "WANDB_DIR": "/w",
}
NEEDED = {name: DAEMON[name] for name in list(DAEMON)[:5]}


def test_what_training_needs_and_nothing_else() -> None:
    assert job_environment(DAEMON) == {"PYTHONHASHSEED": "0", **NEEDED}
    assert job_environment({"PYTHONHASHSEED": "7"}) == {"PYTHONHASHSEED": "7"}


def test_names_and_patterns_are_passed() -> None:
    passed = job_environment(DAEMON, ("WANDB_*", "HF_TOKEN", "UNSET"))
    assert passed.keys() - {"PYTHONHASHSEED", *NEEDED} == {"WANDB_MODE", "WANDB_DIR", "HF_TOKEN"}


def test_secrets_of_gyrostat_are_never_passed() -> None:
    everything = job_environment(DAEMON, ("*",))
    assert DAEMON.keys() - everything.keys() == {"GYROSTAT_TOKEN", "GYROSTAT_ETCD_PASSWORD"}
    for name in ("GYROSTAT_TOKEN", "", "A=B"):
        with pytest.raises(UsageError, match="never a secret of gyrostat"):
            job_environment(DAEMON, (name,))
