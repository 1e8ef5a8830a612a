"""What a process frees it does not have to ask the kernel for again."""

from __future__ import annotations

import subprocess
import sys

import pytest

STEPS = """
import resource, sys
import torch
from gyrostat.engine.training.heap import keep_freed_memory, touch_room_for

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def gradients():
    return [torch.ones(256, 1024) for _ in range(40)]  # 40 MiB, of blocks that glibc would take from its heap

parameters = gradients()
keep_freed_memory()
if sys.argv[1] == "touched":
    touch_room_for(parameters)
for _ in range(3):
    before = faults()
    gradients()
    print(faults() - before)
"""
PAGES = 40 * 256


@pytest.mark.parametrize(("mode", "first"), [("kept", True), ("touched", False)])
def test_memory_is_asked_for_once(mode: str, first: bool) -> None:
    """`first`: whether gradients cost as many page faults as they have pages in the first step; in the third they never do."""
    done = subprocess.run([sys.executable, "-c", STEPS, mode], capture_output=True, text=True, check=True)
    faults = [int(line) for line in done.stdout.split()]
    assert (faults[0] > PAGES // 2) is first
    assert faults[2] < PAGES // 2
