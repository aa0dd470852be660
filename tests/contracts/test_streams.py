"""Several streams of data in one session: each has its own samples, its own count, and survives by itself."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manyhands.cluster.worker.world import World
from manyhands.engine.session import Session
from manyhands.errors import UsageError
from tests.contracts.test_resuming import EVERY_KIND
from tests.contracts.test_sessions import Numbered, make_session, numbers
from tests.threads import in_threads

A, B = 48, 72  # of the two data sets

Batch = tuple[Tensor, Tensor]


def joined(a: Batch, b: Batch) -> Batch:
    return torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])


def run(
    loop: Callable[[Session, Numbered, Numbered], tuple[list[int], list[int]]],
    *,
    workers: int = 3,
    strategy: str = "all-reduce",
    **more: Any,
) -> tuple[list[int], list[int], dict[str, Any]]:
    """The samples of both data sets that all workers have used, and the report."""

    def work(world: World) -> tuple[list[int], list[int], dict[str, Any]]:
        session = make_session(world, strategy, **more)
        ours, theirs = loop(session, Numbered(A), Numbered(B))
        session.close()
        return ours, theirs, session.summary()["committed"]

    results = in_threads(workers, work, strategy=strategy)
    assert all(result[2] == results[0][2] for result in results)
    both = [sorted(number for result in results for number in result[which]) for which in (0, 1)]
    return both[0], both[1], results[0][2]


def zipped(session: Session, a: Numbered, b: Numbered) -> tuple[list[int], list[int]]:
    ours: list[int] = []
    theirs: list[int] = []
    for one, other in zip(session.batches(a, batch_size=4), session.batches(b, batch_size=6), strict=False):
        session.step(joined(one, other))
        ours += numbers(one)
        theirs += numbers(other)
    return ours, theirs


def nested(session: Session, a: Numbered, b: Numbered) -> tuple[list[int], list[int]]:
    """Every batch of the outer loop is used after the whole inner one."""
    ours: list[int] = []
    theirs: list[int] = []
    for one in session.batches(a, batch_size=8):
        for other in session.batches(b, batch_size=6):
            session.step(other)
            theirs += numbers(other)
        session.step(one)
        ours += numbers(one)
    return ours, theirs


def endless(session: Session, a: Numbered, b: Numbered) -> tuple[list[int], list[int]]:
    """The second data set begins again when it is over, as semi-supervised training does."""
    ours: list[int] = []
    theirs: list[int] = []
    more: Iterator[Batch] = iter(session.batches(b, batch_size=12))
    for _ in range(2):
        for one in session.batches(a, batch_size=4):
            try:
                other = next(more)
            except StopIteration:
                more = iter(session.batches(b, batch_size=12))
                other = next(more)
            session.step((torch.cat([one[0], other[0]]), torch.cat([one[1], other[1]])))
            ours += numbers(one)
            theirs += numbers(other)
    del more
    return ours, theirs


@pytest.mark.parametrize("strategy", EVERY_KIND)
def test_two_data_sets_at_once_have_each_its_own_samples(strategy: str) -> None:
    """4 rounds of 12 and of 18 samples."""
    ours, theirs, report = run(zipped, strategy=strategy)
    assert ours == list(range(A))
    assert theirs == list(range(B))
    assert (report["once"], report["twice"], report["never"], report["left"]) == (A + B, 0, 0, 0)


@pytest.mark.parametrize("strategy", EVERY_KIND)
def test_a_loop_inside_of_another_is_an_epoch_of_its_own(strategy: str) -> None:
    ours, theirs, report = run(nested, strategy=strategy)
    assert ours == list(range(A))
    assert theirs == sorted(2 * list(range(B)))
    assert [(row["once"], row["twice"], row["never"]) for row in report["epochs"]] == [
        (B, 0, 0),
        (B, 0, 0),
        (A, 0, 0),
    ]


@pytest.mark.parametrize("strategy", ["all-reduce", "hogwild", "parameter-server:async"])
def test_a_data_set_that_begins_again_inside_of_a_loop(strategy: str) -> None:
    ours, theirs, report = run(endless, strategy=strategy)
    assert ours == sorted(2 * list(range(A)))
    assert theirs == sorted(4 * list(range(B)))
    assert (report["once"], report["twice"], report["never"], report["left"]) == (2 * A + 4 * B, 0, 0, 0)


def test_epochs_of_both_are_shuffled_anew() -> None:
    def work(world: World) -> list[tuple[list[int], list[int]]]:
        session = make_session(world)
        a, b = Numbered(A), Numbered(B)
        used = [zipped(session, a, b) for _ in range(3)]
        session.close()
        assert session.epoch == 3
        return used

    for first, second, third in in_threads(3, work):
        for which in (0, 1):
            assert first[which] != second[which] != third[which] != first[which]


def test_what_one_worker_gets_of_two_zipped_sets_equals_plain_python() -> None:
    """The shorter one ends the loop, and both begin anew in the next."""

    def work(world: World) -> list[list[int]]:
        session = make_session(world)
        longer, shorter, seen = Numbered(B), Numbered(A), []
        for _ in range(3):
            used = []
            pairs = zip(
                session.batches(longer, batch_size=8), session.batches(shorter, batch_size=8), strict=False
            )
            for one, other in pairs:
                session.step(joined(one, other))
                used += numbers(one)
            seen.append(used)
        session.close()
        report = session.summary()["committed"]
        assert (report["once"], report["left"]) == (3 * 48 + 3 * A, 3 * (B - 48))
        return seen

    (seen,) = in_threads(1, work)
    assert [len(used) for used in seen] == [48, 48, 48]
    assert seen[0] != seen[1]


def test_a_stream_whose_batches_no_step_sees_counts_with_the_steps_made_meanwhile() -> None:
    def apart(session: Session, a: Numbered, b: Numbered) -> tuple[list[int], list[int]]:
        ours: list[int] = []
        theirs: list[int] = []
        pairs = zip(session.batches(a, batch_size=4), session.batches(b, batch_size=6), strict=False)
        for one, other in pairs:
            session.step(one)
            ours += numbers(one)
            theirs += numbers(other)
        return ours, theirs

    ours, theirs, report = run(apart)
    assert (ours, theirs) == (list(range(A)), list(range(B)))
    assert (report["once"], report["never"], report["left"]) == (A + B, 0, 0)


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["all-reduce", "hogwild", "parameter-server:async"])
def test_a_resumed_run_goes_on_with_both(strategy: str, tmp_path: Path) -> None:
    def leg(world: World, steps: int | None) -> tuple[list[int], list[int]]:
        session = make_session(world, strategy)
        session.resume(tmp_path)
        ours: list[int] = []
        theirs: list[int] = []
        a, b = session.batches(Numbered(A), batch_size=4), session.batches(Numbered(B), batch_size=6)
        for number, (one, other) in enumerate(zip(a, b, strict=False), 1):
            session.step(joined(one, other))
            ours += numbers(one)
            theirs += numbers(other)
            if number == steps:
                break
        session.save(tmp_path)
        session.close()
        return ours, theirs

    used: list[tuple[list[int], list[int]]] = []
    for workers, steps in ((2, 2), (3, None)):
        used += in_threads(workers, lambda world, steps=steps: leg(world, steps), strategy=strategy)
    assert sorted(number for ours, _ in used for number in ours) == list(range(A))
    assert sorted(number for _, theirs in used for number in theirs) == list(range(B))


def test_more_loops_at_once_than_a_session_has_room_for_are_refused() -> None:
    def work(world: World) -> None:
        session = make_session(world)
        loops = [iter(session.batches(Numbered(8), batch_size=4)) for _ in range(9)]
        for loop in loops:
            next(loop)
        session.close()

    with pytest.raises(UsageError, match="at most 8"):
        in_threads(1, work)


def test_the_length_of_a_loop_is_known() -> None:
    def work(world: World) -> tuple[int, int, int]:
        session = make_session(world)
        data = Numbered(B)
        batches = session.batches(data, batch_size=5)
        whole = len(batches)
        for number, batch in enumerate(batches, 1):
            session.step(batch)
            if number == 2:
                break
        left = len(session.batches(data, batch_size=5))
        used = sum(1 for batch in batches if session.step(batch) is not None)
        session.close()
        return whole, left, used

    assert in_threads(2, work) == [(8, 6, 6), (8, 6, 6)]
