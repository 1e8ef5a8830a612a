"""Placers under random requests: nothing is given twice, nothing is lost, what is refused changes nothing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gyrostat.core.devices import Fleet
from gyrostat.core.request import JobId
from gyrostat.sched.placers.base import DevicesPlaced, Placer
from gyrostat.sched.placers.nodes import NodePlacer
from gyrostat.sim.sharing import Sharing, build, cluster_of_nodes
from tests.sched.little_cluster import request

steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("place"), st.integers(0, 9), st.sampled_from([1, 2, 3, 4, 8, 12, 16]), st.booleans()
        ),
        st.tuples(st.just("release"), st.integers(0, 9), st.just(0), st.booleans()),
        st.tuples(st.just("lose"), st.integers(0, 3), st.just(0), st.just(False)),
        st.tuples(st.just("mend"), st.integers(0, 3), st.just(0), st.just(False)),
    ),
    max_size=60,
)


def placers() -> list[tuple[Fleet, Placer]]:
    fleet = Fleet.uniform("gpu", 4, 8)
    spec = cluster_of_nodes({"a": 2, "b": 2})
    quotas = {"a": {"gpu": 16}, "b": {"gpu": 16}}
    return [
        (fleet, NodePlacer(fleet, quotas=quotas, lends=True)),
        build(spec, Sharing.CELLS),
        build(spec, Sharing.QUOTA),
    ]


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(0, 2), st.booleans())
def test_every_device_has_one_owner(drawn: list[tuple[str, int, int, bool]], which: int, soft: bool) -> None:
    fleet, placer = placers()[which]
    held: dict[tuple[int, bool], tuple[int, ...]] = {}
    gone: set[int] = set()
    for what, number, devices, borrowed in drawn:
        part = (number, borrowed)
        job = request(f"j{number}", 16, vc="ab"[number % 2], soft=soft, smallest=0)
        if what == "place":
            outcome = placer.place(job, {"gpu": devices}, borrowed)
            if isinstance(outcome, DevicesPlaced):
                assert len(outcome.devices) == devices
                held[part] = outcome.devices
            else:
                assert outcome.reason
            for victim in outcome.victims:
                held.pop((int(victim[1:]), True), None)
        elif what == "release" and part in held:
            placer.release(JobId(f"j{number}"), borrowed)
            del held[part]
        elif what == "lose":
            lost = fleet.nodes[number].devices
            gone.update(lost)
            for hurt, left in placer.remove_devices(lost):
                mine = (int(hurt.job[1:]), hurt.borrowed)
                assert set(left) <= set(held[mine]) - gone
                held[mine] = left
                if not left:
                    del held[mine]
        elif what == "mend":
            gone.difference_update(fleet.nodes[number].devices)
            placer.add_devices(fleet.nodes[number].devices)
        owned = [device for devices in held.values() for device in devices]
        assert len(owned) == len(set(owned))
        assert not gone.intersection(owned)
        for vc in "ab":
            sizes = [len(held[k]) for k in held if not k[1] and "ab"[k[0] % 2] == vc]
            assert sum(sizes) <= 16
    for number, borrowed in list(held):
        placer.release(JobId(f"j{number}"), borrowed)
    placer.add_devices(range(len(fleet)))
    for vc in "ab":
        whole = placer.place(request(f"whole-{vc}", 16, vc=vc), {"gpu": 16}, False)
        assert isinstance(whole, DevicesPlaced)
