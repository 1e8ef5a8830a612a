"""The comparison of runs, on records made by hand."""

from __future__ import annotations

import os
from pathlib import Path

from gyrostat.job.chaos.record import (
    Entry,
    RecordedRun,
    RecordReader,
    RecordWriter,
    RecoveryNoted,
    StepDone,
    TrainingBegan,
    WorkerEnd,
    WorkerStarted,
    WorkerTrains,
)
from gyrostat.job.chaos.verdict import (
    ChaosVerdict,
    InjectedFault,
    Round,
    RoundFailure,
    RoundFailureKind,
    differences,
)


def recorded(*entries: Entry) -> RecordedRun:
    found = RecordedRun()
    for entry in entries:
        found.add(entry)
    return found


def step(number: int, loss: float = 0.5, samples: int = 8) -> StepDone:
    return StepDone(float(number), number, loss, samples)


UNDISTURBED = recorded(TrainingBegan(0.0, 0, None), step(1), step(2), step(3), WorkerEnd(4.0, 3, "abc"))


def test_the_same() -> None:
    again = recorded(
        step(1), step(2), TrainingBegan(2.5, 1, "/c/1"), step(2), step(3), WorkerEnd(4.0, 3, "abc")
    )
    assert differences(again, UNDISTURBED) == []
    assert (again.restored, again.samples, again.times) == (1, 24, [1.0, 2.0, 2.0, 3.0])
    assert (again.begun, UNDISTURBED.begun, again.last_step) == (0, 1, 3)


def test_recoveries_are_counted_once() -> None:
    again = recorded(
        RecoveryNoted(1.0, 2, 1, 0.1),
        RecoveryNoted(1.0, 2, 2, 0.1),
        RecoveryNoted(2.0, 4, 0, 0.1),
        TrainingBegan(3.0, 1, "/c/1"),
        RecoveryNoted(4.0, 2, 1, 0.1),
    )
    assert (len(again.recovered), again.redone) == (3, 4)


def test_every_difference_is_reported() -> None:
    assert (
        differences(recorded(step(1), step(2)), UNDISTURBED) == []
    )  # that it did not end is reported by its exit code
    assert differences(recorded(step(1), step(3), WorkerEnd(4.0, 3, "xyz")), UNDISTURBED) == [
        "the digest is xyz, that of the undisturbed run abc",
        "missing steps: 1; the first is step 2",
    ]
    assert differences(
        recorded(step(1), step(2, samples=4), step(3), step(4), WorkerEnd(5.0, 4, "abc")), UNDISTURBED
    ) == [
        "steps that the undisturbed run did not make: 1; the first is step 4",
        "steps that differ: 1; the first is step 2: loss and samples (0.5, 4), undisturbed (0.5, 8)",
    ]


def test_a_repeated_step_must_be_the_same() -> None:
    again = recorded(step(1), step(2), step(2, loss=0.6), step(3), WorkerEnd(4.0, 3, "abc"))
    assert differences(again, UNDISTURBED) == [
        "step 2 had loss and samples (0.5, 8), and (0.6, 8) when it was repeated"
    ]


def test_a_verdict_needs_a_round() -> None:
    fault = InjectedFault(
        round=0, at=1.5, kind="kill a worker", target="worker 1", step=1, until_next_step=0.2
    )
    good = Round(jobs=[UNDISTURBED], began=0.0, faults=[fault], failures=[])
    assert not ChaosVerdict(seed=1, undisturbed=UNDISTURBED, rounds=[]).ok
    verdict = ChaosVerdict(seed=1, undisturbed=UNDISTURBED, rounds=[good])
    assert verdict.ok
    assert verdict.as_json() == {
        "ok": True,
        "seed": 1,
        "digest": "abc",
        "steps": 3,
        "samples": 24,
        "rounds": [
            {
                "seed": 1,
                "samples": [24],
                "recovered_from_peers": 0,
                "micro_batches_redone": 0,
                "restored_from_checkpoint": 0,
                "begun_again": 0,
                "failures": [],
            }
        ],
        "faults": [
            {
                "round": 0,
                "at": 1.5,
                "kind": "kill a worker",
                "target": "worker 1",
                "step": 1,
                "until_next_step": 0.2,
            }
        ],
    }
    bad = Round(
        jobs=[UNDISTURBED],
        began=0.0,
        faults=[],
        failures=[RoundFailure(RoundFailureKind.HANG, "no step for 60 s")],
    )
    assert not ChaosVerdict(seed=1, undisturbed=UNDISTURBED, rounds=[good, bad]).ok


def test_every_job_of_a_round_is_compared_and_counted() -> None:
    rival = recorded(
        *(TrainingBegan(0.0, 0, None), TrainingBegan(0.5, 0, None), TrainingBegan(0.6, 1, "/c/1")),
        *(step(1), step(2), step(3), WorkerEnd(4.0, 3, "xyz")),
    )
    round = Round(
        jobs=[UNDISTURBED, rival],
        began=0.0,
        faults=[],
        failures=[RoundFailure(RoundFailureKind.HANG, "hangs")],
    )
    assert round.compared(UNDISTURBED) == [
        RoundFailure(RoundFailureKind.WRONG_RESULT, "the digest is xyz, that of the undisturbed run abc"),
        RoundFailure(RoundFailureKind.HANG, "hangs"),
    ]
    assert (round.samples, round.restored, round.begun_again) == (48, 1, 1)


def test_records_are_read_while_they_are_written(tmp_path: Path) -> None:
    reader, writer = RecordReader(tmp_path), RecordWriter(tmp_path)
    assert list(reader.new_entries()) == []
    started = WorkerStarted(0.5, os.getpid(), 1)
    writer.write(started)
    assert list(reader.new_entries()) == [started]
    with (tmp_path / f"worker-{os.getpid()}.notes").open("ab") as file:
        file.write(b'{"type":"TrainingBegan","at":1.0,')
        file.flush()
        assert list(reader.new_entries()) == []  # half a line
        file.write(b'"step":0,"resumed_from":null}\n')
    writer.write(step(1))
    writer.write(WorkerTrains(2.0, os.getpid()))
    assert list(reader.new_entries()) == [
        TrainingBegan(1.0, 0, None),
        step(1),
        WorkerTrains(2.0, os.getpid()),
    ]
