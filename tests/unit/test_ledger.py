"""The ledger: every sample of an epoch is committed exactly once, whichever workers die and join."""

import random

import pytest
import torch

from manyhands.data.ledger import Ledger


def test_rounds_cover_the_epoch_in_its_order() -> None:
    ledger = Ledger(100, seed=3)
    ledger.assign(batch=8, round_samples=24, workers=3)
    assert ledger.assignment.rounds(0) == 5
    shares = [ledger.assignment.share(number, worker) for number in range(5) for worker in range(3)]
    assert torch.cat(shares).tolist() == list(range(100))
    assert sorted(ledger.samples(torch.cat(shares)).tolist()) == list(range(100))
    assert [len(share) for share in shares[-3:]] == [2, 2, 0], "nobody gets a single sample"


def test_what_dead_workers_had_outstanding_is_assigned_again() -> None:
    ledger = Ledger(40, seed=0)
    ledger.assign(batch=4, round_samples=8, workers=2)
    ledger.commit([1, 1])
    assert ledger.outstanding(0, 3) == [[(8, 12)], [(16, 20)]]
    ledger.assign(batch=4, round_samples=8, workers=1, held=[ledger.outstanding(0, 3)])
    assert ledger.assignment.share(2, 0).tolist() == [12, 13, 14, 15, *range(20, 24)], "what two took before"
    ledger.commit([1])
    assert ledger.outstanding(0, 2) == [[(16, 20)]], "what it held is committed round by round"
    ledger.commit([ledger.assignment.rounds(0)])
    assert ledger.tally() == {"once": 40, "twice": 0, "never": 0}


def test_a_record_of_what_is_committed() -> None:
    ledger = Ledger(20, seed=0)
    ledger.committed = [(0, 4), (9, 11)]
    assert ledger.committed == [(0, 4), (9, 11)]
    assert ledger.tally()["never"] == 14


@pytest.mark.parametrize("seed", range(20))
def test_random_deaths_and_joins_commit_everything_once(seed: int) -> None:
    draw = random.Random(seed)
    ledger = Ledger(draw.randrange(1, 400), seed=seed)
    workers, drawn = 3, [0, 0, 0]
    ledger.assign(batch=4, round_samples=12, workers=workers)
    for _ in range(1000):
        event = draw.random()
        if event < 0.1:  # some die, some join
            survivors = [worker for worker in range(workers) if draw.random() < 0.6] or [0]
            held = [ledger.outstanding(worker, drawn[worker]) for worker in survivors]
            held += [[]] * draw.randrange(3)
            workers, drawn = len(held), [len(rounds) for rounds in held]
            ledger.assign(batch=4, round_samples=12, workers=workers, held=held)
        elif event < 0.4:
            ledger.commit([draw.randint(0, rounds) for rounds in drawn])  # not all that was drawn is safe
        else:
            worker = draw.randrange(workers)
            drawn[worker] = min(ledger.assignment.rounds(worker), drawn[worker] + 1)
    for _ in range(2):  # what the last ones to die had outstanding takes another assignment
        ledger.assign(batch=4, round_samples=12, workers=1)
        ledger.commit([ledger.assignment.rounds(0)])
    assert ledger.tally() == {"once": ledger.length, "twice": 0, "never": 0}
