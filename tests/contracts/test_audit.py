"""The ledger's check at the end: what the steps of all workers have really used."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from manyhands.cli.report import _samples
from manyhands.cluster.worker.world import World
from manyhands.data import ledger
from manyhands.engine import feeds
from manyhands.engine.session import Session
from manyhands.strategies.partners import pairs
from tests.contracts.test_resuming import EVERY_KIND, LENGTH
from tests.contracts.test_sessions import Numbered, make_session
from tests.threads import in_threads

Batch = tuple[Tensor, Tensor]


def checked(
    loop: Callable[[Session, Numbered], None], workers: int = 3, strategy: str = "all-reduce"
) -> dict[str, Any]:
    """The report of a run in which every worker does this; all say the same."""

    def work(world: World) -> dict[str, Any]:
        session = make_session(world, strategy)
        loop(session, Numbered(LENGTH))
        session.close()
        report: dict[str, Any] = session.summary()["committed"]
        return report

    first, *others = in_threads(workers, work, strategy=strategy)
    assert all(other == first for other in others)
    return dict(first)


def test_of_very_many_epochs_the_oldest_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is in every checkpoint and in the summary, which would grow as long as a run goes on."""
    monkeypatch.setattr(feeds, "MOST_CHECKS", 3)

    def loop(session: Session, data: Numbered) -> None:
        for _ in range(7):
            for batch in session.batches(data, batch_size=4):
                session.step(batch)

    report = checked(loop)
    assert (report["once"], report["twice"], report["never"]) == (7 * LENGTH, 0, 0)
    clean = {"twice": 0, "never": 0}
    assert report["epochs"] == [
        {"epoch": 4, "epochs": 5, "once": 5 * LENGTH, **clean},
        {"epoch": 5, "once": LENGTH, **clean},
        {"epoch": 6, "once": LENGTH, **clean},
    ]
    assert _samples({"committed": report}) == f"{7 * LENGTH:,} = 7 epochs, each used once"


def plainly(session: Session, data: Numbered) -> None:
    for _ in range(2):
        for batch in session.batches(data, batch_size=4):
            session.step(batch)


@pytest.mark.parametrize("strategy", EVERY_KIND)
def test_every_sample_of_every_epoch_counts_once(strategy: str) -> None:
    assert checked(plainly, strategy=strategy) == {
        **{"once": 2 * LENGTH, "twice": 0, "never": 0, "left": 0},
        "epochs": [{"epoch": epoch, "once": LENGTH, "twice": 0, "never": 0} for epoch in range(2)],
    }


def as_dictionaries(session: Session, data: Numbered) -> None:
    for inputs, targets in session.batches(data, batch_size=4):
        session.step((inputs.clone(), targets.clone()))


def accumulated(session: Session, data: Numbered) -> None:
    waiting: list[Batch] = []
    for batch in session.batches(data, batch_size=4):
        waiting.append(batch)
        if len(waiting) == 2 or session.engine.feed.is_last:
            session.step(*reversed(waiting))
            waiting.clear()


def glued_together(session: Session, data: Numbered) -> None:
    waiting: list[Batch] = []
    for batch in session.batches(data, batch_size=4):
        waiting.append(batch)
        if len(waiting) == 3 or session.engine.feed.is_last:
            session.step(tuple(torch.cat(parts) for parts in zip(*waiting, strict=True)))
            waiting.clear()


@pytest.mark.parametrize("loop", [as_dictionaries, accumulated, glued_together])
def test_what_a_script_makes_of_its_batches_does_not_matter(
    loop: Callable[[Session, Numbered], None],
) -> None:
    report = checked(loop)
    assert {word: report[word] for word in ("once", "twice", "never", "left")} == {
        **{"once": LENGTH, "twice": 0, "never": 0, "left": 0}
    }


def skipping(session: Session, data: Numbered) -> None:
    for number, batch in enumerate(session.batches(data, batch_size=4)):
        if number != 2:
            session.step(batch)


def dropping_the_last(session: Session, data: Numbered) -> None:
    for batch in session.batches(data, batch_size=4):
        if len(batch[0]) == 4:
            session.step(batch)


