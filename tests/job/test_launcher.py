"""Jobs of real processes, from start to end."""

from __future__ import annotations

from tests.conftest import Launch


def test_a_script_runs_in_every_worker(launch: Launch) -> None:
    outcome = launch("print('hello')", virtual_workers=4, workers=2)
    assert outcome.exit_codes == (0, 0)
