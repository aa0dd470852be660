"""Losses that go wrong are noticed, and those that merely jump about are not."""

import math
import random

import pytest

from manyhands.engine.watch import WINDOW_STEPS, LossWatch, Suspects
from manyhands.errors import Diverged


def watch(**suspects: float) -> LossWatch:
    return LossWatch(1, lambda: Suspects(**{"rate": 0.5, **suspects}))  # type: ignore[arg-type]


def warnings(losses: list[float]) -> list[str]:
    seen = watch()
    return [warning for step, loss in enumerate(losses, 1) if (warning := seen.see(step, loss))]


def noisy(means: list[float], spread: float, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [mean * math.exp(draw.gauss(0, spread)) for mean in means]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_ends_the_run(loss: float) -> None:
    seen = watch()
    assert seen.see(1, 2.25) is None
    with pytest.raises(Diverged, match=r"step 2 on worker 1: the loss is .*2\.25 .*rate 0\.5 .*try 0\.05"):
        seen.see(2, loss)


def test_before_any_update_the_rate_is_not_to_blame() -> None:
    with pytest.raises(Diverged, match="very first loss is nan") as caught:
        watch().see(1, math.nan)
    assert "rate" not in str(caught.value)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "means",
    [
        [2.3 * math.exp(-step / 200) + 0.001 for step in range(2000)],  # falls
        [2.3] * 2000,  # learns nothing
        [
            2.3 * math.exp(-step / 30) + 1e-6 for step in range(2000)
        ],  # all but zero, where noise is everything
        [-step / 100 - 1 for step in range(1000)],  # negative and falling
        [
            2.3 * math.exp(-step / 100) + 0.3 + step / 10000 for step in range(2000)
        ],  # creeps up from the valley
    ],
    ids=["falls", "flat", "zero", "negative", "creeps"],
)
def test_a_noisy_loss_is_no_divergence(means: list[float], seed: int) -> None:
    assert warnings(noisy(means, 0.3, seed)) == []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "means",
    [
        [2.3 * math.exp(step / 300) for step in range(400)],  # from the start
        [2.3 * math.exp(-step / 50) + 0.1 for step in range(200)] + [0.2 * 1.01**step for step in range(400)],
        [2.3] * 64 + [2.3 * 2.0**step for step in range(80)],  # explodes, and is still a number
        [-1.0 - step / 100 for step in range(300)] + [-4.0 + step / 100 for step in range(300)],
    ],
    ids=["at once", "later", "explodes", "negative"],
)
def test_a_rising_loss_is_a_warning_once(means: list[float], seed: int) -> None:
    found = warnings(noisy(means, 0.3, seed))
    assert len(found) == 1
    assert "rising" in found[0]
    assert "rate 0.5" in found[0]


def test_one_step_out_of_line_is_forgiven() -> None:
    losses = noisy([2.3 * math.exp(-step / 100) for step in range(20 * WINDOW_STEPS)], 0.1)
    losses[300] = 10.0
    assert warnings(losses) == []


def test_the_cause_is_what_was_measured() -> None:
    assert "learning rate 0.5 is too high" in Suspects(rate=0.5).text()
    assert "learning rate 0.5 is too high" in Suspects(rate=0.5, staleness=0.2).text()
    stale = Suspects(rate=0.5, staleness=4.0, period=8).text()
    assert "4.0 updates old" in stale
    assert "the rate 0.1" in stale
    still = Suspects(rate=0.0).text()
    assert "the learning rate is 0" in still
    assert "try" not in still
    assert "every 8 steps" in Suspects(rate=0.5, period=8).text()
