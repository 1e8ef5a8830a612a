"""Digests are the same for the same bits, and differ for any other."""

from __future__ import annotations

import struct
from collections import OrderedDict
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gyrostat.core.errors import UsageError
from gyrostat.engine.state.digest import checksum, digest, digest_of, state_of, tensor_digests


def fixed_state() -> dict[str, Any]:
    return {
        "model": OrderedDict(weight=torch.arange(6.0).reshape(2, 3), bias=torch.tensor([0.5, -0.0])),
        "half": torch.tensor([1.5, float("inf")], dtype=torch.bfloat16),
        "groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1], "fused": None}],
        "array": np.arange(3, dtype=np.int64),
        "empty": torch.empty(0, 4),
        "count": 7,
    }


def test_golden_value() -> None:
    """Digests of today can be compared with those in old reports."""
    assert digest(**fixed_state()) == "7cc590902d19b8d04bae2784dc9a44b5355a8c35a15d8829dc9c828891b0d8a7"


def test_what_a_digest_is_made_of() -> None:
    leaf = sha256(b"tensor float32 [2]\n" + struct.pack("<ff", 1.0, 2.0)).hexdigest()
    value = sha256(b'value\n{"tuple":[0.5,null,"a"]}').hexdigest()
    whole = f"gyrostat digest 1\n1:w={leaf}\n3:z.y={value}\n"
    assert digest(z={"y": (0.5, None, "a")}, w=torch.tensor([1.0, 2.0])) == sha256(whole.encode()).hexdigest()


def test_digests_of_single_leaves() -> None:
    assert digest(**fixed_state()) == digest_of(tensor_digests(**fixed_state()))
    assert list(tensor_digests(**fixed_state())) == [
        "model.weight",
        "model.bias",
        "half",
        "groups.0.lr",
        "groups.0.betas",
        "groups.0.params",
        "groups.0.fused",
        "array",
        "empty",
        "count",
    ]


def test_order_of_dicts_does_not_count() -> None:
    backwards = dict(reversed(fixed_state().items()))
    backwards["model"] = dict(reversed(backwards["model"].items()))
    assert digest(**backwards) == digest(**fixed_state())


def test_layout_does_not_count() -> None:
    tensor = torch.randn(2, 3, 4, 5)
    assert digest(x=tensor.to(memory_format=torch.channels_last)) == digest(x=tensor)
    assert digest(x=tensor.transpose(0, 1)) == digest(x=tensor.transpose(0, 1).contiguous())
    assert digest(x=torch.nn.Parameter(tensor)) == digest(x=tensor)


_W = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"x": _W}, {"y": _W}),
        ({"x": _W}, {"x": _W.double()}),
        ({"x": _W}, {"x": _W.reshape(3, 2)}),
        ({"x": _W}, {"x": _W.view(torch.int32)}),
        ({"x": _W}, {"x": torch.nextafter(_W, torch.tensor(torch.inf))}),
        ({"x": torch.tensor(0.0)}, {"x": torch.tensor(-0.0)}),
        ({"x": torch.tensor(1)}, {"x": 1}),
        ({"x": np.int64(1)}, {"x": 1}),
        ({"x": np.ones(1)}, {"x": torch.ones(1, dtype=torch.float64)}),
        ({"x": 1}, {"x": 1.0}),
        ({"x": 1}, {"x": True}),
        ({"x": 0.0}, {"x": -0.0}),
        ({"x": 0.1}, {"x": 0.1 + 2**-56}),
        ({"x": float("nan")}, {"x": None}),
        ({"x": "1"}, {"x": 1}),
        ({"x": b"1"}, {"x": "1"}),
        ({"x": [1, 2]}, {"x": (1, 2)}),
        ({"x": [1, 2]}, {"x": [2, 1]}),
        ({"x": {}}, {"x": []}),
        ({"x": {}}, {}),
        ({"x": torch.empty(0, 3)}, {"x": torch.empty(3, 0)}),
    ],
)
def test_what_counts(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert digest(**one) != digest(**other)
    assert checksum(one) != checksum(other)


@given(st.integers(0, 23), st.integers(0, 7))
def test_every_bit_counts(byte: int, bit: int) -> None:
    flipped = _W.clone()
    flipped.view(torch.uint8).reshape(-1)[byte] ^= 1 << bit
    assert digest(x=flipped) != digest(x=_W)
    assert checksum({"x": flipped}) != checksum({"x": _W})


def training() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    for _ in range(2):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        schedule.step()
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}


def test_objects_of_training() -> None:
    one, other = training(), training()
    assert digest(**one) == digest(**other)
    assert digest(**one) == digest(**{name: thing.state_dict() for name, thing in one.items()})
    assert digest(all=one) == digest(all=state_of(one))
    other["optimizer"].param_groups[0]["lr"] *= 1.0000000000000002
    differing = [
        name for name, value in tensor_digests(**one).items() if tensor_digests(**other)[name] != value
    ]
    assert differing == ["optimizer.param_groups.0.lr"]


def test_tied_tensors_count_under_each_name() -> None:
    weight = torch.randn(3)
    assert digest(a=weight, b=weight) == digest(a=weight, b=weight.clone())
    assert tensor_digests(a=weight, b=weight)["a"] == tensor_digests(a=weight, b=weight)["b"]


def test_names_that_coincide_are_both_there() -> None:
    assert len(tensor_digests(x={"a.b": 1, "a": {"b": 2}})) == 2


def test_what_has_no_state_is_named() -> None:
    with pytest.raises(UsageError, match=r"'x\.f' in the state is a function"):
        digest(x={"f": training})
    with pytest.raises(UsageError, match=r"'x'.*sparse"):
        digest(x=torch.eye(2).to_sparse())
