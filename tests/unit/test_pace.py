"""Schedules go by the samples of the whole run, in steps of the workers that it began with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.data.ledger import Assignment, Ledger
from manyhands.engine.feed_pace import FeedPace

BATCH = 4


def assignment(length: int, workers: int) -> Assignment:
    ledger = Ledger(length, seed=0)
    ledger.assign(batch=BATCH, round_samples=BATCH * workers, workers=workers)
    return ledger.assignment


def pace_of(length: int, workers: int) -> tuple[FeedPace, Assignment]:
    pace, given_out = FeedPace(), assignment(length, workers)
    pace.assign(given_out, [0] * workers, before=0, full=BATCH * workers)
    pace.begin()
    return pace, given_out


@given(
    length=st.integers(1, 90),
    workers=st.integers(1, 4),
    counts=st.lists(st.integers(0, 30), min_size=4, max_size=4),
    held=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    only=st.booleans(),
)
def test_places_are_those_of_the_shares(
    length: int, workers: int, counts: list[int], held: list[int], only: bool
) -> None:
    ledger = Ledger(length, seed=0)
    rows = [
        [[(place, place + 1)] for place in range(worker, length, workers)][:n]
        for worker, n in zip(range(workers), held, strict=False)
    ]
    takers = (0, *range(2, workers)) if only and workers > 1 else ()
    ledger.assign(
        batch=BATCH, round_samples=BATCH * (len(takers) or workers), workers=workers, held=rows, takers=takers
    )
    given_out = ledger.assignment
    used = [
        min(count, given_out.rounds(worker)) for worker, count in zip(range(workers), counts, strict=False)
    ]
    want = sum(len(given_out.share(number, worker)) for worker, n in enumerate(used) for number in range(n))
    assert given_out.used(used) == want
    assert (
        given_out.used([given_out.rounds(worker) for worker in range(workers)]) == given_out.places == length
    )


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("length", [48, 61, 7])
def test_without_deaths_a_step_is_a_step(length: int, stride: int) -> None:
    pace, given_out = pace_of(length, 3)
    rounds = given_out.rounds(0)
    for used in [*range(stride, rounds, stride), rounds]:
        assert pace.step([used] * 3) == 1


def test_steps_of_other_data_count_one_by_one() -> None:
    pace, _ = pace_of(48, 3)
    assert [pace.step([used] * 3) for used in (0, 1, 1, 2)] == [1, 1, 1, 1]


def test_fewer_workers_make_more_steps_and_the_schedule_ends_where_it_would() -> None:
    """Four workers make 6 steps; two go on alone after the first, and make 10 more for the other 5."""
    pace, _ = pace_of(6 * 4 * BATCH, 4)
    assert pace.step([1] * 4) == 1
    ledger = Ledger(6 * 4 * BATCH, seed=0)
    ledger.committed = [(0, 4 * BATCH)]
    ledger.assign(batch=BATCH, round_samples=2 * BATCH, workers=2)
    pace.assign(ledger.assignment, [0, 0], before=4 * BATCH, full=4 * BATCH)
    assert [pace.step([used] * 2) for used in range(1, 11)] == [1, 0] * 5


def test_what_a_death_takes_back_is_not_counted_twice() -> None:
    pace, _ = pace_of(8 * 2 * BATCH, 2)
    for used in range(1, 5):
        pace.step([used, used])
    left = assignment(6 * 2 * BATCH, 1)  # of 4 rounds, two are lost with a worker
    pace.assign(left, [0], before=2 * 2 * BATCH, full=2 * BATCH)
    steps = [pace.step([used]) for used in range(1, 13)]
    assert steps[:4] == [0, 0, 0, 0]
    assert sum(steps) == 4


def test_workers_that_do_not_step_together_go_by_what_all_have_used() -> None:
    pace, _ = pace_of(8 * 2 * BATCH, 2)
    assert pace.step([0, 1], worker=1) == 1
    assert pace.step([0, 2], worker=1) == 0
    assert pace.step([4, 3], worker=1) == 3
    assert pace.catch_up([8, 8]) == 4
    assert pace.counted == 8
