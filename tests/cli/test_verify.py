"""`gyrostat verify` from end to end, and how its verdicts look."""

from __future__ import annotations

import io
import json
import re
import signal
from pathlib import Path

import pytest
from rich.console import Console

from gyrostat.cli.verify_display import LiveProgress, PlainProgress, print_verdict
from gyrostat.core.placement import Placement
from gyrostat.job.processes.output import OutputStream
from gyrostat.job.processes.protocol import Started, StepReport, StepReports
from gyrostat.job.verify.compare import DifferenceKind, TracedRun, compare, locate, pairs_to_explain
from gyrostat.job.verify.diagnosis import DifferenceEvidence, diagnose
from gyrostat.job.verify.plan import Configuration
from gyrostat.job.verify.suspects import find_suspects
from gyrostat.job.verify.trace import Trace
from gyrostat.job.verify.verdict import VerifyFinding, VerifyVerdict, rows_of
from tests.cli.gyrostat_process import finish, gyrostat, running

TRAIN = """
import os, sys, time, torch, gyrostat

job = gyrostat.init(seed=7)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.arange(64.0).view(16, 4) / 64)
train = job.dataloader(data, batch_size=2, shuffle=True)
job.track(model=model, optimizer=optimizer)
noise = torch.Generator().manual_seed(1)
for step in job.steps(train):
    if "wait" in sys.argv:
        print("waiting", flush=True)
        while os.path.exists("wait"):
            time.sleep(0.01)
    for (x,) in step:
        if "noise" in sys.argv and job.step >= 2:
            x = x + torch.randn(x.shape, generator=noise)
        step.backward(model(x).square().mean())
    if "fail" in sys.argv:
        raise ValueError("no luck")
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def columns(line: str) -> list[str]:
    return re.split(r"  +", line.strip())


def test_equal(directory: Path) -> None:
    code, out, err = gyrostat("verify", "-n", "2", "--every", "2", "-m", "train", "--x", cwd=directory)
    assert code == 0, err
    assert columns(out[0]) == ["configuration", "steps", "digest", "seconds"]
    rows = [columns(line) for line in out[1:5]]
    assert [(name, steps, same) for name, steps, _, same, _ in rows] == [
        ("plain DDP, 2 processes", "4", "compared with"),
        ("2 workers", "4", "same"),
        ("1 worker", "4", "same"),
        ("2 workers, saved after step 2, resumed on 1 worker", "4", "same"),
    ]
    assert len({digest for _, _, digest, _, _ in rows}) == 1
    assert out[5:] == [
        "",
        "EQUAL: 4 runs of train with 2 virtual workers, 4 steps each. Every bit of the tracked state is the same "
        "(compared after every 2 steps and at the end), and so is every loss of virtual worker 0.",
    ]
    assert [re.sub(r"\d+\.\d s", "… s", line) for line in err] == [
        "gyrostat: run 1 of 4: 2 workers: 4 steps, … s",
        "gyrostat: run 2 of 4: 1 worker: 4 steps, … s, same",
        "gyrostat: run 3 of 4: 2 workers, saved after step 2, resumed on 1 worker: 4 steps, … s, same",
        "gyrostat: run 4 of 4: plain DDP, 2 processes: 4 steps, … s, same",
    ]


def test_a_difference_and_its_report(directory: Path) -> None:
    code, out, err = gyrostat(
        *("verify", "--virtual-workers", "2", "--workers", "2,1", "--against", "none"),
        *("--report", "r.json", "train.py", "noise"),
        cwd=directory,
    )
    assert code == 1, err
    assert [columns(line)[3] for line in out[1:4]] == ["compared with", *["DIFFERENT at step 3"] * 2]
    assert out[4:] == [
        "",
        "DIFFERENT: 2 workers  ≠  1 worker",
        "  first step   3",
        "  first tensor model.weight (2 of 13 differ there)",
        "  loss         of virtual worker 0 is the same up to and in that step",
        "  repeatable   yes: a second run of each gives the same result",
        "",
        "Likely cause: one random stream used by all virtual workers of a worker: a generator of the script's, "
        "model's or dataset's own is drawn from inside micro-batches, so who draws what depends on who runs where.",
        "    train.py:18: torch.randn(x.shape, generator=noise)",
        "  To do: inside micro-batches draw from the global streams of torch, NumPy or random: gyrostat gives every "
        "virtual worker its own.",
        *out[14:],
    ]
    assert out[15] == "Other known causes, without evidence in the script:"
    assert out[-1].startswith("If none of these applies, it is a bug in gyrostat")
    report = json.loads((directory / "r.json").read_text())
    assert (report["equal"], report["virtual_workers"], report["every"]) == (False, 2, 10)
    (finding,) = report["findings"]
    assert finding["between"] == ["2 workers", "1 worker"]
    assert (finding["scope"], finding["in"], finding["step"]) == ("placement", "state", 3)
    assert (finding["tensor"], finding["tensors"], finding["repeatable"]) == ("model.weight", 13, True)
    assert finding["tensors_differing"] == ["model.weight", "model.bias"]
    assert finding["causes"][0]["cause"] == "shared-stream"
    assert finding["causes"][0]["lines"] == ["train.py:18: torch.randn(x.shape, generator=noise)"]
    assert [(run["placement"], run["cut"], run["resumed_on"], run["same"]) for run in report["runs"]] == [
        ([1, 1], None, None, True),
        ([2], None, None, False),
        ([1, 1], 2, [2], False),
    ]
    for run in report["runs"]:
        assert (run["steps"], len(run["losses"]), list(run["digests"])) == (4, 4, ["4"])


def test_a_script_that_fails(directory: Path) -> None:
    code, out, err = gyrostat("verify", "-n", "1", "-v", "train.py", "fail", cwd=directory)
    assert (code, out) == (1, [])
    assert 'worker 0 │     raise ValueError("no luck")' in err
    assert err[-1] == "gyrostat: error: in the run as 1 worker, worker 0 raised ValueError: no luck"


def test_interrupted(directory: Path) -> None:
    (directory / "wait").touch()
    with running("verify", "-n", "1", "-v", "train.py", "wait", cwd=directory) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "worker 0 │ waiting\n"
        process.send_signal(signal.SIGINT)
        (directory / "wait").unlink()
        code, out, err = finish(process)
    assert (code, out) == (130, [])
    assert err[-1] == "gyrostat: stopped during 1 worker"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "2", "gone.py"], "there is no script 'gone.py'"),
        (["-n", "0", "train.py"], "--virtual-workers must be at least 1"),
        (["-n", "2", "--every", "0", "train.py"], "--every must be at least 1"),
        (["-n", "2", "--steps", "0", "train.py"], "--steps must be at least 1"),
        (["-n", "2", "--threads", "0", "train.py"], "at least one thread"),
        (["-n", "2", "--workers", "3", "train.py"], "3 workers cannot share 2 virtual workers"),
        (["-n", "2", "--report", "no/r.json", "train.py"], "there is no directory no"),
    ],
)
def test_bad_input(
    directory: Path,
    args: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gyrostat.cli import main

    monkeypatch.chdir(directory)
    monkeypatch.setattr("sys.argv", ["gyrostat", "verify", *args])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err


# How it looks

ONE, TWO = Placement.even(2, 1), Placement.even(2, 2)


def run(placement: Placement, trace: Trace) -> TracedRun:
    return TracedRun(configuration=Configuration(placement=placement), trace=trace, seconds=1.0)


def shown(runs: list[TracedRun], *, repeatable: bool = True, source: str = "", threads: int = 1) -> list[str]:
    """The verdict about these runs, as printed after its table."""
    findings = []
    for pair in pairs_to_explain(runs):
        difference = compare(pair.one.trace, pair.other.trace)
        assert difference
        evidence = DifferenceEvidence(
            scope=pair.scope,
            kind=difference.kind,
            repeatable=repeatable,
            workers_differ=difference.kind is DifferenceKind.WORKERS,
            threads=threads,
            repeatable_with_one_thread=threads > 1,
            suspects=tuple(find_suspects("train.py", source)),
        )
        findings.append(
            VerifyFinding(
                pair=pair,
                difference=difference,
                located=locate(pair.one.trace, pair.other.trace),
                loss_differs=True,
                evidence=evidence,
                causes=diagnose(evidence),
            )
        )
    verdict = VerifyVerdict(
        virtual_workers=2, every=10, rows=rows_of(runs, findings), findings=tuple(findings)
    )
    file = io.StringIO()
    print_verdict(verdict, "train.py", Console(file=file, width=120))
    return file.getvalue().splitlines()


def test_a_single_tensor() -> None:
    one = Trace(steps=1, digests={1: "a"}, tensors={1: {"w": "a", "b": "c"}})
    other = Trace(steps=1, digests={1: "b"}, tensors={1: {"w": "b", "b": "c"}})
    assert "  first tensor w (the only one of 2 that differs there)" in shown(
        [run(TWO, one), run(ONE, other)]
    )


def test_steps_differ() -> None:
    lines = shown([run(TWO, Trace(steps=3)), run(ONE, Trace(steps=5))])
    assert columns(lines[2])[3] == "DIFFERENT after step 3"
    assert "  equal for 3 steps; then one ended, the other made 5" in lines


def test_only_a_loss_differs() -> None:
    lines = shown([run(TWO, Trace(steps=2, losses={2: 1.0})), run(ONE, Trace(steps=2, losses={2: 2.0}))])
    assert columns(lines[2])[3] == "DIFFERENT at step 2"
    assert "  first step   2, in the loss of virtual worker 0; no tensor differs there" in lines


def test_a_difference_that_did_not_come_again() -> None:
    one, other = Trace(steps=10, digests={10: "a"}), Trace(steps=10, digests={10: "b"})
    lines = shown([run(TWO, one), run(ONE, other)], repeatable=False, source="os.urandom(3)", threads=2)
    assert columns(lines[2])[3] == "DIFFERENT by step 10"
    assert "  first step   by 10; run again, no tensor differed up to there" in lines
    assert "  repeatable   no: a second run of the same configuration gives another result" in lines
    assert "  threads      with one thread it is repeatable" in lines
    assert "gyrostat: please report" not in "\n".join(lines)


def test_workers_of_the_only_run_differ() -> None:
    lines = shown([run(TWO, Trace(steps=0, workers_differ="workers 0 and 1: w differs. Look for …"))])
    assert columns(lines[1])[3] == "DIFFERENT by step 0"
    assert lines[3] == "DIFFERENT: the workers of one run (2 workers)"
    assert lines[4] == "  workers      workers 0 and 1: w differs"


def test_live_progress() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, color_system=None)
    now = iter([0.0, 65.0])
    progress = LiveProgress(verbose=False, clock=lambda: next(now), console=console)
    progress.begins("1 worker", 2, 5, 30)
    progress.heard(0, Started(0, None, [], 0.0))
    progress.heard(0, StepReports([StepReport(12, 0, 0.5, 8, 1.0)]))
    assert progress.ticked() == 0.125
    progress.printed(0, OutputStream.STDOUT, "not shown")
    progress.ends(run(ONE, Trace(steps=30)), run(TWO, Trace(steps=30)))
    progress.close()
    assert "run 2 of 5: 1 worker · step 12 of 30 · 1:05" in file.getvalue()
    assert "gyrostat: run 2 of 5: 1 worker: 30 steps, 1.0 s, same" in file.getvalue()
    assert "not shown" not in file.getvalue()


def test_plain_progress(capsys: pytest.CaptureFixture[str]) -> None:
    progress = PlainProgress(verbose=True)
    progress.begins("1 worker, again", None, None, 3)
    progress.printed(0, OutputStream.STDOUT, "hello")
    assert progress.ticked() is None
    first = run(TWO, Trace(steps=1))
    progress.begins("1 worker", 2, 5, 1)
    progress.ends(run(ONE, Trace(steps=2)), first)
    assert capsys.readouterr().err.splitlines() == [
        "gyrostat: looking for the first difference: 1 worker, again",
        "worker 0 │ hello",
        "gyrostat: run 2 of 5: 1 worker: 2 steps, 1.0 s, DIFFERENT",
    ]


def test_the_tree_is_compared_with_ddp_that_has_it_as_a_hook(directory: Path) -> None:
    code, out, err = gyrostat("verify", "-n", "3", "--reduction", "tree", "train.py", cwd=directory)
    assert code == 0, err
    assert any("plain DDP, 3 processes" in line for line in out)
    assert any(line.startswith("EQUAL") for line in out)
