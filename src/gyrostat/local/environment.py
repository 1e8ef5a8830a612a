"""Environment variables of a cluster on this machine: all are read and set here.

daemon, clients      state_directory, cluster_address, cluster_token
host fork server     job_environment of variables, temporary_variables
host                 set_runtime_directory
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from gyrostat.core.errors import UsageError
from gyrostat.core.secrets import SECRETS

STATE, ADDRESS, TOKEN = "GYROSTAT_STATE_DIR", "GYROSTAT_CLUSTER", "GYROSTAT_TOKEN"
INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "TMP", "TEMP"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *(
        "PYTHON*",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "CONDA_DEFAULT_ENV",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "MALLOC_*",
    ),
    *("CUDA_*", "CUDNN_*", "CUBLAS_*", "NVIDIA_*", "NCCL_*", "GLOO_*", "TORCH*", "PYTORCH_*", "TRITON_*"),
    *(
        "OMP_*",
        "KMP_*",
        "GOMP_*",
        "MKL_*",
        "OPENBLAS_*",
        "BLIS_*",
        "NUMEXPR_*",
        "ONEDNN_*",
        "DNNL_*",
        "ATEN_*",
    ),
    *("GYROSTAT_LOG", "GYROSTAT_LOG_FORMAT", "GYROSTAT_SHARED_MEMORY"),
)
"""What a training process needs of the daemon's environment: names and patterns. A job inherits nothing else."""


def variables() -> Mapping[str, str]:
    """The daemon's own."""
    return os.environ


def state_directory() -> Path:
    """$GYROSTAT_STATE_DIR, or a directory of this user."""
    if given := os.environ.get(STATE):
        return Path(given).absolute()
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "gyrostat"


def cluster_address() -> str | None:
    return os.environ.get(ADDRESS) or None


def cluster_token() -> str | None:
    return os.environ.get(TOKEN) or None


def job_environment(environ: Mapping[str, str], passed: Sequence[str] = ()) -> dict[str, str]:
    """The environment of hosts and workers, built from the daemon's: what `INHERITED` or `passed` names, and the hash seed.

    `passed` are names or patterns of `gyrostat up --pass-env`. Secrets of gyrostat itself are never among them.
    """
    for name in passed:
        if name in SECRETS or not name.strip() or "=" in name:
            raise UsageError(
                f"--pass-env takes the name of a variable, or a pattern such as 'WANDB_*', and never a secret of gyrostat "
                f"itself; got {name!r}"
            )
    wanted = (*INHERITED, *passed)
    return {
        "PYTHONHASHSEED": "0",
        **{
            name: value
            for name, value in environ.items()
            if name not in SECRETS and any(fnmatchcase(name, pattern) for pattern in wanted)
        },
    }


@contextlib.contextmanager
def temporary_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set these during the block. Afterwards the environment is as before."""
    before = dict(os.environ)
    os.environ.update(values)
    yield
    os.environ.clear()
    os.environ.update(before)


def set_runtime_directory(path: str) -> None:
    """For the control socket of the job that this process hosts."""
    os.environ["GYROSTAT_RUNTIME_DIR"] = path
