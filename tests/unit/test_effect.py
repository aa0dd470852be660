"""Which replica has the effect of which samples, and that the audit sees an effect that is lost."""

from collections.abc import Sequence

import pytest
import torch

from manyhands.data.effect import Effects, Learners
from manyhands.data.ledger import Ledger, ranges_of
from manyhands.data.streams import DataSetStream
from manyhands.engine.feed import Feed
from manyhands.engine.feed_record import Outstanding
from manyhands.engine.step import exchanges
from manyhands.strategies import parse
from manyhands.strategies.partners import pairs, partner

BATCH = 4
ROUNDS = 5


def ledger(workers: int) -> Ledger:
    made = Ledger(ROUNDS * BATCH * workers, seed=0)
    made.assign(batch=BATCH, round_samples=BATCH * workers, workers=workers)
    return made


def rounds_in(found: torch.Tensor, workers: int) -> list[int]:
    """How many rounds of each worker are among these places."""
    assignment = ledger(workers).assignment
    return [
        sum(bool(found[assignment.share(number, worker)].all()) for number in range(ROUNDS))
        for worker in range(workers)
    ]


def test_news_goes_from_pair_to_pair() -> None:
    effects = Effects([torch.zeros(ROUNDS * BATCH * 3, dtype=torch.bool)] * 3)
    effects.meet([1, 1, 1], [[0, 1]])
    effects.meet([2, 2, 2], [[1, 2]])
    assignment = ledger(3).assignment
    seen = [rounds_in(effects.of(worker, 2, assignment), 3) for worker in range(3)]
    assert seen == [[2, 1, 0], [1, 2, 2], [1, 2, 2]], "worker 0's second round is nowhere else"
    effects.meet([3, 3, 3])
    assert rounds_in(effects.of(0, 3, assignment), 3) == [3, 3, 3]


def feeds(workers: int, meetings: Sequence[tuple[int, Learners | None]]) -> list[Feed]:
    """Of all workers, which have used a round in each step; in some steps they meet."""
    made = []
    stream = DataSetStream(range(ROUNDS * BATCH * workers), batch_size=BATCH, shuffle=True)
    for worker in range(workers):
        feed = Feed(pooled=False)
        feed.begin(stream, epoch=0, seed=0, workers=workers, full=workers)
        assert feed.assignment is not None
        for step, groups in meetings:
            feed.drawn = feed.used = step
            feed.audit.used += ranges_of(feed.assignment.share(step - 1, worker))
            feed.note([step] * workers)
            feed.commit(groups)
        made.append(feed)
    return made


def go_on(feeds: Sequence[Feed], survivors: Sequence[int]) -> list[Feed]:
    """The others have died."""
    held = [feeds[worker].outstanding(worker) for worker in survivors]
    for place, worker in enumerate(survivors):
        feeds[worker].assign(len(survivors), held, place)
    return [feeds[worker] for worker in survivors]


def never(feed: Feed, everyone: Sequence[Feed]) -> int:
    """Samples whose effect nobody has, by the audit, when all that is left was used."""
    assert feed.ledger is not None
    notes = [one.audit.used for one in everyone]
    times = feed.audit.count(notes)
    dealt = [feed.ledger.assignment.rest]
    dealt += [places for worker in feed.ledger.assignment.held for places in worker]
    for places in dealt:
        times[places] = times[places].clamp(min=1)
    return int((times == 0).sum())


LOST = [
    ([(1, [[0, 1]])], [0, 1], 4, "the worker that sat out has its samples alone"),
    ([(1, [[0, 1]]), (2, [[1, 2]])], [1, 2], 4, "the second round of worker 0"),
    ([(1, [[0, 1]])], [2], 8, "the only two that had them"),
    ([(1, [[0, 1]]), (2, None)], [2], 0, "all have met since"),
]


@pytest.mark.parametrize(("meetings", "survivors", "lost", "why"), LOST)
def test_what_died_with_its_only_holders_is_assigned_again(
    meetings: list[tuple[int, Learners | None]], survivors: list[int], lost: int, why: str
) -> None:
    left = go_on(feeds(3, meetings), survivors)
    for feed in left:
        assert feed.ledger is not None
        assert never(feed, left) == 0
        held = sum(len(places) for worker in feed.ledger.assignment.held for places in worker)
        assert feed.ledger.tally()["once"] + held == len(meetings) * 12 - lost, why


@pytest.mark.parametrize(("meetings", "survivors", "lost", "why"), LOST)
def test_the_audit_sees_a_lost_effect_that_the_ledger_has_committed(
    meetings: list[tuple[int, Learners | None]],
    survivors: list[int],
    lost: int,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ledger that commits whatever was used, as if all had met, and is not told better."""
    honest = Ledger.commit
    monkeypatch.setattr(Ledger, "commit", lambda self, drawn: honest(self, [max(drawn)] * len(drawn)))
    monkeypatch.setattr(Ledger, "correct", lambda self, counted: None)
    left = go_on(feeds(3, meetings), survivors)
    for feed in left:
        assert never(feed, left) == lost, why


def test_a_new_worker_has_what_the_first_one_has() -> None:
    zero, one, two = feeds(3, [(1, [[0, 1]])])
    held = [zero.outstanding(0), one.outstanding(1), two.outstanding(2), Outstanding()]
    new = Feed(pooled=False)
    new.adopt(zero.record(), 0, is_in_loop=False, keeps=False)
    for worker, feed in enumerate([zero, one, two, new]):
        feed.assign(4, held, worker)
    left = go_on([zero, one, two, new], [2, 3])
    assert all(never(feed, left) == 0 for feed in left)
    assert left[0].ledger is not None
    assert left[0].ledger.tally()["once"] == 8, "of workers 0 and 1, by the one that came"


@pytest.mark.parametrize("size", range(1, 8))
def test_pairs_are_what_partners_say(size: int) -> None:
    for meeting in range(20):
        drawn = pairs(size, meeting)
        assert sorted(worker for pair in drawn for worker in pair) == list(range(size))
        assert {len(pair) for pair in drawn[:-1]} <= {2}
        for pair in drawn:
            assert [partner(worker, size, meeting) for worker in pair] == pair[::-1]


@pytest.mark.parametrize(
    ("strategy", "steps", "hosts", "want"),
    [
        ("gossip", 4, [[0, 1, 2]], pairs(3, 5)),
        ("gossip:every=2", 3, [[0, 1], [2]], pairs(3, 2)),
        ("tournament:every=4", 8, [[0, 1, 2]], pairs(3, 2)),
        ("hierarchical-local-sgd:groups=2", 1, [[0, 1, 2]], [[0], [1, 2]]),
        ("hierarchical-local-sgd", 1, [[0, 1], [2]], [[0, 1], [2]]),
        ("hierarchical-local-sgd:groups=2", 7, [[0, 1, 2]], None),
        ("local-sgd", 7, [[0, 1, 2]], None),
        ("all-reduce", 0, [[0, 1, 2]], None),
    ],
)
def test_who_meets(strategy: str, steps: int, hosts: list[list[int]], want: Learners | None) -> None:
    found = parse(strategy)
    assert exchanges(steps, found.period, late=found.traits.late)
    groups = found.who_meets(steps, hosts)
    assert (groups and [list(group) for group in groups]) == want
