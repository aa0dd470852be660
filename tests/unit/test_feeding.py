"""What workers that do not wait for each other know of each other's data, whichever assignment each is in."""

from manyhands.data.streams import DataSetStream
from manyhands.engine.feed import Feed
from manyhands.engine.feed_record import Outstanding

LENGTH = 24  # three rounds of two workers with four samples each


def begun(epoch: int = 0) -> Feed:
    feed = Feed(pooled=False)
    stream = DataSetStream(range(LENGTH), batch_size=4, shuffle=True)
    for number in range(epoch + 1):
        feed.begin(stream, epoch=number, seed=0, workers=2, full=2)
        feed.is_over = number < epoch
    return feed


def committed(feed: Feed) -> int:
    feed.commit()
    assert feed.ledger is not None
    return feed.ledger.tally()["once"]


def test_progress_in_the_same_assignment_is_a_number_of_rounds() -> None:
    mine, other = begun(), begun()
    mine.used, other.used = 1, 2
    mine.settle([mine.progress, other.progress])
    assert committed(mine) == 3 * 4


def test_what_was_used_in_an_earlier_assignment_does_not_count_in_this_one() -> None:
    mine, other = begun(epoch=1), begun()
    mine.used, other.used = 1, 3
    mine.settle([mine.progress, other.progress])
    assert committed(mine) == 4


def test_a_worker_with_a_later_assignment_has_used_all_of_this_one() -> None:
    mine, other = begun(), begun(epoch=1)
    mine.used = 1
    assert other.progress > mine.progress
    mine.settle([mine.progress, other.progress])
    assert committed(mine) == (1 + 3) * 4


def test_what_is_outstanding_stays_so_round_by_round() -> None:
    feed = begun()
    feed.drawn, feed.used = 2, 1
    outstanding = feed.outstanding(0)
    assert (len(outstanding.rounds), outstanding.used) == (2, 1)
    feed.assign(2, [Outstanding(), outstanding], worker=1)
    assert (feed.drawn, feed.used) == (2, 1)
    assert committed(feed) == 4, "what was in a step"
    assert len(feed.outstanding(1).rounds) == 1
