"""Every number, text and list of a request has a largest value, and what is within the bounds fails in no policy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from gyrostat.cluster.api.operations import OPERATIONS
from gyrostat.cluster.job_spec import JobSpec, Steps, Workers
from gyrostat.core.errors import UsageError
from gyrostat.local.layout import layout_of_slots
from gyrostat.sched.policies.registry import OURS
from gyrostat.sched.port import Change, Finished, Progressed, Snapshot, Submitted
from gyrostat.sched.tick import tick

LAYOUT = layout_of_slots("fast:2,slow:2")


def unbounded(kind: inspect.Type, where: str) -> Iterator[str]:
    match kind:
        case inspect.Metadata(type=inner):
            yield from unbounded(inner, where)
        case inspect.UnionType(types=types):
            for inner in types:
                yield from unbounded(inner, where)
        case inspect.StructType(fields=fields):
            for field in fields:
                yield from unbounded(field.type, f"{where}.{field.name}")
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            if kind.max_length is None:
                yield where
            yield from unbounded(item, f"{where}[]")
        case inspect.DictType(key_type=key, value_type=value):
            if kind.max_length is None:
                yield where
            yield from (*unbounded(key, f"{where}{{}}"), *unbounded(value, f"{where}{{}}"))
        case inspect.StrType(max_length=None):
            yield where
        case inspect.IntType() | inspect.FloatType():
            if (kind.le is None and kind.lt is None) or (kind.ge is None and kind.gt is None):
                yield where
        case inspect.StrType() | inspect.BoolType() | inspect.NoneType() | inspect.EnumType():
            pass
        case _:
            yield f"{where}: {kind} is not known here"


def test_every_value_of_a_request_is_bounded() -> None:
    kinds = {
        kind for operation in OPERATIONS for kind in (operation.query, operation.body) if kind is not None
    }
    found = [place for kind in kinds for place in unbounded(inspect.type_info(kind), kind.__name__)]
    assert JobSpec in kinds
    assert found == []


@pytest.mark.parametrize(
    "fields",
    [
        {"time_limit": 1e300},
        {"time_limit": float("nan")},
        {"time_limit": float("inf")},
        {"cpu": float("nan")},
        {"virtual_workers": 10**9},
        {"checkpoint_every": 10**30},
        {"steps": 2**63},
        {"args": ("x",) * 10_000},
        {"args": ("x" * 10**6,)},
        {"env": {f"A{number}": "" for number in range(5000)}},
        {"types": ("x" * 10_000,)},
        {"workdir": "/" + "x" * 5000},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_job_beyond_the_bounds_is_refused_and_the_field_named(fields: dict[str, object]) -> None:
    (name,) = fields
    with pytest.raises(UsageError, match=rf"this is not a valid job: .*\$\.{name}"):
        JobSpec(**{"script": "train.py", **fields}).check()  # type: ignore[arg-type]


def limits(kind: object) -> st.SearchStrategy[int]:
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.IntType)
    assert found.ge is not None
    assert found.le is not None
    low, high = int(found.ge), int(found.le)
    return st.one_of(st.sampled_from([low, high]), st.integers(low, high))


SPECS = st.builds(
    JobSpec,
    script=st.just("train.py"),
    virtual_workers=limits(Workers),
    min=st.integers(1, 4),
    priority=st.sampled_from([0, 1, 1000]),
    mix_types=st.booleans(),
    opportunistic=st.booleans(),
    steps=st.none() | limits(Steps),
    workload=st.none() | st.text(max_size=3),
    types=st.sampled_from([(), ("slow",), ("slow", "fast")]),
)


@pytest.mark.parametrize("policy", sorted(OURS))
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(
    specs=st.lists(SPECS, min_size=1, max_size=4),
    rates=st.lists(st.floats(1e-9, 1e12), min_size=4, max_size=4),
)
def test_what_is_within_the_bounds_fails_in_no_policy(
    policy: str, specs: list[JobSpec], rates: list[float]
) -> None:
    state = LAYOUT.scheduler_state(policy)
    submitted: list[Change] = []
    for number, spec in enumerate(specs):
        try:
            submitted.append(Submitted(LAYOUT.request(f"j{number}", spec.check(), "default", 0.0)))
        except UsageError:
            continue
    ids = [change.request.id for change in submitted if isinstance(change, Submitted)]
    rounds: list[list[Change]] = [
        submitted,
        [Progressed(id_, 3.0, rate) for id_, rate in zip(ids, rates, strict=False)],
        [],
        [Finished(id_) for id_ in ids],
    ]
    for now, changes in zip((0.0, 5.0, 1e5, 1e9), rounds, strict=True):
        tick(state, Snapshot(now, tuple(changes)))
    assert not state.jobs
