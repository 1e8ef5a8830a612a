"""The environment variables of the command line. This module reads those that no other package reads.

GYROSTAT_TOKEN         the token of a cluster, or of a job on several nodes (here, and in `local.client`)
GYROSTAT_DATA          the directory with traces and tables for `gyrostat experiment` (here)
GYROSTAT_CLUSTER       the address of the cluster, HOST:PORT (`local.client`)
GYROSTAT_STATE_DIR     the state directory of the cluster on this machine (`local.home`)
GYROSTAT_RUNTIME_DIR   the directory with the control sockets of running jobs
GYROSTAT_LOG, GYROSTAT_LOG_FORMAT    level and format of log records (`core.logs`)
_GYROSTAT_COMPLETE     set by the shell during completion (typer)
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from gyrostat.core import secrets

TOKEN, DATA = "GYROSTAT_TOKEN", "GYROSTAT_DATA"


def token() -> str | None:
    return os.environ.get(TOKEN) or None


def variables() -> Mapping[str, str]:
    """All of them, for `submit --env NAME` and for the CPU type that `probe` reports."""
    return os.environ


def without_secrets() -> dict[str, str]:
    """For a daemon in the background: it serves tokens and needs none."""
    return secrets.without_secrets(os.environ)
