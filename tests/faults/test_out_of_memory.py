"""A worker takes more memory than there is, in a control group of the test's own, and the kernel kills it: the job ends, and
its report says why. Skipped where no such group can be made."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = """
import torch

import gyrostat

job = gyrostat.init(seed=4)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = job.dataloader([torch.tensor([float(i)]) for i in range(24)], batch_size=2, shuffle=True)
job.track(model=model, optimizer=optimizer)
for step in job.steps(loader):
    for x in step:
        if 13.0 in x:
            print("sample 13 is a large one", flush=True)
            hoard = [torch.ones(1 << 26) for _ in range(64)]  # 16 GiB
        step.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""
ROOM = 3 << 29
"""Bytes: enough for all processes of the job, not for the hoard."""
_ENTERS = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group below that of this process, with little memory."""
    made = _own_group() / f"gyrostat-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        limits = [made / name for name in ("memory.limit_in_bytes", "memory.max") if (made / name).exists()]
        if not limits:
            pytest.skip(f"{made} does not limit memory")
        limits[0].write_text(str(ROOM))
        for swap in (made / "memory.memsw.limit_in_bytes", made / "memory.swap.max"):
            with contextlib.suppress(OSError):  # where there is no swap there is no such file
                swap.write_text(str(ROOM) if "memsw" in swap.name else "0")
        yield made
    finally:
        _remove(made)


def _own_group() -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
    return Path("/sys/fs/cgroup") / path.lstrip("/")


def _remove(group: Path) -> None:
    """Its processes have ended, but the kernel may not have buried all of them yet."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            assert time.monotonic() < deadline, f"left in {group}: {(group / 'cgroup.procs').read_text()}"
            os.sched_yield()


def test_the_kernel_kills_a_worker_for_its_memory(group: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    gyrostat = [sys.executable, "-c", "from gyrostat.cli.main import main; main()"]
    run = ["run", "-n", "4", "-w", "2", "--report", "report.json", "--restarts", "9", "--checkpoint-dir", "c"]
    ended = subprocess.run(
        ["sh", "-c", _ENTERS, str(group), *gyrostat, *run, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 128 + signal.SIGKILL, ended.stderr
    failure = json.loads((tmp_path / "report.json").read_text())["failure"]
    assert failure["cause"] == "out of memory"
    evidence = failure["evidence"]
    counted = rf"oom_kill in {group}/memory\.\w+ went from 0 to 1"
    assert re.search(rf"Killed process \d+ |{counted}", evidence["out_of_memory"])
    assert evidence["lines"][-1] == "sample 13 is a large one"
    assert 13 in evidence["running"]["samples"]
    assert f"out of memory: {evidence['out_of_memory']}" in ended.stderr
