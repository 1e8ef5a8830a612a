"""The operators of the probe on one machine that is held back to each type, and how two results are compared."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from gyrostat.core.determinism import STARTED_AS, parse_pool
from gyrostat.core.job import Determinism
from gyrostat.engine.numerics.determinism import cpu_type
from gyrostat.engine.numerics.probe.result import ProbeComparison, ProbeResult, compare
from tests.conftest import Launch

SCRIPT = """
import json, sys, gyrostat
from gyrostat.engine.numerics.probe.run import run_probe
gyrostat.init()
with open(sys.argv[1], "w") as file:
    json.dump(dict(run_probe(pool=None).operators), file)
"""
needs_avx512 = pytest.mark.skipif(cpu_type({}) != "avx512", reason="needs a CPU that has all the types")


class Prober:
    def __init__(self, launch: Launch, directory: Path) -> None:
        self._launch, self._directory = launch, directory
        self.operators = cache(self._operators)

    def _operators(self, kind: str, pool: str | None) -> dict[str, str]:
        path = self._directory / "operators.json"
        self._launch(
            SCRIPT,
            args=[str(path)],
            determinism=Determinism.HETEROGENEOUS if pool else Determinism.ELASTIC,
            pool=parse_pool(pool) if pool else None,
            env=STARTED_AS[kind],
        )
        return dict(json.loads(path.read_text()))


@needs_avx512
def test_operators_agree_where_they_are_pinned_and_only_there(launch: Launch, tmp_path: Path) -> None:
    prober = Prober(launch, tmp_path)
    free = prober.operators("avx512", None)
    assert len(free) >= 200
    held_back = prober.operators("avx2", None)
    differing = {name.partition("/")[0] for name in free if free[name] != held_back[name]}
    # Which families differ depends on the CPU (optimizers agree on AMD's AVX-512): the probe must see that some do.
    assert differing >= {"matmul", "convolution", "softmax", "attention"}
    assert prober.operators("avx512", "avx512,avx2") == prober.operators("avx2", "avx512,avx2")
    assert prober.operators("avx2", "avx512,sse") == prober.operators("sse", "avx512,sse")


RESULT = ProbeResult(
    torch="2.13.0",
    cpu="GenuineIntel",
    type="avx512",
    capability="AVX2",
    threads=1,
    pool=("avx512", "avx2"),
    operators={"matmul/mm": "1", "matmul/bmm": "2", "random/rand": "3"},
)


def test_equal_results_agree() -> None:
    other = replace(RESULT, type="avx2", cpu="AuthenticAMD")
    assert compare(RESULT, other) == ProbeComparison(differing=(), only_one=(), settings=())
    assert compare(RESULT, other).agree
    assert RESULT.families.keys() == {"matmul", "random"}


def test_what_differs_is_named() -> None:
    other = replace(
        RESULT,
        threads=2,
        pool=None,
        operators={"matmul/mm": "1", "matmul/bmm": "x", "random/randn": "4"},
    )
    assert compare(RESULT, other) == ProbeComparison(
        differing=("matmul/bmm",),
        only_one=("random/rand", "random/randn"),
        settings=("threads is 1 here and 2 there", "pool is avx512,avx2 here and not given there"),
    )
    assert not compare(RESULT, other).agree
    assert RESULT.all != other.all
    assert RESULT.families["matmul"] != other.families["matmul"]
