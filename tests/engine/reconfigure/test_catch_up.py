"""A newcomer that replays a donor's updates has its bits at the fence, or receives all state there, with the reason."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gyrostat.core.job import NextGeneration
from gyrostat.core.placement import Placement
from gyrostat.engine.reconfigure import catch_up
from gyrostat.engine.reconfigure.catch_up import StateReceiver, StateSender, checksums
from gyrostat.engine.reconfigure.state_wire import StateWire
from gyrostat.engine.state.digest import digest

TIMEOUT = 20.0


class Replica:
    """A model with an optimizer of two groups, whose learning rate moves."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator))
        groups: list[dict[str, Any]] = [
            {"params": self.model[0].parameters()},
            {"params": self.model[1].parameters(), "weight_decay": 0.1},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.1)
        self._generator = torch.Generator().manual_seed(3)

    def update(self, stream: StateSender | None = None) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9
        for number, parameter in enumerate(self.model.parameters()):
            parameter.grad = torch.rand(parameter.shape, generator=self._generator) if number != 1 else None
        if stream is not None:
            stream.settle()
            stream.before_update("optimizer", self.optimizer, repeatable=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # what was sent must have been copied

    @property
    def digest(self) -> str:
        return digest(model=self.model, optimizer=self.optimizer)


class Newcomer(threading.Thread):
    """Follows until the fence, in a thread."""

    def __init__(self, plan: NextGeneration, member: int, meddle: Callable[[Replica], None]) -> None:
        super().__init__(daemon=True)
        self.replica = Replica(seed=member)
        self.caught_up = threading.Event()
        self.rest: Any = None
        self.follower: StateReceiver | None = None
        self._plan, self._member, self._meddle = plan, member, meddle
        self.start()

    def run(self) -> None:
        wire = StateWire(self._plan, self._member, TIMEOUT)
        self.follower = StateReceiver(wire, {"optimizer": self.replica.optimizer})
        self.rest = self.follower.follow(
            self.caught_up.set, take_hints=lambda hints: None, take_data=lambda data: None
        )
        self._meddle(self.replica)
        self.follower.confirm()


class World:
    def __init__(self, tmp_path: Path, newcomers: int, meddle: Callable[[Replica], None]) -> None:
        plan = NextGeneration(
            generation=2,
            placement=Placement.even(8, 1 + newcomers),
            members=tuple(range(1 + newcomers)),
            newcomers=tuple(range(1, 1 + newcomers)),
            donor=0,
            store=str(tmp_path / "store"),
        )
        self.newcomers = [Newcomer(plan, member, meddle) for member in plan.newcomers]
        self.donor = Replica(seed=0)
        self.donor.update()
        self.wire = StateWire(plan, 0, TIMEOUT)
        self.stream = StateSender(self.wire, {"optimizer": self.donor.optimizer})

    def wait(self) -> None:
        for newcomer in self.newcomers:
            assert newcomer.caught_up.wait(TIMEOUT)

    def end(self) -> list[str | None]:
        """The fence; why each newcomer had to receive all state there."""
        self.stream.at_fence()
        self.stream.end({"epoch": 3, "buffer": torch.arange(4)})
        self.stream.join()
        reasons = []
        for newcomer in self.newcomers:
            newcomer.join(TIMEOUT)
            assert newcomer.follower is not None
            assert newcomer.rest["epoch"] == 3
            assert newcomer.rest["buffer"].tolist() == [0, 1, 2, 3]
            reasons.append(newcomer.follower.why_not)
        return reasons


Build = Callable[..., World]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return lambda newcomers=1, meddle=lambda replica: None: World(tmp_path, newcomers, meddle)


@pytest.mark.parametrize("newcomers", [1, 3])
@pytest.mark.parametrize("shared", [True, False])
def test_newcomers_have_the_donors_bits_at_the_fence(
    build: Build, newcomers: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shared:
        monkeypatch.delattr(os, "memfd_create")
    world = build(newcomers)
    assert world.wire.shared is shared
    for _ in range(3):
        world.donor.update(world.stream)
    world.wait()
    for _ in range(2):
        world.donor.update(world.stream)
    assert world.end() == [None] * newcomers
    assert {newcomer.replica.digest for newcomer in world.newcomers} == {world.donor.digest}


def test_a_difference_is_found_and_all_state_sent(build: Build) -> None:
    def meddle(replica: Replica) -> None:
        list(replica.model.parameters())[1].data[2] += 1e-6

    world = build(meddle=meddle)
    world.donor.update(world.stream)
    world.wait()
    (reason,) = world.end()
    assert reason is not None
    assert "checksums differ" in reason
    assert "parameters.optimizer.1" in reason
    assert world.newcomers[0].replica.digest == world.donor.digest


def test_what_does_not_fit_is_sent_at_the_fence(build: Build) -> None:
    """The newcomer's optimizer cannot replay; by the fence the script has mended that."""

    def mend(replica: Replica) -> None:
        replica.optimizer.param_groups[1]["params"] = list(replica.model[1].parameters())

    world = build(meddle=mend)
    world.newcomers[0].replica.optimizer.param_groups[1]["params"] = []
    world.wait()
    world.donor.update(world.stream)
    (reason,) = world.end()
    assert reason is not None
    assert "replaying failed" in reason
    assert world.newcomers[0].replica.digest == world.donor.digest


def test_a_closure_cannot_be_replayed(build: Build) -> None:
    world = build()
    world.wait()
    world.stream.before_update("optimizer", world.donor.optimizer, repeatable=False)
    assert world.end() == ["optimizer makes its updates by a closure, which only the script can call"]


@pytest.mark.parametrize("limit", [{"_ROOM_FOR_UPDATES": 0}, {"_MOST": 4}])
def test_newcomers_that_cannot_keep_up(
    build: Build, monkeypatch: pytest.MonkeyPatch, limit: dict[str, int]
) -> None:
    """The memory and the number of updates that wait are bounded, and training never waits: newcomers of a job with short steps
    would otherwise never catch up."""
    for name, value in limit.items():
        monkeypatch.setattr(catch_up, name, value)
    hold, held = threading.Event(), threading.Event()
    replay = StateReceiver._replay

    def slow(self: StateReceiver, update: Any) -> None:
        held.set()
        assert hold.wait(TIMEOUT)
        replay(self, update)

    monkeypatch.setattr(StateReceiver, "_replay", slow)
    world = build()
    world.wait()
    world.donor.update(world.stream)
    assert held.wait(TIMEOUT)
    for _ in range(10):
        world.donor.update(world.stream)
    assert world.stream.broken is not None
    hold.set()
    (reason,) = world.end()
    assert reason is not None
    assert "could not keep up: 4 updates" in reason


def test_a_newcomer_that_goes_away_does_not_disturb_the_donor(tmp_path: Path) -> None:
    plan = NextGeneration(
        generation=2,
        placement=Placement.even(2, 2),
        members=(0, 1),
        newcomers=(1,),
        donor=0,
        store=str(tmp_path / "store"),
    )

    def come_and_go() -> None:
        wire = StateWire(plan, 1, TIMEOUT)
        wire.receive().acknowledge()
        wire.close()

    newcomer = threading.Thread(target=come_and_go)
    newcomer.start()
    donor = Replica(seed=0)
    stream = StateSender(StateWire(plan, 0, TIMEOUT), {"optimizer": donor.optimizer})
    newcomer.join(TIMEOUT)
    stream.join()
    donor.update(stream)
    assert stream.broken is None


def test_checksums_name_every_tensor_and_see_every_byte() -> None:
    replica = Replica(seed=0)
    replica.update()
    before = checksums({"optimizer": replica.optimizer})
    assert len(before) > 12
    weight = next(replica.model.parameters()).data.view(torch.uint8)
    for byte in (0, weight.numel() - 1):
        weight.view(-1)[byte] ^= 1
        after = checksums({"optimizer": replica.optimizer})
        assert [name for name in before if before[name] != after[name]] == ["parameters.optimizer.0"]
        weight.view(-1)[byte] ^= 1
    large = torch.zeros(3 * 4096 * 2 + 5)
    sums = set()
    for place in (None, 0, 1, 4096 * 2, 3 * 4096 * 2 + 4):
        changed = large.clone()
        if place is not None:
            changed[place] = 1.0
        sums.add(catch_up._checksum(changed))
    assert len(sums) == 4  # words of one column count alike wherever they stand
