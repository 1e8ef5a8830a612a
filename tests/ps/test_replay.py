"""A recorded asynchronous run, repeated in one process: equal digests, also if workers and servers died in it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gyrostat.core.errors import UsageError
from gyrostat.ps.checkpoint.record import Computation, UpdateLine, UpdateRecord, merge_records, read_record
from gyrostat.ps.client.slot_lines import causal_order, parents_of
from gyrostat.ps.protocol.data_spec import DataSpec
from gyrostat.ps.protocol.record_lines import SlotOwned, UpdateAccepted, UpdateOrigin, line_of
from gyrostat.ps.store.optimizers import SGD
from gyrostat.ps.store.spec import StoreSpec, TableSpec
from tests.ps.test_same_bits import GYROSTAT, SCRIPTS, finished, found, start

SPEC = StoreSpec(slots=2, tables=(TableSpec(name="t", width=1, optimizer=SGD(lr=1.0)),), record=True)
DATA = DataSpec(samples=8, batch_size=2, shard_size=4)


def servers_of(launcher: int) -> list[int]:
    """The server processes of a run, which are its children."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [
        int(each) for each in children if b"gyrostat.ps.server" in Path(f"/proc/{each}/cmdline").read_bytes()
    ]


def test_a_run_with_deaths_is_repeated(tmp_path: Path) -> None:
    record, script = tmp_path / "updates.json", SCRIPTS / "disturbed.py"
    run = start(
        GYROSTAT, "run", "--servers", "2", "--workers", "3", "--checkpoint-every", "30",
        "--checkpoint-dir", tmp_path / "checkpoints", "--record", record, script, tmp_path,
    )  # fmt: skip
    while not (tmp_path / "middle").exists():
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.01)
    os.kill(servers_of(run.pid)[0], signal.SIGKILL)
    (tmp_path / "go").touch()
    (output,) = finished(run)
    assert (tmp_path / "killed").exists()
    assert "went back to checkpoint" in output
    (replayed,) = finished(start(GYROSTAT, "replay-async", record, script))
    assert len(found("digest", output)) == 1
    assert found("digest", replayed) == found("digest", output)
    other = start(GYROSTAT, "replay-async", record, SCRIPTS / "ordered.py", "none", "1")
    message = other.communicate(timeout=100)[0]
    assert other.returncode == 2, message
    assert "the record is of a job with other data" in message


def _origin(name: str, *versions: tuple[int, int]) -> bytes:
    return msgspec.msgpack.encode(UpdateOrigin(name, tuple(np.array(each).tobytes() for each in versions)))


def _write(path: Path, *lines: SlotOwned | UpdateAccepted) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def test_lines_begin_where_another_was(tmp_path: Path) -> None:
    a, b, c, d = (_origin(name, (0, 0)) for name in "abcd")
    _write(
        tmp_path / "updates-of-one.jsonl",
        SlotOwned(0, 0, 0, 0),
        UpdateAccepted(0, 0, a, {0: 0}),
        UpdateAccepted(0, 1, b, {0: 1}),  # undone: slot 0 goes back to version 1
        SlotOwned(1, 0, 0, 1),
        UpdateAccepted(0, 2, c, {0: 1}),
        UpdateAccepted(0, 3, d, {0: 2}),  # its mirror takes over without it
    )
    _write(
        tmp_path / "updates-of-two.jsonl",
        SlotOwned(0, 0, 1, 0),
        UpdateAccepted(0, 0, a, {1: 0}),
        SlotOwned(1, 5, 0, 2),
        UpdateAccepted(0, 1, b, {0: 2, 1: 1}),
    )
    with (tmp_path / "updates-of-two.jsonl").open("ab") as file:
        file.write(b'{"type":"UpdateAcc')  # killed while it wrote
    merged = merge_records(tmp_path, spec=SPEC, data=DATA, digest="x")
    first, back, mirror = line_of(0, 0), line_of(1, 0), line_of(1, 5)
    batches = {
        (line.slot, line.name): (line.start, [merged.computations[number].batch for number in line.updates])
        for line in merged.lines
    }
    assert batches == {
        (0, first): (0, [0, 1]),
        (0, back): (1, [2, 3]),
        (0, mirror): (2, [1]),
        (1, first): (0, [0, 1]),
    }
    assert parents_of(merged) == {(0, first): None, (0, back): first, (0, mirror): back, (1, first): None}
    merged.write(tmp_path / "whole.json")
    assert read_record(tmp_path / "whole.json") == merged


def _record(computations: list[Computation], *lines: UpdateLine) -> UpdateRecord:
    return UpdateRecord(
        format=1, digest="", spec=SPEC, data=DATA, computations=tuple(computations), lines=lines
    )


def test_batches_are_computed_after_what_they_have_seen() -> None:
    def pulled(*versions: int) -> tuple[bytes, ...]:
        return (np.array(versions, np.int64).tobytes(),)

    back = line_of(1, 0)
    computations = [
        Computation(0, 0, pulled(1, 1)),
        Computation(0, 1, pulled(0, 0)),
        Computation(0, 0, pulled(back + 1, 2)),  # slot 0 has gone back by one update
        Computation(1, 2, pulled(back + 2, 3)),
    ]
    lines = [UpdateLine(0, 0, 0, (1, 0)), UpdateLine(0, back, 1, (2, 3)), UpdateLine(1, 0, 0, (1, 0, 2, 3))]
    assert causal_order(_record(computations, *lines)) == [1, 0, 2, 3]
    with pytest.raises(UsageError, match="contradicts itself"):
        causal_order(_record(computations[:1], UpdateLine(0, 0, 0, (0,)), UpdateLine(1, 0, 0, (0,))))
    with pytest.raises(UsageError, match="begins in the middle"):
        causal_order(_record(computations[:1], UpdateLine(0, 0, 3, (0,))))


def test_files_that_are_no_records_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"format": 2}')
    with pytest.raises(UsageError, match="is not a record of updates"):
        read_record(tmp_path / "x.json")
    with pytest.raises(UsageError, match="No such file"):
        read_record(tmp_path / "y.json")
