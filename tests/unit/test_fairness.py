"""One rule for the learning rate and the number of updates, used where the person names no optimizer."""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from manyhands import strategies
from manyhands.job import learning_rate, rate_schedule
from manyhands.job.plan import Cluster, Plan, Train
from manyhands.strategies import STRATEGIES
from manyhands.strategies.interface import Strategy
from manyhands.strategies.traits import Steps, Traits


@dataclass(frozen=True, kw_only=True)
class Together(Strategy):
    traits: ClassVar[Traits] = Traits(steps=Steps.SYNCHRONOUS)


@dataclass(frozen=True, kw_only=True)
class EachAlone(Strategy):
    pass


def rate(terms: learning_rate.Terms) -> float:
    return float(terms.optimizer.partition("lr=")[2].partition(",")[0])


@pytest.mark.parametrize(("workers", "scale"), [(1, 1), (2, 2), (4, 4), (8, 4)])
def test_the_rate_grows_with_the_batches_in_an_update_up_to_a_limit(workers: int, scale: int) -> None:
    base = rate(learning_rate.terms("cnn", EachAlone(), workers))
    together = learning_rate.terms("cnn", Together(), workers)
    assert rate(together) == pytest.approx(scale * base)
    assert together.batches_per_update == workers
    assert together.warm_up_epochs == (1.0 if workers > 1 else 0.0)
    assert f"{rate(together):g}" in together.why
    assert together.optimizer.endswith("momentum=0.9")


def test_one_batch_per_update_has_the_base_rate_and_no_warm_up() -> None:
    for workers in (1, 4):
        terms = learning_rate.terms("cnn", EachAlone(), workers)
        assert (terms.optimizer, terms.warm_up_epochs) == (learning_rate.BASE, 0.0)


def test_late_gradients_get_a_smaller_rate() -> None:
    for text in ("hogwild", "parameter-server:async", "stale"):
        strategy = strategies.parse(text)
        alone, four = (learning_rate.terms("cnn", strategy, workers) for workers in (1, 4))
        assert rate(four) == pytest.approx(rate(alone) / 4)
        assert "3 updates late" in four.why
    assert "late" not in learning_rate.terms("cnn", strategies.parse("parameter-server"), 4).why


@pytest.mark.parametrize(
    ("text", "workers", "hosts", "batches", "late"),
    [
        ("worker-groups:groups=1", 4, 1, 4, 0),
        ("worker-groups:groups=2", 4, 1, 2, 1),
        ("worker-groups:groups=4", 4, 2, 1, 3),
        ("worker-groups:groups=4,owners=workers", 4, 1, 1, 3),
        ("downpour", 4, 1, 1, 3),
        ("downpour:fetch=5,push=5", 4, 1, 5, 3),  # a fifth of the updates, five times the age
        ("downpour:fetch=4,push=2", 4, 1, 2, 5),
        ("downpour:fetch=1,push=2", 4, 2, 2, 3),
        ("two-level", 4, 1, 4, 0),
        ("two-level", 8, 2, 4, 1),
        ("parameter-server:async", 8, 2, 1, 7),
        ("hogwild", 8, 2, 1, 3),
    ],
)
def test_what_goes_into_an_update_and_how_late_it_is(
    text: str, workers: int, hosts: int, batches: int, late: int
) -> None:
    strategy = strategies.parse(text)
    facts = strategies.tuning(strategy, workers, hosts)
    assert (facts.batches, facts.late) == (batches, late)


def test_both_corrections_are_told_with_their_reasons() -> None:
    terms = learning_rate.terms("cnn", strategies.parse("two-level"), 16, hosts=2)
    assert terms.why == (
        "learning rate 0.05: 4 times the 0.025 of one worker divided by 2, since each update uses 8 batches, of which "
        "4 count, and gradients are about 1 update late; warm-up in epoch 1"
    )
    assert terms.warm_up_epochs == 1.0
    adaptive = learning_rate.terms("cnn", strategies.parse("downpour:fetch=5,push=5"), 4)
    assert "0.01: √4 times the 0.02 of one worker divided by 4, since" in adaptive.why
    assert learning_rate.terms("cnn", Together(), 2).why == (
        "learning rate 0.05: twice the 0.025 of one worker, since each update uses 2 batches; warm-up in epoch 1"
    )


