"""What messages between hosts cost, from those that were sent: α, β, d and γ of a link.

α  latency    the least time of the smallest messages: all that is more is waiting
β  s/byte     Theil–Sen: the median of the slopes between messages of different large sizes. One that was held up
              does not move it, and a constant part, as a token bucket's burst is one, drops out
d  both ways  seconds in which both have sent ÷ those in which one has: 1 where each direction has its own capacity
γ  CPU s/byte of an end that sends a byte, or receives and adds one
"""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from manyhands.errors import ManyhandsError
from manyhands.foreign.regular import read_small
from manyhands.lab.ratios import draw_again
from manyhands.planner.facts import DRAWS, Estimate, LinkFacts

FILE = "links.json"
SMALL_BYTES = 1 << 10
LARGEST_SIZES = 3
"""By which β goes."""
SHARED = 1.5
"""All at once take so many times what a pair takes both ways: they share the link."""
_LARGEST_FILE = 1 << 26


class SentMessage(msgspec.Struct, frozen=True, array_like=True):
    """One message, one way."""

    size: int
    wall_s: float
    processor_s: float


class PairFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one of two workers has found."""

    between: tuple[int, int]
    sent: list[SentMessage]
    size: int
    """Bytes of the messages that went both ways, or around."""
    both_s: list[float] = []
    around_s: list[float] = []


class MeasuredLinks(msgspec.Struct, frozen=True, kw_only=True):
    """Of all hosts."""

    hosts: int
    link: LinkFacts
    """What is typical: medians over pairs."""
    pairs: dict[str, tuple[float, float]]
    """Of each pair, as `0-1`: α in seconds, and bytes per second."""


def read_links(out: Path) -> MeasuredLinks:
    """What the workers of a run have left in its directory."""
    try:
        found = msgspec.json.decode(read_small(out / FILE, _LARGEST_FILE), type=list[PairFacts])
    except (OSError, ValueError) as error:
        raise ManyhandsError(
            f"the run in {out} has measured no links ({error}); see what its workers said, in logs/"
        ) from None
    return measured_links(found)


def measured_links(found: Sequence[PairFacts]) -> MeasuredLinks:
    pairs = [pair for pair in found if pair.sent]
    latency = _estimates([_latency(pair) for pair in pairs])
    per_byte = _estimates([_per_byte(pair) for pair in pairs])
    ways = [min(pair.both_s) / _one_way_s(pair) for pair in pairs]
    around = [
        min(pair.around_s) / (pair.size * per_byte.value + latency.value) for pair in found if pair.around_s
    ]
    both = min(2.0, max(1.0, statistics.median(ways)))
    named: dict[str, list[tuple[float, float]]] = {}
    for pair in pairs:
        name = f"{pair.between[0]}-{pair.between[1]}"
        named.setdefault(name, []).append((_latency(pair)[0], 1 / _per_byte(pair)[0]))
    return MeasuredLinks(
        hosts=1 + max(rank for pair in pairs for rank in pair.between),
        link=LinkFacts(
            latency_s=latency,
            s_per_byte=per_byte,
            both_ways=Estimate(both),
            cpu_s_per_byte=_estimates([_processor(pair) for pair in pairs]),
            shared=bool(around) and statistics.median(around) > SHARED * both,
        ),
        pairs={name: (min(a for a, _ in each), max(b for _, b in each)) for name, each in named.items()},
    )


def theil_sen(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between any two points with different abscissas."""
    slopes = [(y - v) / (x - u) for (u, v), (x, y) in itertools.combinations(points, 2) if x != u]
    return statistics.median(slopes)


def _latency(pair: PairFacts) -> list[float]:
    """The least, and the least of each bootstrap draw."""
    small = np.array([message.wall_s for message in pair.sent if message.size <= SMALL_BYTES])
    again = small[draw_again(len(small), DRAWS, 0)].min(axis=1)
    return [float(small.min()), *map(float, again)]


def _per_byte(pair: PairFacts) -> list[float]:
    """By the lower quartiles of the largest sizes, since a busy host only makes messages slower. Smaller ones may pass
    within a token bucket's burst, as if there were no limit. Each bootstrap draw takes other messages of each size."""
    sizes = sorted({message.size for message in pair.sent})[-LARGEST_SIZES:]
    times = {size: np.array([m.wall_s for m in pair.sent if m.size == size]) for size in sizes}
    drawn = {
        size: np.quantile(each[draw_again(len(each), DRAWS, size)], 0.25, axis=1)
        for size, each in times.items()
    }
    middles = {size: float(np.quantile(each, 0.25)) for size, each in times.items()}
    best = theil_sen(list(middles.items()))
    draws = [theil_sen([(size, float(drawn[size][k])) for size in sizes]) for k in range(DRAWS)]
    least = 1e-13  # a link faster than any there is: slopes below are the clock's noise
    return [max(least, value) for value in (best, *draws)]


def _processor(pair: PairFacts) -> list[float]:
    largest = max(message.size for message in pair.sent)
    each = np.array([m.processor_s / m.size for m in pair.sent if m.size == largest])
    again = np.median(each[draw_again(len(each), DRAWS, 1)], axis=1)
    return [float(np.median(each)), *map(float, again)]


def _one_way_s(pair: PairFacts) -> float:
    return min(message.wall_s for message in pair.sent if message.size == pair.size)


def _estimates(each: Sequence[Sequence[float]]) -> Estimate:
    """Over pairs, draw by draw."""
    value, *draws = (statistics.median(drawn) for drawn in zip(*each, strict=True))
    return Estimate(value, tuple(draws))
