"""What is compared, on notes made by hand."""

from __future__ import annotations

import os
from pathlib import Path

from gyrostat.job.chaos.record import (
    Note,
    Notebook,
    Reader,
    RecordedRun,
    RecoveryNoted,
    StepDone,
    TrainingBegan,
    WorkerEnd,
    WorkerStarted,
)
from gyrostat.job.chaos.verdict import ChaosVerdict, Round, Struck, differences


def recorded(*notes: Note) -> RecordedRun:
    found = RecordedRun()
    for note in notes:
        found.add(note)
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


def test_recoveries_are_counted_once_whoever_notes_them() -> None:
    again = recorded(
        RecoveryNoted(1.0, 2, 1, 0.1),
        RecoveryNoted(1.0, 2, 2, 0.1),
        RecoveryNoted(2.0, 4, 0, 0.1),
        TrainingBegan(3.0, 1, "/c/1"),
        RecoveryNoted(4.0, 2, 1, 0.1),
    )
    assert (len(again.rescued), again.redone) == (3, 4)


def test_whatever_differs_is_told() -> None:
    assert differences(recorded(step(1), step(2), step(3)), UNDISTURBED) == ["it did not come to its end"]
    assert differences(recorded(step(1), step(3), WorkerEnd(4.0, 3, "xyz")), UNDISTURBED) == [
        "its digest is xyz, that of the undisturbed run abc",
        "1 steps were never reported, the first is step 2",
    ]
    assert differences(
        recorded(step(1), step(2, samples=4), step(3), step(4), WorkerEnd(5.0, 4, "abc")), UNDISTURBED
    ) == [
        "1 steps too many were made, the first is step 4",
        "1 steps differ; the first is step 2: loss and samples (0.5, 4), undisturbed (0.5, 8)",
    ]


def test_what_is_done_again_must_be_the_same() -> None:
    again = recorded(step(1), step(2), step(2, loss=0.6), step(3), WorkerEnd(4.0, 3, "abc"))
    assert differences(again, UNDISTURBED) == [
        "step 2 had loss and samples (0.5, 8), and when it was done again (0.6, 8)"
    ]


def test_a_verdict_needs_a_round() -> None:
    struck = Struck(round=0, at=1.5, kind="kill a worker", whom="worker 1", step=1, until_next_step=0.2)
    good = Round(recorded=UNDISTURBED, struck=[struck], differences=[])
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
                "samples": 24,
                "recovered_from_peers": 0,
                "micro_batches_redone": 0,
                "restored_from_checkpoint": 0,
                "differences": [],
            }
        ],
        "faults": [
            {
                "round": 0,
                "at": 1.5,
                "kind": "kill a worker",
                "whom": "worker 1",
                "step": 1,
                "until_next_step": 0.2,
            }
        ],
    }
    bad = Round(recorded=UNDISTURBED, struck=[], differences=["its digest is another"])
    assert not ChaosVerdict(seed=1, undisturbed=UNDISTURBED, rounds=[good, bad]).ok


def test_notes_are_read_as_they_come(tmp_path: Path) -> None:
    reader, notebook = Reader(tmp_path), Notebook(tmp_path)
    assert list(reader.news()) == []
    born = WorkerStarted(0.5, os.getpid(), 1, 1)
    notebook.write(born)
    assert list(reader.news()) == [born]
    with (tmp_path / f"worker-{os.getpid()}.notes").open("ab") as file:
        file.write(b'{"type":"TrainingBegan","at":1.0,')
        file.flush()
        assert list(reader.news()) == []  # half a line
        file.write(b'"step":0,"resumed_from":null}\n')
    notebook.write(step(1))
    assert list(reader.news()) == [TrainingBegan(1.0, 0, None), step(1)]
