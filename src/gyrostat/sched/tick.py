"""One scheduling decision: what has changed in, a plan out. No I/O; time comes with the snapshot.

    1. admit    take in what has happened since the last tick
    2. decide   every VC for which something changed asks its policy about the devices that it is guaranteed;
                each wish is placed at once, so that a policy knows whether it was granted
    3. lend     what nobody uses is lent, to the VC with the least borrowed per weight first
    4. diff     what jobs had before against what they have now: the plan, with what gives devices back first

Guaranteed jobs may drive out borrowers, whose VCs then decide again in the same tick. Borrowers drive out nobody, so
that ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from functools import partial

from gyrostat.core.plan import Action, Plan, Preempt, Resize, Start
from gyrostat.sched.books import Books, VcBook
from gyrostat.sched.policy import Forgive, Pack, Promote, Run, Share, Stop, Wake, Wish, Wishes
from gyrostat.sched.port import Snapshot


def tick(books: Books, snapshot: Snapshot) -> Plan:
    books.admit(snapshot.now, snapshot.changes)
    _decide(books)
    _lend(books)
    actions = tuple(_diff(books))
    books.touched.clear()
    books.reasons.clear()
    return Plan(snapshot.now, actions, books.next_wake())


def _decide(books: Books) -> None:
    while dirty := [book for book in books.vcs.values() if book.dirty]:
        for book in dirty:
            book.dirty = False
            book.view.now = books.now
            wishes = book.policy.decide(book.view, books.now)
            granted: bool | None = None
            while (wish := _next(wishes, granted)) is not None:
                granted = _grant(books, book, wish)


def _lend(books: Books) -> None:
    if not books.placer.lends:
        books.freed = False
        return
    asking = [book for book in books.vcs.values() if book.wants_to_borrow or books.freed]
    books.freed = False
    turns: list[tuple[float, int, VcBook, Wishes, bool | None]] = []
    for number, book in enumerate(asking):
        book.wants_to_borrow = False
        book.view.now = books.now
        heapq.heappush(
            turns, (book.borrowed_share, number, book, book.policy.borrow(book.view, books.now), None)
        )
    while turns:
        _, number, book, wishes, granted = heapq.heappop(turns)
        if (wish := _next(wishes, granted)) is not None:
            granted = _grant(books, book, wish)
            heapq.heappush(turns, (book.borrowed_share, number, book, wishes, granted))


def _next(wishes: Wishes, granted: bool | None) -> Wish | None:
    try:
        return next(wishes) if granted is None else wishes.send(granted)
    except StopIteration:
        return None


def _grant(books: Books, book: VcBook, wish: Wish) -> bool:
    if type(wish) is Run:
        if wish.preempts:
            place = partial(books.place, wish.job, wish.devices, wish.borrowed, wish.reason)
            return books.preempt_for(wish.job, wish.devices, place)
        return books.place(wish.job, wish.devices, wish.borrowed, wish.reason)
    match wish:
        case Stop(job, reason):
            books.stop(job, reason)
            return True
        case Promote(job, reason, preempts):
            promote = partial(books.promote, job, reason)
            of_one_type = len(job.borrowed_counts) == 1  # nobody gives way to a mixture
            preempts = preempts and of_one_type
            return books.preempt_for(job, job.borrowed_counts, promote) if preempts else promote()
        case Share(job, host, reason):
            return books.share(job, host, reason)
        case Forgive(job):
            books.forgive(job)
            return True
        case Pack(job, reason):
            return books.pack(job, reason)
        case Wake(at):
            books.wake(book, at)
            return True
    raise AssertionError(f"no such wish: {wish}")


def _diff(books: Books) -> Iterator[Action]:
    """What gives back before what takes: preemptions, shrinks, then the rest in the order of the decisions."""
    takes: list[Action] = []
    shrinks: list[Action] = []
    for id_, (own, lent) in books.touched.items():
        job = books.jobs.get(id_)
        if job is None:
            continue
        before = tuple(sorted((*own, *lent))) if lent else own
        after = tuple(sorted((*job.devices, *job.borrowed))) if job.borrowed else job.devices
        if before == after and lent == job.borrowed:
            continue
        reason = books.reasons.get(id_, "")
        if job.request.elastic:
            job.before = books.fleet.count(before)
        if not before:
            host = None if job.host is None else job.host.id
            takes.append(Start(id_, after, reason, job.borrowed, host))
        elif not after:
            yield Preempt(id_, before, reason)
        else:
            resize = Resize(id_, before, after, reason, job.borrowed)
            (shrinks if resize.shrinks else takes).append(resize)
    yield from shrinks
    yield from takes
