"""States survive being taken apart and put together, in bits and in types; nothing else is accepted."""

from __future__ import annotations

import collections
import contextlib
import enum
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyrostat.core.errors import UsageError
from gyrostat.engine.state.statetree import (
    MalformedState,
    Skeleton,
    TensorSpec,
    decode,
    encode,
    flatten,
    leaves,
    unflatten,
)
from gyrostat.engine.state.statetree.unflatten import _READERS
from gyrostat.engine.state.tensorbytes import DTYPES, empty_tensor, tensor_bytes


def bits(value: Any) -> Any:
    """A value that is equal for two states exactly if they are equal in type and bits."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), value.shape, value.stride(), bytes(tensor_bytes(value)))
    if isinstance(value, np.ndarray | np.generic):
        return (type(value), value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, complex):
        return (bits(value.real), bits(value.imag))
    if isinstance(value, dict):
        return (type(value), [(bits(key), bits(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value), [bits(item) for item in value])
    if isinstance(value, set | frozenset):
        return (type(value), sorted(map(repr, map(bits, value))))
    return (type(value), value)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = empty_tensor(draw(st.sampled_from(sorted(DTYPES))), shape)
    view = tensor_bytes(tensor)
    view[:] = draw(st.binary(min_size=len(view), max_size=len(view)))
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = np.dtype(draw(st.sampled_from(["?", "<i4", ">u8", "<f2", "<f8", "<c16", "<U3", "S5", "<M8[ns]"])))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = dtype.itemsize * math.prod(shape)
    data = draw(st.binary(min_size=size, max_size=size)) if dtype.kind not in "?bU" else bytes(size)
    array = np.frombuffer(data, dtype).reshape(shape) if size else np.empty(shape, dtype)
    return array[()] if draw(st.booleans()) and not shape else array


floats = st.one_of(
    st.floats(),
    st.integers(0, 2**64 - 1).map(lambda payload: struct.unpack("<d", struct.pack("<Q", payload))[0]),
)
text = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates too
scalars = st.one_of(st.none(), st.booleans(), st.integers(), floats, text, st.binary(max_size=400))
keys = st.recursive(
    st.one_of(st.none(), st.integers(), st.floats(allow_nan=False), text),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
others = st.one_of(
    st.complex_numbers(),
    st.sampled_from(
        [torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda:3"), torch.Size([2, 0])]
    ),
    st.integers(64, 20000).map(lambda power: -(3**power)),
    st.frozensets(keys, max_size=4),
    st.sets(st.integers(), max_size=4),
)
states = st.recursive(
    st.one_of(scalars, others, tensors(), arrays()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=250, max_size=260),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(text, st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(states)
def test_round_trip(state: Any) -> None:
    assert bits(decode(encode(state))) == bits(state)


@settings(max_examples=100, deadline=None)
@given(states)
def test_round_trip_through_json(state: Any) -> None:
    flat = flatten(state)
    skeleton = msgspec.json.decode(msgspec.json.encode(flat.skeleton), type=Skeleton)
    assert bits(unflatten(skeleton, [tensor.contiguous() for _, tensor in flat.tensors])) == bits(state)
    names = [name for name, _ in flat.tensors]
    assert len(set(names)) == len(names)
    assert names == [spec.name for spec in skeleton.tensors]


@settings(max_examples=300, deadline=None)
@given(states, st.data())
def test_altered_messages_never_do_anything_but_decode_or_refuse(state: Any, data: st.DataObject) -> None:
    message = bytearray(encode(state))
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MalformedState):
        decode(message)


@settings(max_examples=50, deadline=None)
@given(states)
def test_a_message_cut_off_anywhere_is_refused(state: Any) -> None:
    message = encode(state)
    for length in range(0, len(message), max(1, len(message) // 50)):
        with pytest.raises(MalformedState):
            decode(message[:length])
    with pytest.raises(MalformedState, match="too long"):
        decode(message + b"\0")


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(allow_nan=False), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from([*_READERS, "unknown"]), inner, min_size=1, max_size=2),
    ),
    max_leaves=10,
)


@settings(max_examples=500, deadline=None)
@given(json_values)
def test_a_skeleton_of_anything_is_read_or_refused(tree: Any) -> None:
    with contextlib.suppress(MalformedState):
        unflatten(Skeleton(tree, [TensorSpec("t", "uint8", [4])]), [torch.zeros(4, dtype=torch.uint8)])


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ({"tensor": 1}, "there is no tensor 1"),
        ({"tensor": True}, "expected a int"),
        ({"pickle": "gASVBQ=="}, "unknown tag 'pickle'"),
        ({"tuple": [], "dict": []}, "2 tags instead of one"),
        ({"dict": [["a", 1], ["a", 2]]}, "a key occurs twice"),
        ({"dict": [[[1], 1]]}, "unhashable"),
        ({"ndarray": [0, "|O", [1]]}, "not an element type"),
        ({"ndarray": [0, "<f4", [2]]}, "4 bytes are not"),
        ({"ndarray": [0, "<f4", [-1, -1]]}, "malformed ndarray"),
    ],
)
def test_malformed_skeletons(tree: Any, reason: str) -> None:
    with pytest.raises(MalformedState, match=reason):
        unflatten(Skeleton(tree, [TensorSpec("t", "uint8", [4])]), [torch.zeros(4, dtype=torch.uint8)])


@pytest.mark.parametrize(
    "tensor",
    [
        '["t","float31",[1],null]',
        '["t","float32",[-1],null]',
        '["t","float32",[2,3],[1,1]]',
        '["t","float32",[1.5],null]',
    ],
)
def test_impossible_tensors_are_refused(tensor: str) -> None:
    header = f'{{"tree":{{"tensor":0}},"tensors":[{tensor}]}}'.encode()
    with pytest.raises(MalformedState):
        decode(b"gyrostate\x01" + struct.pack("<Q", len(header)) + header + bytes(24))


def test_an_absurd_shape_of_no_bytes_is_refused() -> None:
    header = b'{"tree":{"tensor":0},"tensors":[["t","float32",[0,9999999999999999999999],null]]}'
    with pytest.raises(MalformedState, match="no tensor 't'"):
        decode(b"gyrostate\x01" + struct.pack("<Q", len(header)) + header)


def test_generators_of_random_numbers() -> None:
    generator = np.random.Generator(np.random.PCG64(5))
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "pcg": generator.bit_generator.state,
    }
    again = decode(encode(state))
    assert again["python"] == state["python"]
    assert again["pcg"] == state["pcg"]
    random.setstate(again["python"])
    np.random.set_state(again["numpy"])


def test_strides_of_dense_tensors_are_kept() -> None:
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert bits(decode(encode(last))) == bits(last)
    gaps = torch.arange(12.0).reshape(3, 4)[:, ::2]
    again = decode(encode(gaps))
    assert torch.equal(again, gaps)
    assert again.is_contiguous()
    expanded = torch.ones(1).expand(3)
    assert decode(encode(expanded)).tolist() == [1, 1, 1]


def test_views_that_are_not_materialised() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    assert decode(encode(tensor.conj())).tolist() == [1 - 2j, 3 + 1j]
    assert decode(encode(tensor.conj().imag)).tolist() == [-2.0, 1.0]


def test_tied_tensors_are_stored_once_and_stay_tied() -> None:
    weight = torch.nn.Parameter(torch.randn(100, 100))
    message = encode({"a": weight, "b": weight.detach()})
    assert len(message) < 1.1 * 4 * weight.numel()
    again = decode(message)
    assert again["a"] is again["b"]
    assert torch.equal(again["a"], weight.detach())


def test_messages_do_not_share_memory_with_what_they_were_made_of() -> None:
    message = bytearray(encode(torch.zeros(3)))
    again = decode(message)
    message[-4:] = b"\xff\xff\xff\xff"
    assert again.tolist() == [0, 0, 0]


def test_module_versions_are_kept() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    again = decode(encode(state))
    assert type(again) is OrderedDict
    assert again._metadata == state._metadata  # type: ignore[attr-defined]


def test_a_defaultdict_becomes_a_dict() -> None:
    again = decode(encode(defaultdict(list, {"a": [1]})))
    assert type(again) is dict
    assert again == {"a": [1]}


Point = collections.namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        (lambda: None, "function"),
        (object(), "object"),
        (random.Random(1), "random.Random"),
        (Point(1, 2), "Point"),
        (Colour.RED, "Colour"),
        (range(3), "range"),
        (bytearray(b"x"), "bytearray"),
        (np.array([object()]), "object"),
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.empty(2, device="meta"), "meta"),
    ],
)
def test_what_cannot_be_stored_is_named_with_its_place(leaf: Any, kind: str) -> None:
    with pytest.raises(UsageError, match=rf"'a\.1\.b' in the state.*{kind}"):
        encode({"a": [0, {"b": leaf}]})


def test_keys_that_cannot_be_stored_are_named() -> None:
    with pytest.raises(UsageError, match="'a' in the state has the key"):
        encode({"a": {frozenset([1]): 1}})


def test_a_state_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="contain itself"):
        encode(loop)


def test_a_message_nested_too_deeply_is_refused() -> None:
    header = b'{"tree":' + b"[" * 100_000 + b"]" * 100_000 + b',"tensors":[]}'
    with pytest.raises(MalformedState):
        decode(b"gyrostate\x01" + struct.pack("<Q", len(header)) + header)


def test_leaves_are_named_in_the_order_of_the_state() -> None:
    state = {"b": {"w.x": torch.zeros(1)}, "a": [(1, 2), {"c": 3}, ()], "numbers": [1, 2], "none": {}}
    assert [path for path, _ in leaves(state)] == ["b.w.x", "a.0", "a.1.c", "a.2", "numbers", "none"]
