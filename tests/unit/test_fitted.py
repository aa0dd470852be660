"""Coefficients from turns: a line through two batch sizes, κ, updates, what pooling adds; and the splits of a host."""

import random

import pytest

from manyhands.planner import fitted
from manyhands.planner.facts import DRAWS
from manyhands.planner.splits import Measured, Split, possible

A_S, C_S, KAPPA, UPDATE_S, REST_S, SUM_S = 1e-3, 2e-4, 1.25, 4e-4, 3e-4, 6e-4
PARAMETERS, GRADIENT_BYTES = 1000, 4000


def turns(workers: int, *, spread: float = 0.03, rounds: int = 20, seed: int = 0) -> Measured:
    draw = random.Random(seed)

    def about(value: float) -> list[float]:
        return [value * draw.lognormvariate(0, spread) for _ in range(rounds)]

    found = Measured()
    for samples in (16, 32):
        found.passes[samples] = about(A_S + C_S * samples)
        found.pass_wall_s[samples] = [each * KAPPA for each in found.passes[samples]]
    found.updates.extend(about(UPDATE_S))
    found.rest.extend(about(REST_S))
    found.whole.extend(about(A_S + C_S * 32 + REST_S + UPDATE_S / workers + SUM_S))
    found.meetings_s.extend(about(5e-6))
    return found


def fit(workers: int, measured: Measured) -> fitted.SplitFacts:
    split = Split(processes=workers, threads=1)
    return fitted.fit(split, measured, parameters=PARAMETERS, gradient_bytes=GRADIENT_BYTES)


def test_the_coefficients_come_back() -> None:
    found = fit(2, turns(2))
    whole = found.pass_cpu_s.value + 32 * found.sample_cpu_s.value
    assert whole == pytest.approx(A_S + C_S * 32, rel=0.03)
    assert found.sample_cpu_s.value == pytest.approx(C_S, rel=0.15)
    assert found.wall_per_cpu.value == pytest.approx(KAPPA)
    assert found.update_cpu_s.value * PARAMETERS == pytest.approx(UPDATE_S, rel=0.05)
    assert found.sum_cpu_s.value * GRADIENT_BYTES / 2 == pytest.approx(SUM_S, rel=0.5)
    assert found.measured_batches == (16, 32)
    assert fitted.step_cost(turns(2)).value == pytest.approx(REST_S, rel=0.05)


def test_intervals_have_the_truth_inside_and_draws_belong_together() -> None:
    inside = 0
    for seed in range(40):
        found = fit(1, turns(1, seed=seed))
        assert len(found.pass_cpu_s.draws) == len(found.sample_cpu_s.draws) == DRAWS
        low, high = found.sample_cpu_s.interval()
        inside += low <= C_S <= high
        wholes = [a + 32 * c for a, c in zip(found.pass_cpu_s.draws, found.sample_cpu_s.draws, strict=True)]
        assert max(wholes) / min(wholes) < 1.1  # although either alone scatters by far more
    assert inside >= 30


def test_one_worker_adds_nothing_to_a_sum_and_nothing_is_negative() -> None:
    assert fit(1, turns(1)).sum_cpu_s.value == 0.0
    noisy = turns(2)
    noisy.passes[16] = [0.5 for _ in noisy.passes[16]]  # half of the batch took longer than all of it
    noisy.whole[:] = [1e-6 for _ in noisy.whole]
    found = fit(2, noisy)
    assert found.sample_cpu_s.value == found.sum_cpu_s.value == 0.0


def test_a_single_batch_size_goes_through_nothing() -> None:
    measured = turns(1)
    del measured.passes[16]
    found = fit(1, measured)
    assert found.pass_cpu_s.value == 0.0
    assert found.sample_cpu_s.value == pytest.approx((A_S + C_S * 32) / 32, rel=0.03)


@pytest.mark.parametrize(
    ("cores", "workers", "threads", "expected"),
    [
        (1, None, None, ["1 × 1"]),
        (2, None, None, ["1 × 2", "2 × 1", "1 × 1"]),
        (6, None, None, ["1 × 6", "2 × 3", "4 × 1", "6 × 1", "1 × 1"]),
        (8, None, None, ["1 × 8", "2 × 4", "4 × 2", "8 × 1", "1 × 1"]),
        (8, 4, None, ["4 × 2", "4 × 1"]),
        (8, 3, 2, ["3 × 2"]),
        (8, None, 2, ["1 × 2", "2 × 2", "4 × 2"]),
    ],
)
def test_the_splits_of_a_host(
    cores: int, workers: int | None, threads: int | None, expected: list[str]
) -> None:
    assert [split.name for split in possible(cores, workers, threads)] == expected
