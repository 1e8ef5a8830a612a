"""Kernels against `torch.optim`, schedules, duplicates, and rows that do not notice one another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from gyrostat.core.errors import UsageError
from gyrostat.ps.store.coalesce import coalesce, group
from gyrostat.ps.store.hashing import Rows, keys_of
from gyrostat.ps.store.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AnyOptimizer,
    RowAdagrad,
    coefficient_columns,
)
from gyrostat.ps.store.schedules import CosineDecay, ExponentialDecay, InverseTimeDecay, Warmup, rate_at
from gyrostat.ps.store.slot_store import SlotStore, Update
from gyrostat.ps.store.spec import DenseSpec, StoreSpec, TableSpec

SLOTS = 4
IDS, WIDTH = 50, 6
ALL = np.arange(SLOTS)

Torch = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

SPARSE: list[tuple[AnyOptimizer, Torch]] = [
    (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    (Adagrad(lr=0.1, initial=0.2), lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.2)),
    (Adagrad(lr=InverseTimeDecay(0.1, 0.3)), lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.3)),
    (Adam(lr=0.01), lambda p: torch.optim.SparseAdam(p, lr=0.01)),
]
DENSE: list[tuple[AnyOptimizer, Torch]] = [
    *[each for each in SPARSE if not isinstance(each[0], Adam)],
    (Adam(lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    (SGD(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    (
        SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch warns of its own code
@pytest.mark.parametrize(("ours", "theirs"), SPARSE, ids=lambda each: type(each).__name__)
def test_a_table_is_a_sparse_embedding(ours: AnyOptimizer, theirs: Torch) -> None:
    table = TableSpec(name="t", width=WIDTH, optimizer=ours)
    store = SlotStore(StoreSpec(slots=SLOTS, tables=(table,)))
    store.own(range(SLOTS))
    keys = keys_of(np.arange(IDS), "t")
    embedding = torch.nn.Embedding(IDS, WIDTH, sparse=True)
    embedding.weight.data = torch.from_numpy(store.pull(0, keys))
    optimizer = theirs([embedding.weight])
    random = np.random.default_rng(1)
    for step in range(40):
        ids = random.integers(0, IDS, 30)  # with duplicates
        gradients = random.standard_normal((30, WIDTH)).astype(np.float32)
        optimizer.zero_grad()
        (embedding(torch.from_numpy(ids)) * torch.from_numpy(gradients)).sum().backward()
        optimizer.step()
        store.apply(Update(0, step, ALL, {0: (keys_of(ids, "t"), gradients)}))
    np.testing.assert_allclose(store.pull(0, keys), embedding.weight.detach().numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("ours", "theirs"), DENSE, ids=lambda each: type(each).__name__)
def test_dense_pieces_are_a_tensor(ours: AnyOptimizer, theirs: Torch) -> None:
    size = 103  # the last piece is padded
    spec = DenseSpec(name="model", size=size, optimizer=ours)
    store = SlotStore(StoreSpec(slots=SLOTS, dense=(spec,)))
    store.own(range(SLOTS))
    random = np.random.default_rng(2)
    start = random.standard_normal(size).astype(np.float32)
    store.begin_dense(0, ALL, _pieces(start, spec))
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = theirs([parameter])
    for step in range(40):
        gradient = random.standard_normal(size).astype(np.float32)
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
        store.apply(Update(0, step, ALL, dense={0: _pieces(gradient, spec)}))
    result = store.pull_dense(0, ALL).reshape(-1)
    np.testing.assert_allclose(result[:size], parameter.detach().numpy(), rtol=2e-5, atol=2e-6)
    assert (result[size:] == 0).all()


def _pieces(flat: Rows, spec: DenseSpec) -> Rows:
    padded = np.zeros(spec.piece(SLOTS) * SLOTS, np.float32)
    padded[: len(flat)] = flat
    return padded.reshape(SLOTS, -1)


def test_row_adagrad_by_hand() -> None:
    rows, state = np.array([[1.0, 2.0]], np.float32), np.zeros((1, 1), np.float32)
    RowAdagrad(lr=0.5, eps=0.0).step(rows, state, np.array([[3.0, 1.0]], np.float32), (np.float32(0.5),))
    assert state.tolist() == [[5.0]]
    np.testing.assert_allclose(rows, [[1 - 1.5 / np.sqrt(5), 2 - 0.5 / np.sqrt(5)]], rtol=1e-6)


def test_ftrl_by_hand_and_against_one_number_at_a_time() -> None:
    optimizer = FTRL(lr=0.3, beta=1.0, l1=4.0, l2=0.1)
    random = np.random.default_rng(3)
    rows = random.standard_normal((4, 3)).astype(np.float32)
    state = optimizer.begin(rows)
    before = rows.copy()
    optimizer.step(rows, state, np.zeros((4, 3), np.float32), (np.float32(1 / 0.3),))
    np.testing.assert_allclose(rows, before, rtol=1e-5)  # its state is that of its initial values
    z, n, w = state[:, :3].astype(float), state[:, 3:].astype(float), rows.astype(float)
    for _ in range(30):
        gradients = random.standard_normal((4, 3)).astype(np.float32)
        optimizer.step(rows, state, gradients, (np.float32(1 / 0.3),))
        for at in np.ndindex(4, 3):
            g = float(gradients[at])
            sigma = (np.sqrt(n[at] + g * g) - np.sqrt(n[at])) / 0.3
            z[at] += g - sigma * w[at]
            n[at] += g * g
            small = abs(z[at]) <= 4.0
            w[at] = 0 if small else -(z[at] - np.sign(z[at]) * 4.0) / ((1 + np.sqrt(n[at])) / 0.3 + 0.1)
    np.testing.assert_allclose(rows, w, rtol=1e-3, atol=1e-5)
    assert (rows == 0).any()


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(lr=0.1, momentum=0.9),
        RowAdagrad(lr=0.1),
        Adagrad(lr=0.1),
        Adam(lr=Warmup(0.1, 9)),
        FTRL(lr=0.1, l1=0.01),
    ],
    ids=lambda each: type(each).__name__,
)
def test_rows_do_not_notice_one_another(optimizer: AnyOptimizer) -> None:
    """The bits of a row in an update of many, whose slots are at different updates, are those it has alone."""
    random = np.random.default_rng(4)
    rows = random.standard_normal((40, 16)).astype(np.float32)
    state, gradients = optimizer.begin(rows), random.standard_normal((40, 16)).astype(np.float32)
    updates = random.integers(1, 12, 40)
    together, state_together = rows.copy(), state.copy()
    columns = coefficient_columns(optimizer, updates, dense=False)
    optimizer.step(together, state_together, gradients.copy(), columns)
    for row in range(40):
        alone, state_alone = rows[row : row + 1].copy(), state[row : row + 1].copy()
        number = coefficient_columns(optimizer, updates[row : row + 1], dense=False)
        optimizer.step(alone, state_alone, gradients[row : row + 1].copy(), number)
        assert alone.tobytes() == together[row].tobytes()
        assert state_alone.tobytes() == state_together[row].tobytes()


def test_duplicates_are_summed_in_the_order_of_the_batch() -> None:
    random = np.random.default_rng(5)
    keys = keys_of(random.integers(0, 60, 1000), "t")
    gradients = random.standard_normal((1000, 4)).astype(np.float32)
    distinct, sums = coalesce(keys, gradients)
    assert (distinct == np.unique(keys)).all()
    for key, total in zip(distinct, sums, strict=True):
        assert total.tobytes() == np.add.reduceat(gradients[keys == key], [0], axis=0).tobytes()
    grouped = group(keys)
    assert (grouped.keys[grouped.inverse] == keys).all()
    same, untouched = coalesce(distinct, sums)
    assert same is distinct
    assert untouched is sums
    assert len(coalesce(keys[:0], gradients[:0])[0]) == 0


def test_schedules() -> None:
    assert [rate_at(Warmup(1.0, 4), each) for each in (1, 2, 4, 9)] == [0.25, 0.5, 1.0, 1.0]
    assert [rate_at(ExponentialDecay(1.0, 0.5, 2, staircase=True), each) for each in (1, 2, 3, 5)] == [
        1,
        1,
        0.5,
        0.25,
    ]
    assert rate_at(ExponentialDecay(1.0, 0.25, 2), 2) == 0.5
    cosine = CosineDecay(1.0, 12, warmup=2, final=0.2)
    assert [round(rate_at(cosine, each), 9) for each in (1, 2, 3, 8, 13, 99)] == [
        0.5,
        1.0,
        1.0,
        0.6,
        0.2,
        0.2,
    ]
    assert rate_at(0.3, 7) == 0.3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(lr=0.0), "lr must be more than 0, got 0.0"),
        (lambda: Adam(lr=Warmup(0.1, 0)), "updates of Warmup must be more than 0, got 0"),
        (lambda: SGD(lr=0.1, momentum=1.0), "momentum must be at least 0 and less than 1, got 1.0"),
        (lambda: SGD(lr=0.1, nesterov=True), "nesterov=True needs a momentum"),
        (lambda: FTRL(lr=0.1, l1=-1.0), "l1 of FTRL must be at least 0, got -1.0"),
        (lambda: StoreSpec(slots=6), "must be a power of two, got 6"),
        (lambda: TableSpec(name="a b", width=1, optimizer=SGD(lr=0.1)), "got 'a b'"),
        (
            lambda: TableSpec(name="a", width=0, optimizer=SGD(lr=0.1)),
            "width must be a whole number from 1 to 65536, got 0",
        ),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        make()
    assert message in str(refused.value)
