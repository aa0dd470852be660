"""From what the turns gave to the coefficients of the model, each with a bootstrap sample.

    pass       C(b) = a + c·b processor seconds, through the medians at two batch sizes
    κ          wall ÷ processor seconds of a pass
    update     of a worker that updates all parameters, ÷ parameters
    sum        what a step has more where workers pool their gradients, ÷ bytes of gradients that others add to a
               worker's own: (p − 1) ÷ p of them, since the owner of a span adds its own as it updates

Draw k of every coefficient of a split has the same rounds: what one round did to all of them stays together.
"""

from collections.abc import Sequence

import numpy as np

from manyhands.lab.ratios import draw_again
from manyhands.planner.facts import DRAWS, NOTHING, ONE, Estimate, SplitFacts
from manyhands.planner.splits import Measured, Split

_KEPT_STEPS = 400
_STRETCH = 4
"""Turns in a draw of κ: a run meets another stretch of the machine than the probe, and one that is busy now and then
stays so for seconds."""


def failed(split: Split, reason: str) -> SplitFacts:
    """A split that cannot run."""
    return SplitFacts(
        processes=split.processes,
        threads=split.threads,
        pass_cpu_s=NOTHING,
        sample_cpu_s=NOTHING,
        error=reason,
    )


def fit(
    split: Split, measured: Measured, *, parameters: int, gradient_bytes: int, seed: int = 0
) -> SplitFacts:
    draws = _Draws(seed)
    sizes = sorted(measured.passes)
    costs = {size: draws.medians(measured.passes[size]) for size in sizes}
    fixed, per_sample = _line(costs)
    walls = [
        wall / cpu
        for size in sizes
        for wall, cpu in zip(measured.pass_wall_s[size], measured.passes[size], strict=True)
        if cpu > 0
    ]
    updates = draws.medians(measured.updates)
    added = gradient_bytes * (split.processes - 1) / split.processes
    return SplitFacts(
        processes=split.processes,
        threads=split.threads,
        pass_cpu_s=_estimate(fixed),
        sample_cpu_s=_estimate(per_sample),
        wall_per_cpu=_estimate(draws.medians(walls, _STRETCH)) if walls else ONE,
        update_cpu_s=_estimate(updates / max(1, parameters)),
        sum_cpu_s=_estimate(_sums(draws, split, measured, sizes[-1]) / max(1, added)),
        meeting_s=_estimate(draws.medians(measured.meetings_s)) if measured.meetings_s else NOTHING,
        jitter=tuple(measured.wall_s[-_KEPT_STEPS:]),
        measured_batches=tuple(sizes),
    )


def step_cost(measured: Measured, seed: int = 0) -> Estimate:
    """Processor seconds of a step that are neither pass nor update: handshake, commit, records, loading."""
    return _estimate(_Draws(seed).medians(measured.rest))


class _Draws:
    """Medians of lists of measurements: first of all of them, then of each bootstrap draw."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def medians(self, values: Sequence[float], most: int | None = None) -> np.ndarray:
        """Each draw has as many values as were measured, or at most so many."""
        if not len(values):
            return np.zeros(DRAWS + 1)
        measured = np.asarray(values, dtype=float)
        again = np.median(measured[draw_again(len(measured), DRAWS, self._seed)[:, :most]], axis=1)
        return np.concatenate([[np.median(measured)], again])


def _line(costs: dict[int, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Through two batch sizes; neither part is below nothing, and the line always meets the larger batch."""
    sizes = sorted(costs)
    most, largest = sizes[-1], costs[sizes[-1]]
    if len(sizes) == 1:
        return np.zeros_like(largest), largest / most
    slope = (largest - costs[sizes[0]]) / (most - sizes[0])
    slope = np.clip(slope, 0.0, largest / most)
    return largest - slope * most, slope


def _sums(draws: _Draws, split: Split, measured: Measured, batch: int) -> np.ndarray:
    """What pooling adds to a worker's step: its updates are divided, its gradients added to the host's sum. Turn by
    turn, as a small difference of large figures must be; every other turn has workers apart with a whole batch."""
    if split.processes == 1:
        return np.zeros(DRAWS + 1)
    turns = zip(measured.whole[::2], measured.passes[batch], measured.rest, measured.updates, strict=False)
    added = [whole - passes - rest - update / split.processes for whole, passes, rest, update in turns]
    more: np.ndarray = np.maximum(0.0, draws.medians(added))
    return more


def _estimate(values: np.ndarray) -> Estimate:
    return Estimate(float(values[0]), tuple(float(value) for value in values[1:]))
