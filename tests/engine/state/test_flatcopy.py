"""Tensors in one block of memory are those that were copied there, however many threads did it."""

from __future__ import annotations

import pytest
import torch

from gyrostat.engine.state import flatcopy
from gyrostat.engine.state.digest import digest
from gyrostat.engine.state.flatcopy import copy_into, size_of, views_of
from gyrostat.engine.state.statetree import flatten, unflatten


@pytest.mark.parametrize("parallel", [False, True])
def test_copies(parallel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flatcopy, "_SLICE_BYTES", 1000)
    monkeypatch.setattr(flatcopy, "_BATCH_BYTES", 1000)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    large = torch.randn(3001)
    state = {
        "large": large,
        "many": [torch.randn(7, 3), torch.tensor(3), torch.empty(0, 4)],
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "half": torch.randn(5).to(torch.bfloat16),
        "a number": 4.5,
    }
    flat = flatten(state)
    block = torch.zeros(size_of(flat.skeleton), dtype=torch.uint8)
    copy = copy_into(block, flat, parallel=parallel)
    again = unflatten(flat.skeleton, views_of(block, flat.skeleton))
    assert digest(state=again) == digest(state=state)
    assert digest(state=unflatten(copy.skeleton, [tensor for _, tensor in copy.tensors])) == digest(
        state=state
    )
    assert all(view.data_ptr() % 64 == block.data_ptr() % 64 for view in views_of(block, flat.skeleton))
    large.zero_()
    assert again["large"].any()
