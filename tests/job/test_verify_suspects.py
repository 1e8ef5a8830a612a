"""Lines of a script that are known to break the promise."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from gyrostat.job.processes.protocol import Program
from gyrostat.job.verify.sources import suspects_in
from gyrostat.job.verify.suspects import Hint, find_suspects, imported


def found(source: str) -> list[tuple[int, str, Hint]]:
    return [(s.line, s.text, s.hint) for s in find_suspects("train.py", textwrap.dedent(source))]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("os.urandom(4)", Hint.UNSEEDED),
        ("np.random.default_rng()", Hint.UNSEEDED),
        ("random.Random()", Hint.UNSEEDED),
        ("np.random.seed()", Hint.UNSEEDED),
        ("secrets.token_bytes(4)", Hint.UNSEEDED),
        ("time.time_ns()", Hint.CLOCK),
        ("datetime.now()", Hint.CLOCK),
        ("os.environ['RANK']", Hint.WORKER),
        ("os.environ.get('WORLD_SIZE', '1')", Hint.WORKER),
        ("os.getenv('LOCAL_RANK')", Hint.WORKER),
        ("os.getpid()", Hint.WORKER),
        ("job.is_main", Hint.WORKER),
        ("torch.compile(model)", Hint.COMPILE),
    ],
)
def test_single_expressions(line: str, hint: Hint) -> None:
    assert found(f"value = {line}") == [(1, line, hint)]


@pytest.mark.parametrize(
    "line",
    [
        "torch.Generator()",
        "np.random.default_rng(3)",
        "random.Random(3)",
        "np.random.seed(3)",
        "os.environ['HOME']",
        "settings.get('RANKING')",
        "model.parameters()",
        "this is no python",
    ],
)
def test_harmless_expressions(line: str) -> None:
    assert found(f"value = {line}") == []


def test_a_tracked_module_that_is_not_called_itself() -> None:
    assert found("""
        job.track(model=net, optimizer=optimizer, ddp={})
        net(x)
        net.forward(x)
        net.body(x)
        net.train()
        net.register_buffer("b", t)
        optimizer.anything()
        other.forward(x)
        """) == [(4, "net.forward(x)", Hint.DIRECT_CALL), (5, "net.body(x)", Hint.DIRECT_CALL)]


def test_generators_count_where_they_are_drawn_from_again_and_again() -> None:
    assert found("""
        once = torch.Generator().manual_seed(1)
        data = torch.randn(3, generator=once)
        noise = np.random.default_rng(1)

        def build():
            mine = torch.Generator()
            return torch.randn(3, generator=mine)

        def draw():
            return noise.normal()

        class Data:
            def __init__(self):
                self.rng = random.Random(2)
                self.first = self.rng.random()

            def __getitem__(self, index):
                return self.rng.random()

        for step in job.steps(loader):
            for x in step:
                x + noise.normal()
        """) == [
        (11, "noise.normal()", Hint.OWN_GENERATOR),
        (19, "self.rng.random()", Hint.OWN_GENERATOR),
        (23, "noise.normal()", Hint.OWN_GENERATOR),
    ]


def test_attributes_changed_for_every_sample() -> None:
    assert found("""
        class Data:
            def __init__(self):
                self.seen = 0

            def __getitem__(self, index):
                self.seen += 1
                self.last["x"] = index
                local = 3

            def reset(self):
                self.seen = 0
        """) == [
        (7, "self.seen += 1", Hint.HELD_STATE),
        (8, "self.last['x'] = index", Hint.HELD_STATE),
    ]


def test_counters() -> None:
    assert found("""
        for epoch in job.epochs(3):
            total += 1
            for number, step in enumerate(job.steps(loader)):
                for x in step:
                    step.backward(x)
                count += 1
                state["count"] += 1
        """) == [
        (4, "enumerate(job.steps(loader))", Hint.COUNTER),
        (7, "count += 1", Hint.COUNTER),
    ]


def test_values_of_one_virtual_worker() -> None:
    assert found("""
        def main():
            for epoch in job.epochs(3):
                for step in job.steps(loader):
                    for x in step:
                        loss = f(x)
                        mean = job.mean(loss)
                        step.backward(loss)
                    print(loss)
                    job.log(loss=loss.item())
                    clip(mean.value)
                    if loss > 3:
                        break
                plateau.step(loss)
        """) == [(12, "loss > 3", Hint.LOCAL_VALUE), (14, "plateau.step(loss)", Hint.LOCAL_VALUE)]


def test_long_lines_are_cut() -> None:
    ((_, text, _),) = found(f"os.environ.get('RANK', {'1' * 100})")
    assert len(text) == 80
    assert text.endswith("…")


def test_imports() -> None:
    assert imported("import a, b.c\nfrom d import e\nfrom . import f\n") == ["a", "b.c", "d", "d.e"]
    assert imported("no python") == []


def test_files_beside_the_script_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "train.py").write_text("import numpy, missing, model\nfrom package import part\n")
    (tmp_path / "model.py").write_text("import train\nos.urandom(1)\n")
    (tmp_path / "package/part.py").write_text("os.urandom(2)\n")
    (tmp_path / "package/other.py").write_text("os.urandom(3)\n")
    expected = ["model.py:2: os.urandom(1)", "package/part.py:1: os.urandom(2)"]
    assert [str(each) for each in suspects_in(Program(name="train.py"), tmp_path)] == expected
    assert [str(each) for each in suspects_in(Program(name="train", module=True), tmp_path)] == expected
    part = suspects_in(Program(name="package.part", module=True), tmp_path)
    assert [str(each) for each in part] == ["package/part.py:1: os.urandom(2)"]
    assert suspects_in(Program(name="gone.py"), tmp_path) == ()