def repeating(session: Session, data: Numbered) -> None:
    for number, batch in enumerate(session.batches(data, batch_size=4)):
        session.step(batch)
        if number == 2:
            session.step(batch)


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        (skipping, {"once": LENGTH - 12, "twice": 0, "never": 12}),
        (dropping_the_last, {"once": LENGTH - 5, "twice": 0, "never": 5}),
        (repeating, {"once": LENGTH - 12, "twice": 12, "never": 0}),
    ],
)
@pytest.mark.parametrize("strategy", ["all-reduce", "hogwild"])
def test_samples_that_a_script_skips_or_repeats_are_noticed(
    loop: Callable[[Session, Numbered], None], expected: dict[str, int], strategy: str
) -> None:
    (epoch,) = checked(loop, strategy=strategy)["epochs"]
    assert epoch == {"epoch": 0, **expected}


def test_a_ledger_that_deals_the_same_samples_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check does not ask the ledger."""
    share, commit = ledger.Assignment.share, ledger.Ledger.commit
    here = threading.local()  # workers are threads, and commit at the same time

    def wrong(self: ledger.Assignment, number: int, worker: int) -> Tensor:
        is_wrong = (number, worker) == (1, 1) and not getattr(here, "commits", False)
        return share(self, number, 0 if is_wrong else worker)

    def unaware(self: ledger.Ledger, drawn: list[int]) -> None:
        here.commits = True
        commit(self, drawn)
        here.commits = False

    monkeypatch.setattr(ledger.Assignment, "share", wrong)
    monkeypatch.setattr(ledger.Ledger, "commit", unaware)
    report = checked(functools.partial(one_epoch), workers=1)
    assert report["once"] == LENGTH, "one worker is not concerned"
    report = checked(one_epoch, workers=2)
    assert (report["twice"], report["never"]) == (4, 4)


def one_epoch(session: Session, data: Numbered) -> None:
    for batch in session.batches(data, batch_size=4):
        session.step(batch)


def test_an_epoch_that_was_not_finished_has_samples_left() -> None:
    def stop(session: Session, data: Numbered) -> None:
        one_epoch(session, data)
        batches = session.batches(data, batch_size=4)
        for batch in batches:
            session.step(batch)
            if session.steps == 12:
                break
        batches.close()

    report = checked(stop)
    assert report["epochs"][1] == {"epoch": 1, "once": 36, "twice": 0, "never": 0}
    assert report["left"] == LENGTH - 36


def test_without_a_data_set_there_is_nothing_to_count() -> None:
    def own(world: World) -> object:
        session = make_session(world)
        data = Numbered(8)
        for batch in session.batches([data[slice(0, 4)], data[slice(4, 8)]]):
            session.step(batch)
        session.close()
        return session.summary()["committed"]

    assert in_threads(2, own) == [None, None]


@pytest.mark.parametrize(
    ("strategy", "workers", "lone"),
    [
        ("gossip", 3, lambda step: pairs(3, step)[-1]),
        ("gossip", 2, lambda step: []),
        ("hierarchical-local-sgd:local_period=1,global_period=9,groups=2", 3, lambda step: [0]),
        ("hierarchical-local-sgd:local_period=1,global_period=9,groups=2", 4, lambda step: []),
        ("hierarchical-local-sgd:local_period=1,global_period=1,groups=2", 3, lambda step: []),
    ],
)
def test_samples_are_safe_when_another_worker_has_their_effect(
    strategy: str, workers: int, lone: Callable[[int], list[int]]
) -> None:
    """A worker that has sat out is the only one that has learned from its samples."""
    steps = 5

    def work(world: World) -> list[list[int]]:
        session = make_session(world, strategy)
        seen = []
        for batch in session.batches(Numbered(LENGTH), batch_size=4):
            session.step(batch)
            assert session.engine.feed.ledger
            seen.append([session.engine.feed.ledger.settled(worker) for worker in range(workers)])
            if session.steps == steps:
                break
        session.close()
        return seen

    safe = [0] * workers
    want = []
    for step in range(1, steps + 1):
        safe = [safe[worker] if worker in lone(step) else step for worker in range(workers)]
        want.append(safe)
    assert in_threads(workers, work) == [want] * workers


def test_what_a_trainer_learns_after_a_meeting_is_not_judged_yet() -> None:
    def work(world: World) -> list[int]:
        session = make_session(world, "tournament:every=2")
        seen = []
        for batch in session.batches(Numbered(LENGTH), batch_size=4):
            session.step(batch)
            assert session.engine.feed.ledger
            seen.append(session.engine.feed.ledger.settled(world.rank))
            if session.steps == 5:
                break
        session.close()
        return seen

    assert in_threads(2, work) == [[0, 0, 2, 2, 4]] * 2
