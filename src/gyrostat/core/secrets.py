"""Environment variables that are secrets of gyrostat itself. No worker gets them: a script is code of a user."""

from __future__ import annotations

from collections.abc import Mapping

SECRETS = ("GYROSTAT_TOKEN", "GYROSTAT_ETCD_PASSWORD")


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in SECRETS}
