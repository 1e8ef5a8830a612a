"""The reference of every integration: the framework's own DDP on N real processes, in which gyrostat is not imported."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
THREADS = {
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


def run_ddp(script: Path, processes: int, args: Sequence[str], directory: Path) -> dict[str, Any]:
    """Run the script as torchrun would, once per directory and arguments; returns what its rank 0 wrote."""
    name = hashlib.sha256(json.dumps([str(script), processes, *args]).encode()).hexdigest()[:16]
    result = directory / f"{name}.json"
    if not result.exists():
        command = [
            sys.executable,
            str(script),
            *args,
            "--out",
            str(directory / name),
            "--result",
            str(result),
        ]
        workers = [
            subprocess.Popen(
                command,
                env=_environment(rank, processes, _port()),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for rank in range(processes)
        ]
        output = [worker.communicate()[0].decode() for worker in workers]
        assert all(worker.returncode == 0 for worker in workers), "\n".join(output)
    found: dict[str, Any] = json.loads(result.read_text())
    assert not found["gyrostat"], "the reference imported gyrostat"
    return found


def _port() -> str:
    return str(_Port.number)


class _Port:
    """One for all runs: they follow one another."""

    with socket.socket() as _probe:
        _probe.bind(("127.0.0.1", 0))
        number = _probe.getsockname()[1]


def _environment(rank: int, processes: int, port: str) -> Mapping[str, str]:
    return {
        **os.environ,
        **THREADS,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
