"""PairedRounds on made-up clocks: equal contenders are not told apart, others are, and a bad one costs little."""

import math
import random
from collections.abc import Mapping

import pytest

from manyhands.lab import ratios
from manyhands.lab.rounds import (
    CONTROL,
    PairedRounds,
    RoundLimits,
    RoundsEnd,
    RoundsVerdict,
    TurnClocks,
    noise,
)
from manyhands.lab.taking_turns import ContenderLost

STEPS = 3


class MadeUpMachine:
    """Steps that cost what they cost, times what the machine does: a drift that all share, and noise of each step."""

    def __init__(self, step_s: Mapping[str, float], *, noise: float, drift: float, seed: int) -> None:
        self.step_s, self.noise, self.drift = step_s, noise, drift
        self.draw = random.Random(seed)
        self.now_s, self.factor = 0.0, 1.0

    def take(self, name: str) -> TurnClocks:
        self.factor *= math.exp(self.draw.gauss(0, self.drift))
        steps = [
            self.step_s[name] * self.factor * math.exp(abs(self.draw.gauss(0, self.noise)))
            for _ in range(STEPS)
        ]
        self.now_s += sum(steps)
        return TurnClocks(wall_s=tuple(steps), processor_s=tuple(steps))

    def rounds(self, seconds: float = 12.0, seed: int = 0) -> PairedRounds:
        names = list(self.step_s)
        limits = RoundLimits(seconds=seconds)
        return PairedRounds(
            names,
            self.take,
            incumbent=names[0],
            reference=names[0],
            limits=limits,
            seed=seed,
            clock=lambda: self.now_s,
        )


def verdicts(
    step_s: Mapping[str, float], *, noise: float, drift: float, repeats: int = 100
) -> list[RoundsVerdict]:
    return [
        MadeUpMachine(step_s, noise=noise, drift=drift, seed=seed).rounds(seed=seed).run()
        for seed in range(repeats)
    ]


@pytest.mark.parametrize(("spread", "drift"), [(0.02, 0.0), (0.1, 0.05), (0.3, 0.2)])
def test_equal_contenders_are_called_different_in_at_most_one_of_twenty(spread: float, drift: float) -> None:
    found = verdicts({"a": 0.05, "b": 0.05}, noise=spread, drift=drift)
    assert sum(one.ended is RoundsEnd.CLEAR for one in found) <= 5
    assert sum(one.chosen != "a" for one in found) <= 5  # else the simpler one


def test_five_percent_are_found_where_the_machine_is_quiet() -> None:
    found = verdicts({"a": 0.0525, "b": 0.05}, noise=0.02, drift=0.0, repeats=40)
    assert sum(one.ended is RoundsEnd.CLEAR and one.chosen == "b" for one in found) >= 38


def test_a_drift_that_all_share_hides_no_large_difference() -> None:
    found = verdicts({"a": 0.08, "b": 0.05, "c": 0.1}, noise=0.05, drift=0.05, repeats=40)
    assert sum(one.chosen == "b" for one in found) >= 38


def test_a_machine_too_noisy_is_said_to_be_one() -> None:
    found = verdicts({"a": 0.05, "b": 0.05}, noise=0.3, drift=0.1, repeats=20)
    assert sum(one.ended in (RoundsEnd.NOISE, RoundsEnd.TIME) for one in found) >= 18
    assert all(noise(one.control) > 0.02 for one in found)


def test_slow_contenders_leave_and_the_reference_stays() -> None:
    machine = MadeUpMachine({"a": 0.2, "b": 0.05, "c": 0.5, "d": 0.051}, noise=0.02, drift=0.0, seed=1)
    rounds = machine.rounds()
    assert rounds.run().best == "b"
    turns = {name: len(found) for name, found in rounds.turns.items()}
    assert turns["c"] == 1  # hopeless
    assert turns["a"] == turns["b"] == turns["a" + CONTROL]


def test_a_contender_that_dies_is_marked_and_the_others_go_on() -> None:
    machine = MadeUpMachine({"a": 0.06, "b": 0.05, "c": 0.07}, noise=0.02, drift=0.0, seed=1)
    rounds = machine.rounds()
    take = rounds.take

    def dies(name: str) -> TurnClocks:
        if name == "b" and len(rounds.turns["b"]) == 2:
            raise ContenderLost("b", "has ended in its turn")
        return take(name)

    rounds.take = dies
    assert rounds.run().best == "a"
    assert rounds.lost["b"].reason == "has ended in its turn"


def test_all_dead_is_an_error_with_the_reason() -> None:
    def dies(name: str) -> TurnClocks:
        raise ContenderLost(name, "was killed")

    with pytest.raises(ContenderLost, match="was killed"):
        PairedRounds(["a", "b"], dies, incumbent="a", reference="a").run()


def test_ratios_are_paired() -> None:
    """A machine that doubles what all take changes no ratio."""
    drift = [1.0, 2.0, 4.0, 1.5, 3.0, 1.0, 2.5, 8.0]
    found = ratios.paired([1.2 * each for each in drift], drift)
    assert found.low == pytest.approx(1.2)
    assert found.high == pytest.approx(1.2)
    assert ratios.by_rank([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], confidence=0.99) == (0.0, math.inf)


def test_the_interval_has_the_truth_as_often_as_it_says() -> None:
    draw, inside = random.Random(3), 0
    for seed in range(200):
        ours = [1.1 * math.exp(draw.gauss(0, 0.1)) for _ in range(15)]
        theirs = [math.exp(draw.gauss(0, 0.1)) for _ in range(15)]
        found = ratios.paired(ours, theirs, confidence=0.9, seed=seed)
        inside += found.low <= 1.1 <= found.high
    assert 165 <= inside <= 198