def test_methods_that_divide_by_the_gradient_scale_with_the_root() -> None:
    base = learning_rate.terms("transformer", Together(), 1)
    four = learning_rate.terms("transformer", Together(), 4)
    assert rate(four) == pytest.approx(2 * rate(base))
    assert four.optimizer.startswith("adamw:")


def test_accumulated_batches_are_in_the_update_too() -> None:
    assert rate(learning_rate.terms("cnn", EachAlone(), 4, accumulate=2)) == pytest.approx(
        2 * rate(learning_rate.terms("cnn", EachAlone(), 4))
    )


def test_all_see_the_same_samples_and_differ_in_updates() -> None:
    epoch = 1280
    assert learning_rate.updates(epoch, 32, 4) == 10
    assert learning_rate.updates(epoch, 32, 1) == 40
    assert learning_rate.updates(epoch + 1, 32, 4) == 11


def test_averaging_after_every_step_is_an_update_from_all() -> None:
    often, rarely = strategies.parse("local-sgd:period=1"), strategies.parse("local-sgd:period=2")
    assert strategies.tuning(often, 4).batches == 4
    assert strategies.tuning(rarely, 4).batches == 1


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_says_how_many_batches_an_update_has(name: str) -> None:
    strategy = strategies.parse(name)
    assert 1 <= strategies.tuning(strategy, 4).batches <= 4
    assert strategies.tuning(strategy, 1).batches == 1
    if strategy.traits.synchronous:
        assert strategies.tuning(strategy, 4).batches == 4


def test_a_plan_without_an_optimizer_gets_one_and_says_why() -> None:
    plan = Plan(cluster=Cluster(workers=4))
    fair, why = plan.on_fair_terms()
    assert fair.train.optimizer == "sgd:lr=0.1,momentum=0.9"
    assert fair.train.warm_up == 1.0
    assert "4 batches" in why
    assert fair.on_fair_terms() == (fair, ""), "what a plan says is left alone"


def test_what_the_person_gives_is_left_alone() -> None:
    plan = Plan(train=Train(optimizer="sgd:lr=3", batch=7), cluster=Cluster(workers=4))
    assert plan.on_fair_terms() == (plan, "")
    careful, _ = Plan(train=Train(warm_up=3.0), cluster=Cluster(workers=4)).on_fair_terms()
    assert careful.train.warm_up == 3.0


def test_a_plan_without_a_batch_gets_what_its_strategy_wants() -> None:
    for strategy, wanted in (("all-reduce", 32), ("sandblaster", 512)):
        plan, _ = Plan(strategy=strategy, train=Train(optimizer="lbfgs")).on_fair_terms()
        assert plan.batch == plan.train.batch == wanted


def rates(train: Train, total: int, steps_per_epoch: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = rate_schedule.scheduled(optimizer, rate_schedule.RateSchedule(train, total, steps_per_epoch))
    seen = []
    for _ in range(total):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler:
            scheduler.step()
    return seen


def test_the_rate_grows_from_nothing_and_stays() -> None:
    assert rates(Train(warm_up=2.0), 6, 2) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert rates(Train(warm_up=0.0), 3, 2) == [1, 1, 1]
    cosine = rates(Train(schedule="cosine"), 4, 2)
    both = rates(Train(schedule="cosine", warm_up=1.0), 4, 2)
    assert both == pytest.approx([cosine[0] / 2, *cosine[1:]])


def test_who_comes_later_reckons_with_what_the_first_ones_did() -> None:
    """It may find other workers than those with whom the run began."""
    first, later = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr) for lr in (0.3, 0.4))
    train = Train(warm_up=1.0, schedule="cosine")
    theirs = rate_schedule.scheduled(first, rate_schedule.RateSchedule(train, 40, 10))
    ours = rate_schedule.scheduled(later, rate_schedule.RateSchedule(train, 60, 15))
    assert theirs
    assert ours
    first.step()
    theirs.step()
    ours.load_state_dict(json.loads(json.dumps(theirs.state_dict())))
    for scheduler in (theirs, ours):
        scheduler.optimizer.step()
        scheduler.step()
    assert later.param_groups[0]["lr"] == first.param_groups[0]["lr"]


@pytest.mark.processes
def test_the_rule_needs_no_torch() -> None:
    code = "import sys, manyhands.job.learning_rate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
