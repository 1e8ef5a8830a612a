"""What the coordinator instructs, exactly: assignment, a move, a checkpoint, the loss of a server by each way of recovery."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyrostat.core.errors import UsageError
from gyrostat.data.shards.layout import ShardLayout
from gyrostat.data.shards.messages import AskShard, ReportVerdict, Shard, ShardReport
from gyrostat.data.shards.queues import Queues
from gyrostat.ps.protocol.coordinator import (
    Instruction,
    SendToServer,
    ServerCoordinator,
    ServerRecovery,
    StopServer,
    WriteManifest,
)
from gyrostat.ps.protocol.delivery import Delivery, ShardBatches, check_batches
from gyrostat.ps.protocol.exchange import BatchRange, ExchangeStatus
from gyrostat.ps.protocol.messages import (
    AssumeTerm,
    CancelMove,
    DropSlot,
    ForgetEpochs,
    FromServer,
    MirrorReady,
    MoveSlot,
    OwnSlots,
    SaveSlot,
    SetMirror,
    SlotArrived,
    SlotSaved,
    TermAssumed,
)
from gyrostat.ps.protocol.slot_map import PlannedMove, SlotMap, plan_moves
from gyrostat.ps.store.hashing import MAX_SLOTS

A, B = ("10.0.0.1", 1), ("10.0.0.2", 2)


def _coordinator(recovery: ServerRecovery, *, servers: int = 2, slots: int = 4) -> ServerCoordinator:
    """Servers a, b, … have assumed term 0."""
    queues = Queues(ShardLayout.of_indices(40, 10), shuffle=False, lease_seconds=float("inf"))
    made = ServerCoordinator(slots, queues, recovery, servers=servers)
    for name in "abc"[:servers]:
        made.server_joined(name, A)
    for name in "abc"[:servers]:
        made.message(name, TermAssumed(0))
    return made


def _saved(made: ServerCoordinator, number: int) -> None:
    for slot, owner in enumerate(made.map.owners):
        assert owner is not None
        for instruction in made.message(owner, SlotSaved(number, slot, f"file-{slot}")):
            assert isinstance(instruction, WriteManifest)
            made.manifest_written(instruction.checkpoint)


def _tell(made: ServerCoordinator, *messages: tuple[str, FromServer]) -> list[Instruction]:
    return [each for name, message in messages for each in made.message(name, message)]


def test_slots_are_assigned_when_all_awaited_servers_are_there() -> None:
    queues = Queues(ShardLayout.of_indices(40, 10))
    made = ServerCoordinator(4, queues, ServerRecovery.EXACT, servers=2)
    assert made.server_joined("a", A) == []
    assert made.map.owners.count(None) == 4
    assert made.server_joined("b", B) == [
        SendToServer("a", AssumeTerm(0, {0: "", 2: ""}, drop_others=True)),
        SendToServer("b", AssumeTerm(0, {1: "", 3: ""}, drop_others=True)),
    ]
    assert made.map.owners == ("a", "b", "a", "b")
    assert made.map.addresses == {"a": A, "b": B}
    assert not made.settled
    assert _tell(made, ("a", TermAssumed(0)), ("b", TermAssumed(0))) == []
    assert made.settled


def test_a_newcomer_gets_slots_one_after_the_other() -> None:
    made = _coordinator(ServerRecovery.EXACT, servers=1)
    before = made.map.version
    assert made.server_joined("b", B) == [SendToServer("b", AssumeTerm(0, {}))]
    assert made.message("b", TermAssumed(0)) == [SendToServer("a", MoveSlot(0, 1, "b"))]
    assert made.map.owners == ("a",) * 4
    assert made.message("b", SlotArrived(0, 1)) == [
        SendToServer("b", OwnSlots({0: 1})),
        SendToServer("a", DropSlot(0, 1)),
        SendToServer("a", MoveSlot(1, 2, "b")),
    ]
    assert made.map.owners == ("b", "a", "a", "a")
    assert made.map.version > before
    _tell(made, ("b", SlotArrived(1, 2)))
    assert made.map.owners == ("b", "b", "a", "a")
    assert made.settled


def test_a_server_leaves_when_its_slots_have_moved() -> None:
    made = _coordinator(ServerRecovery.EXACT)
    assert made.server_leaving("a") == [SendToServer("a", MoveSlot(0, 1, "b"))]
    made.message("b", SlotArrived(0, 1))
    assert made.message("b", SlotArrived(2, 2))[-1] == StopServer("a")
    assert made.map.owners == ("b",) * 4
    assert made.map.addresses.keys() == {"b"}


def test_a_late_copy_of_a_move_that_was_cancelled_is_discarded() -> None:
    made = _coordinator(ServerRecovery.PARTIAL)
    made.server_leaving("a")
    made.server_lost("a", 0.0)
    assert made.message("b", SlotArrived(0, 1)) == [SendToServer("b", CancelMove(0, 1))]


def test_a_move_to_a_lost_server_is_cancelled() -> None:
    made = _coordinator(ServerRecovery.EXACT, servers=1)
    made.server_joined("b", B)
    made.message("b", TermAssumed(0))
    assert made.server_lost("b", 0.0) == [SendToServer("a", CancelMove(0, 1))]
    assert made.queues.term == 0  # nothing was lost with it


def test_a_checkpoint_takes_the_queues_first() -> None:
    made = _coordinator(ServerRecovery.EXACT)
    first = made.answer(AskShard("w", 0), 0.0)
    assert isinstance(first, Shard)
    assert made.checkpoint_due() == [
        SendToServer("a", SaveSlot(1, 0)),
        SendToServer("b", SaveSlot(1, 1)),
        SendToServer("a", SaveSlot(1, 2)),
        SendToServer("b", SaveSlot(1, 3)),
    ]
    made.answer(ShardReport("w", 0, ((first.lease, 10),)), 0.0)  # not in this checkpoint
    assert _tell(made, *[("b", SlotSaved(1, slot, f"f{slot}")) for slot in (3, 1, 2)]) == []
    (write,) = made.message("a", SlotSaved(1, 0, "f0"))
    assert isinstance(write, WriteManifest)
    assert write.checkpoint.files == {0: "f0", 1: "f1", 2: "f2", 3: "f3"}
    assert len(write.checkpoint.queues["doing"]) == 1
    assert made.checkpoint.number == 0
    assert made.manifest_written(write.checkpoint) == [
        SendToServer("a", ForgetEpochs(0)),
        SendToServer("b", ForgetEpochs(0)),
    ]
    assert made.checkpoint is write.checkpoint


def test_a_checkpoint_waits_for_a_move_and_the_next_move_for_the_checkpoint() -> None:
    made = _coordinator(ServerRecovery.EXACT)
    made.server_leaving("a")
    assert made.checkpoint_due() == []
    done = made.message("b", SlotArrived(0, 1))
    assert done[2] == SendToServer("b", SaveSlot(2, 0))
    assert not any(isinstance(each, SendToServer) and isinstance(each.message, MoveSlot) for each in done)


def test_exact_all_slots_and_the_queues_go_back() -> None:
    made = _coordinator(ServerRecovery.EXACT)
    made.checkpoint_due()
    _saved(made, 1)
    shard = made.answer(AskShard("w", 0), 0.0)
    assert isinstance(shard, Shard)
    report = ShardReport("w", 0, ((shard.lease, 10),))
    assert made.answer(report, 0.0) == ReportVerdict(True)
    assert made.queues.done == 10
    assert made.server_lost("b", 0.0) == [
        SendToServer("a", AssumeTerm(1, {slot: f"file-{slot}" for slot in range(4)}, drop_others=True))
    ]
    assert (made.queues.done, made.queues.todo, made.queues.term) == (0, 40, 1)
    again = made.answer(report, 0.0)
    assert isinstance(again, ReportVerdict)
    assert not again.accepted
    assert "of term 0; this is term 1" in again.reason


def test_partial_only_the_lost_slots_go_back() -> None:
    made = _coordinator(ServerRecovery.PARTIAL, servers=3)
    assert made.map.owners == ("a", "b", "c", "a")
    assert made.server_lost("b", 0.0) == [
        SendToServer("a", AssumeTerm(1, {})),
        SendToServer("c", AssumeTerm(1, {1: ""})),
    ]
    # Another one, before those slots are loaded: they are loaded again under the next term.
    assert made.server_lost("a", 0.0) == [SendToServer("c", AssumeTerm(2, {0: "", 1: "", 3: ""}))]


def test_replica_mirrors_take_over_and_nothing_goes_back() -> None:
    queues = Queues(ShardLayout.of_indices(40, 10))
    made = ServerCoordinator(2, queues, ServerRecovery.REPLICA, servers=2)
    made.server_joined("a", A)
    made.server_joined("b", B)
    made.message("a", TermAssumed(0))
    assert made.message("b", TermAssumed(0)) == [
        SendToServer("a", SetMirror(0, 1, "b")),
        SendToServer("b", SetMirror(1, 2, "a")),
    ]
    made.message("b", MirrorReady(0, 1))
    made.message("a", MirrorReady(1, 2))
    assert made.server_lost("a", 0.0) == [
        SendToServer("b", SetMirror(1, 2, None)),
        SendToServer("b", OwnSlots({0: 1})),
    ]
    assert made.map.owners == ("b", "b")
    assert queues.term == 0


def test_replica_without_a_complete_mirror_is_exact() -> None:
    made = _coordinator(ServerRecovery.REPLICA)
    made.server_lost("a", 0.0)  # its mirrors were still on their way
    assert made.queues.term == 1


def test_all_servers_are_lost_and_one_comes() -> None:
    made = _coordinator(ServerRecovery.EXACT)
    made.server_lost("a", 0.0)
    assert made.server_lost("b", 0.0) == []
    assert made.map.owners.count(None) == 4
    assert made.server_joined("c", A) == [
        SendToServer("c", AssumeTerm(2, dict.fromkeys(range(4), ""), drop_others=True))
    ]


def test_moves_even_out_loads() -> None:
    assert plan_moves(["a"] * 4, {"a": 1, "b": 1}) == [PlannedMove(0, "a", "b"), PlannedMove(1, "a", "b")]
    assert plan_moves(["a", "b", "a", "b"], {"a": 1, "b": 1}) == []
    assert plan_moves(["a", "b", "a", "b"], {"b": 1, "c": 1}) == [
        PlannedMove(0, "a", "c"),
        PlannedMove(2, "a", "c"),
    ]
    # One hot slot: the others leave its server.
    assert plan_moves(["a", "a", "a", "b"], {"a": 1, "b": 1}, [9.0, 1.0, 1.0, 1.0]) == [
        PlannedMove(1, "a", "b"),
        PlannedMove(2, "a", "b"),
    ]
    # A server of three cores carries three times as much.
    assert [move.target for move in plan_moves(["a"] * 8, {"a": 1, "b": 3})] == ["b"] * 6
    assert plan_moves(["a"], {}) == []


@given(
    owners=st.lists(st.sampled_from(["a", "b", "c", "gone"]), min_size=1, max_size=40),
    cores=st.tuples(*[st.integers(1, 4)] * 3),
    data=st.data(),
)
def test_after_the_planned_moves_no_single_move_helps(
    owners: list[str], cores: tuple[int, ...], data: st.DataObject
) -> None:
    servers = dict(zip("abc", map(float, cores), strict=True))
    weights = [
        load / 4
        for load in data.draw(st.lists(st.integers(0, 40), min_size=len(owners), max_size=len(owners)))
    ]
    after: list[str] = list(owners)
    for move in plan_moves(owners, servers, weights):
        assert after[move.slot] == move.source != move.target
        after[move.slot] = move.target
    assert "gone" not in after

    def load(name: str, more: float = 0.0) -> float:
        return (
            sum(weight for weight, owner in zip(weights, after, strict=True) if owner == name) + more
        ) / servers[name]

    busiest, idlest = max(servers, key=load), min(servers, key=load)
    mine = [weight for weight, owner in zip(weights, after, strict=True) if owner == busiest]
    assert not any(load(idlest, weight) < load(busiest) - 1e-6 for weight in mine)


def test_the_most_slots_are_planned_between_two_messages() -> None:
    moves = plan_moves(["a"] * MAX_SLOTS, {"a": 1, "b": 1, "c": 1, "d": 1})
    assert len(moves) == MAX_SLOTS * 3 // 4


def test_a_delivery_repeats_what_was_not_answered() -> None:
    old = SlotMap(1, 0, ("a", "a", "b", None), {"a": A, "b": B})
    delivery = Delivery(4)
    assert delivery.to_send(old) == {"a": [0, 1], "b": [2]}
    assert delivery.to_send(old) == {}
    delivery.answered("a", ExchangeStatus.MOVED)
    delivery.answered("b", ExchangeStatus.DONE)
    assert delivery.outdated
    assert delivery.to_send(SlotMap(2, 0, ("a", "b", "b", "b"), {"a": A, "b": B})) == {"a": [0], "b": [1, 3]}
    delivery.disconnected("a")
    delivery.answered("b", ExchangeStatus.DONE)
    assert delivery.to_send(old) == {"a": [0]}
    delivery.answered("a", ExchangeStatus.STALE)
    assert delivery.done
    assert delivery.dropped


def test_batches_of_a_shard() -> None:
    work = ShardBatches(Shard(0, 0, 1, None, 20, 35), 5)
    assert work.asked == BatchRange(1, 4, 3)
    assert list(work) == [(4, range(20, 25)), (5, range(25, 30)), (6, range(30, 35))]
    work.skip([False, True, False])
    assert [number for number, _ in work] == [4, 6]
    check_batches(20, 5)
    with pytest.raises(UsageError, match="shard_size must be a multiple of batch_size 5, got 21"):
        check_batches(21, 5)


def test_queues_go_back_to_an_earlier_epoch() -> None:
    queues = Queues(ShardLayout.of_indices(20, 10), lease_seconds=float("inf"))
    saved = queues.to_state()
    for epoch in (0, 0, 1):
        shard = queues.ask(AskShard("w", epoch), 0.0)
        assert isinstance(shard, Shard)
        if epoch == 0:
            queues.report(ShardReport("w", 0, ((shard.lease, 10),)), 0.0)
    assert (queues.epoch, queues.doing) == (1, 10)
    queues.roll_back(saved, term=1, now=0.0)
    assert (queues.epoch, queues.todo, queues.doing, queues.term) == (0, 20, 0, 1)
    shard = queues.ask(AskShard("w", 0), 0.0)
    assert isinstance(shard, Shard)
    assert (shard.term, shard.epoch, shard.lease) == (1, 0, 3)
