"""A job on several nodes ends with the bits of plain DDP, and every node's command says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.determinism.test_digests import ZOO
from tests.job.agents import Agents


def test_two_nodes_end_with_the_digest_of_ddp(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYROSTAT_RUNTIME_DIR", str(tmp_path / "run"))
    reference = launch(ZOO, virtual_workers=4, reference=True, args=["loops"])
    job = ["--nodes", "2", "-n", "4", "--schedule", "0:2,2:3,4:1", str(ZOO), "loops"]
    agents = Agents(tmp_path, f"file://{tmp_path}/store", job)
    try:
        both = [agents.start("a"), agents.start("b")]
        assert [agent.finish() for agent in both] == [0, 0]
        for agent in both:
            agent.wait_for(f"digest {reference.digest}")
        assert any("on 3 workers instead of 2" in line for agent in both for line in agent.lines)
    finally:
        agents.close()
