"""What the levels pin, and that the docs say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyrostat.core.determinism import STARTED_AS, parse_pool, started_as, table, variables, weakest
from gyrostat.core.errors import UsageError
from gyrostat.core.job import Determinism, DevicePool

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "determinism.md"


def test_the_table_of_the_docs_is_the_table_of_the_code() -> None:
    assert "\n".join(table()) in DOCS.read_text()


@pytest.mark.parametrize(
    ("pool", "pins"),
    [
        ("avx512", ("avx512", "AVX512_CORE", "AVX512")),
        ("avx2,avx512", ("avx2", "AVX2", "AVX2")),
        ("avx512,sse,avx2", ("default", "SSE41", "COMPATIBLE")),
        ("v100,avx2", ("avx2", "AVX2", "AVX2")),
    ],
)
def test_a_pool_computes_with_what_its_weakest_type_has(pool: str, pins: tuple[str, str, str]) -> None:
    names = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR")
    found = variables(Determinism.HETEROGENEOUS, parse_pool(pool), "cpu")
    assert found == dict(zip(names, pins, strict=True))


def test_a_name_that_is_nearly_a_cpu_type_is_refused() -> None:
    with pytest.raises(UsageError, match="no CPU or GPU is of type 'avx9'; did you mean 'avx2'"):
        parse_pool("avx9,sse")
    assert parse_pool("a100,v100,t4,h100,rtx4090,avx2").types[-1] == "avx2"


def test_only_a_heterogeneous_job_pins_instruction_sets() -> None:
    for level in (Determinism.STATIC, Determinism.ELASTIC):
        assert variables(level, None, "cpu") == {}
        assert variables(level, None, "cuda") == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    gpus = DevicePool(types=("v100", "t4"))
    assert weakest(gpus) is None
    assert variables(Determinism.HETEROGENEOUS, gpus, "cpu") == {}


def test_a_machine_is_of_the_type_that_its_most_restricted_library_sees() -> None:
    for name, environment in STARTED_AS.items():
        assert started_as(environment, "avx512") == name
    assert started_as({"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ATEN_CPU_CAPABILITY": "avx2"}, "avx512") == "sse"
    assert started_as({"ATEN_CPU_CAPABILITY": "avx512"}, "avx2") == "avx2"
    assert started_as({}, "sse") == "sse"
