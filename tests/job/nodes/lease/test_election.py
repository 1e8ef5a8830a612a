"""The pure election: exact instructions for every event that matters, on a clock that tests set."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gyrostat.core.errors import Misuse
from gyrostat.job.nodes.lease.base import Lease, LeaseView
from gyrostat.job.nodes.lease.election import (
    Acquire,
    Election,
    Follow,
    Lead,
    LeadershipLost,
    LeaseRefused,
    LeaseSeen,
    LeaveElection,
    Look,
    Release,
    Renew,
    Renewed,
    Role,
    StoreLost,
    TimePassed,
    Timing,
    Unreachable,
    Won,
)

TIMING = Timing(ttl=10.0, agents=10)
VACANT = LeaseView(None, 0)


class Midway(random.Random):
    """Draws the middle of every range."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


def candidate() -> Election:
    return Election("me", TIMING, Midway())


def leader(token: int = 5, now: float = 0.0) -> Election:
    election = candidate()
    assert election.handle(TimePassed(), now) == [Look()]
    assert election.handle(LeaseSeen(VACANT, answer=True), now) == []
    assert election.handle(TimePassed(), now + 0.01) == [Acquire()]
    assert election.handle(Won(Lease("me", token, now + 10)), now + 0.01) == [Lead(token)]
    return election


def follower(holder: str = "other", token: int = 5) -> Election:
    election = candidate()
    election.handle(TimePassed(), 0.0)
    view = LeaseView(Lease(holder, token), token)
    assert election.handle(LeaseSeen(view, answer=True), 0.0) == [Follow(holder)]
    return election


def test_it_begins_by_looking_and_asks_one_thing_at_a_time() -> None:
    election = candidate()
    assert election.wake == float("-inf")
    assert election.handle(TimePassed(), 0.0) == [Look()]
    assert election.wake == float("inf")
    assert election.handle(TimePassed(), 100.0) == []


def test_a_vacancy_is_tried_after_the_stagger() -> None:
    election = candidate()
    election.handle(TimePassed(), 0.0)
    assert election.handle(LeaseSeen(VACANT, answer=True), 0.0) == []
    assert (election.role, election.wake) == (Role.CANDIDATE, 0.01)
    assert election.handle(TimePassed(), 0.009) == []
    assert election.handle(TimePassed(), 0.01) == [Acquire()]


def test_a_winner_seen_in_time_keeps_a_candidate_quiet() -> None:
    election = candidate()
    election.handle(TimePassed(), 0.0)
    election.handle(LeaseSeen(VACANT, answer=True), 0.0)
    assert election.handle(LeaseSeen(LeaseView(Lease("other", 1), 1)), 0.005) == [Follow("other")]
    assert election.handle(TimePassed(), 0.01) == []
    assert (election.role, election.wake) == (Role.FOLLOWING, 0.005 + 20.0)


def test_a_refused_candidate_follows() -> None:
    election = candidate()
    election.handle(TimePassed(), 0.0)
    election.handle(LeaseSeen(VACANT, answer=True), 0.0)
    election.handle(TimePassed(), 0.01)
    view = LeaseView(Lease("other", 7), 8)
    assert election.handle(LeaseSeen(view, answer=True), 0.02) == [Follow("other")]


def test_a_leader_renews_after_a_third_of_the_time() -> None:
    election = leader()
    assert election.wake == pytest.approx(0.01 + 9.99 / 3)
    lease = Lease("me", 5, 10.0)
    assert election.handle(TimePassed(), 3.4) == [Renew(lease)]
    assert election.wake == 9.0
    assert election.handle(Renewed(Lease("me", 5, 13.4)), 3.5) == []
    assert (election.token, election.leads_until) == (5, 12.4)


def test_renewals_are_spread() -> None:
    wakes = set()
    for seed in range(50):
        election = Election("me", TIMING, random.Random(seed))
        election.handle(TimePassed(), 0.0)
        election.handle(Won(Lease("me", 1, 9.0)), 0.0)
        wakes.add(election.wake)
    assert len(wakes) == 50
    assert min(wakes) >= 3 * 0.85
    assert max(wakes) <= 3 * 1.15


def test_a_leader_gives_up_a_margin_before_its_lease_expires_though_an_answer_is_to_come() -> None:
    election = leader()
    assert election.handle(TimePassed(), 4.0) == [Renew(Lease("me", 5, 10.0))]
    assert election.handle(TimePassed(), 8.999) == []
    assert election.handle(TimePassed(), 9.0) == [LeadershipLost("it could not renew its lease in time")]
    assert (election.role, election.token) == (Role.CANDIDATE, None)


def test_it_retries_while_the_store_is_silent_and_says_why_it_gave_up() -> None:
    election = leader()
    assert election.handle(TimePassed(), 4.0) == [Renew(Lease("me", 5, 10.0))]
    assert election.handle(Unreachable("no route"), 5.0) == []
    assert election.handle(TimePassed(), 6.0) == [Renew(Lease("me", 5, 10.0))]
    assert election.handle(Unreachable("no route"), 9.5) == [
        LeadershipLost("it could not renew its lease in time: no route"),
        Look(),
    ]


def test_a_renewal_that_is_answered_too_late_is_released() -> None:
    election = leader()
    election.handle(TimePassed(), 4.0)
    election.handle(TimePassed(), 9.0)
    late = Lease("me", 5, 14.0)
    assert election.handle(Renewed(late), 9.1) == [Release(late), Look()]


def test_a_lease_given_up_and_found_again_is_released() -> None:
    election = leader()
    election.handle(TimePassed(), 4.0)
    election.handle(Unreachable("no route"), 9.5)
    mine = LeaseView(Lease("me", 5), 6)
    assert election.handle(LeaseSeen(mine, answer=True), 10.0) == [Release(Lease("me", 5, 10.0))]
    assert election.handle(LeaseSeen(mine), 10.1) == []
    assert election.handle(LeaseSeen(LeaseView(None, 7)), 10.2) == []
    assert election.handle(TimePassed(), 10.3) == [Acquire()]


def test_a_win_that_is_answered_too_late_is_released() -> None:
    election = candidate()
    election.handle(TimePassed(), 0.0)
    election.handle(LeaseSeen(VACANT, answer=True), 0.0)
    election.handle(TimePassed(), 0.01)
    late = Lease("me", 1, 10.01)
    assert election.handle(Won(late), 9.5) == [Release(late)]
    assert election.role is Role.CANDIDATE


def test_a_win_that_the_watch_has_already_seen_end_is_released() -> None:
    election = candidate()
    election.handle(TimePassed(), 0.0)
    election.handle(LeaseSeen(VACANT, answer=True), 0.0)
    election.handle(TimePassed(), 0.01)
    assert election.handle(LeaseSeen(LeaseView(Lease("other", 9), 9)), 0.02) == [Follow("other")]
    lease = Lease("me", 7, 10.0)
    assert election.handle(Won(lease), 0.03) == [Release(lease)]
    assert election.role is Role.FOLLOWING


def test_the_watch_may_report_a_win_before_the_store_replies() -> None:
    election = candidate()
    election.handle(TimePassed(), 0.0)
    election.handle(LeaseSeen(VACANT, answer=True), 0.0)
    election.handle(TimePassed(), 0.01)
    assert election.handle(LeaseSeen(LeaseView(Lease("me", 3), 3)), 0.02) == []
    assert election.handle(Won(Lease("me", 3, 10.0)), 0.03) == [Lead(3)]


def test_a_lease_in_our_name_from_an_earlier_life_is_waited_for() -> None:
    election = candidate()
    election.handle(TimePassed(), 0.0)
    assert election.handle(LeaseSeen(LeaseView(Lease("me", 3), 3), answer=True), 0.0) == []
    assert election.handle(LeaseSeen(LeaseView(None, 4)), 1.0) == []
    assert election.handle(TimePassed(), 1.01) == [Acquire()]


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (LeaseView(None, 6), "its lease is gone from the store"),
        (LeaseView(Lease("other", 8), 8), "other holds the lease now"),
    ],
)
def test_a_leader_believes_the_store(view: LeaseView, why: str) -> None:
    election = leader(token=5)
    following = [Follow("other")] if view.lease else []
    assert election.handle(LeaseSeen(view), 1.0)[: 1 + len(following)] == [LeadershipLost(why), *following]
    assert election.token is None


def test_a_leader_is_notified_that_its_lease_is_over() -> None:
    election = leader(token=5)
    election.handle(TimePassed(), 4.0)
    assert election.handle(LeaseRefused(5), 4.1) == [
        LeadershipLost("the store reports that its lease is not in force"),
        Look(),
    ]


def test_old_views_change_nothing() -> None:
    leading = leader(token=5)
    assert leading.handle(LeaseSeen(LeaseView(None, 4)), 1.0) == []
    assert leading.handle(LeaseSeen(LeaseView(Lease("other", 3), 3)), 1.0) == []
    assert leading.handle(LeaseSeen(LeaseView(Lease("me", 5), 5)), 1.0) == []
    assert leading.token == 5
    following = follower("other", token=5)
    assert following.handle(LeaseSeen(LeaseView(Lease("before", 3), 3)), 1.0) == []
    assert following.handle(LeaseSeen(LeaseView(None, 4)), 1.0) == []
    assert (following.role, following.wake) == (Role.FOLLOWING, 20.0)


def test_a_store_that_answers_with_a_smaller_number_has_lost_its_data() -> None:
    election = leader(token=57)
    assert election.handle(TimePassed(), 3.4) == [Renew(Lease("me", 57, 10))]
    refused = election.handle(LeaseRefused(57), 3.5)
    assert refused == [LeadershipLost("the store reports that its lease is not in force"), Look()]
    lost = StoreLost("it is at revision 2 and was at 57 before")
    assert election.handle(LeaseSeen(LeaseView(None, 2), answer=True), 3.6) == [lost]
    assert (election.role, election.token, election.wake) == (Role.GONE, None, float("inf"))
    assert election.handle(TimePassed(), 100.0) == []


def test_a_lease_with_a_smaller_token_is_of_a_store_that_has_lost_its_data() -> None:
    election = candidate()
    election.handle(TimePassed(), 0.0)
    election.handle(LeaseSeen(LeaseView(None, 57), answer=True), 0.0)
    assert election.handle(TimePassed(), 0.01) == [Acquire()]
    won = Lease("me", 3, 10.0)
    lost = StoreLost("it is at revision 3 and was at 57 before")
    assert election.handle(Won(won), 0.02) == [Release(won), lost]


def test_an_answer_that_is_older_than_what_the_watch_has_brought_meanwhile_is_only_late() -> None:
    election = candidate()
    election.handle(TimePassed(), 0.0)
    assert election.handle(LeaseSeen(LeaseView(Lease("other", 9), 9)), 0.1) == [Follow("other")]
    assert election.handle(LeaseSeen(LeaseView(Lease("one", 8), 8), answer=True), 0.2) == []
    assert election.role is Role.FOLLOWING


def test_a_follower_is_notified_of_each_leader_once() -> None:
    election = follower("other", token=5)
    assert election.handle(LeaseSeen(LeaseView(Lease("other", 5), 9)), 1.0) == []
    assert election.handle(LeaseSeen(LeaseView(Lease("other", 12), 12)), 2.0) == [Follow("other")]
    assert election.handle(LeaseSeen(LeaseView(Lease("third", 20), 20)), 3.0) == [Follow("third")]


def test_a_follower_that_hears_nothing_looks_for_itself() -> None:
    election = follower("other", token=5)
    assert election.handle(TimePassed(), 19.9) == []
    assert election.handle(TimePassed(), 20.0) == [Look()]
    assert election.handle(Unreachable("no route"), 21.0) == []
    assert (election.role, election.wake) == (Role.FOLLOWING, 22.0)
    assert election.handle(TimePassed(), 22.0) == [Look()]
    assert election.handle(LeaseSeen(LeaseView(None, 6), answer=True), 22.0) == []
    assert election.handle(TimePassed(), 22.01) == [Acquire()]


def test_an_agent_that_leaves_stops_leading_before_it_releases_the_lease() -> None:
    election = leader(token=5)
    assert election.handle(LeaveElection(), 1.0) == [
        LeadershipLost("it leaves"),
        Release(Lease("me", 5, 10.0)),
    ]
    assert election.wake == float("inf")
    assert election.handle(LeaseSeen(LeaseView(None, 6)), 2.0) == []
    assert election.handle(TimePassed(), 3.0) == []


def test_an_agent_that_has_left_releases_a_lease_that_it_still_wins() -> None:
    election = candidate()
    election.handle(TimePassed(), 0.0)
    election.handle(LeaseSeen(VACANT, answer=True), 0.0)
    assert election.handle(TimePassed(), 0.01) == [Acquire()]
    assert election.handle(LeaveElection(), 0.02) == []
    lease = Lease("me", 1, 10.0)
    assert election.handle(Won(lease), 0.03) == [Release(lease)]


def test_the_more_agents_the_longer_they_spread() -> None:
    assert [Timing(agents=agents).stagger for agents in (1, 64, 10_000)] == [0.002, 0.128, 0.5]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ttl": 0.0}, "got ttl=0.0"),
        ({"ttl": float("nan")}, "got ttl=nan"),
        ({"agents": 0}, "got agents=0"),
    ],
)
def test_timings_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(Misuse, match=said):
        Timing(**options)
