"""Which of several contenders is best, by rounds in which each has a turn of a few steps.

order     in every round another one, drawn at random: no contender always follows the same one
clocks    wall and processor seconds of every step; the first step of a turn is not counted, since it finds nothing
          of its own in the caches
control   the incumbent has two turns in every round, under two names: what the two differ by is no difference (A/A)
halving   after every few rounds the worse half leaves, as far as it is surely worse: the others have more turns
end       when the best is clear by a margin; when it is clear that none is better by it; when the control shows
          that the rounds that are left cannot tell; or when the time is over
"""

import enum
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from manyhands.lab import ratios
from manyhands.lab.ratios import RatioInterval
from manyhands.lab.taking_turns import ContenderLost

CONTROL = " (again)"
"""The incumbent's second turn is under its name with this."""


@dataclass(frozen=True, kw_only=True)
class TurnClocks:
    """One turn: two clocks of each step that counts, and the samples of all workers in a step."""

    wall_s: tuple[float, ...]
    processor_s: tuple[float, ...]
    """Of all processes of the contender together."""
    samples: float = 1.0

    def per_sample(self) -> float:
        """Wall seconds; the mean, since a strategy may do in one step what is for several."""
        return statistics.fmean(self.wall_s) / self.samples

    def processor_per_sample(self) -> float:
        return statistics.fmean(self.processor_s) / self.samples


@dataclass(frozen=True, kw_only=True)
class RoundLimits:
    margin: float = 0.02
    """A smaller difference does not count: the simpler contender is chosen then."""
    confidence: float = 0.995
    """Of each look at the rounds so far; there are many looks."""
    least_rounds: int = 4
    most_rounds: int = 40
    seconds: float = 20.0
    halving_every: int = 3
    """Rounds."""
    hopeless: float = 3.0
    """Times the seconds of the best."""


class RoundsEnd(enum.Enum):
    """Why there were no more rounds."""

    CLEAR = "the best is clear"
    TIE = "none is better by the margin"
    NOISE = "the machine is too noisy to tell them apart"
    TIME = "the time is over"
    ALONE = "there is only one"


@dataclass(frozen=True, kw_only=True)
class RoundsVerdict:
    best: str
    """The fastest by the medians."""
    chosen: str
    """That one if it is clear, else the simplest of those from which it cannot be told."""
    ended: RoundsEnd
    lead: RatioInterval | None
    """Seconds of the next best ÷ those of the best."""
    control: RatioInterval | None
    """Of the incumbent against itself: how far from 1 it lies is what the machine does."""


@dataclass
class PairedRounds:
    """`names` begin with the simplest; `take` gives a contender its turn and may raise `ContenderLost`."""

    names: Sequence[str]
    take: Callable[[str], TurnClocks]
    incumbent: str
    reference: str
    """Has a turn in every round, however slow it is: it is the scale of all."""
    limits: RoundLimits = RoundLimits()
    seed: int = 0
    clock: Callable[[], float] = time.monotonic
    turns: dict[str, list[TurnClocks]] = field(init=False)
    """Of each contender, a turn per round up to the one after which it left."""
    lost: dict[str, ContenderLost] = field(default_factory=dict, init=False)
    """Those that have died or do not answer."""

    def __post_init__(self) -> None:
        self.turns = {name: [] for name in (*self.names, self.incumbent + CONTROL)}
        self._present = list(self.turns)

    def run(self, on_turn: Callable[[int, str], None] = lambda number, name: None) -> RoundsVerdict:
        """Rounds until one of the ends above; `on_turn` hears of every turn that begins."""
        drawn = random.Random(self.seed)
        began_s, number, longest_s = self.clock(), 0, 0.0
        while True:
            before_s = self.clock()
            drawn.shuffle(self._present)
            for name in self._present:
                if number and self.clock() - began_s > self.limits.seconds:
                    break  # each has had a turn, and the time is over
                on_turn(number, name)
                self._take(name)
            self._present = [name for name in self._present if name.removesuffix(CONTROL) not in self.lost]
            number += 1
            longest_s = max(longest_s, self.clock() - before_s)
            left_s = self.limits.seconds - (self.clock() - began_s)
            left = min(self.limits.most_rounds - number, math.floor(left_s / longest_s) if longest_s else 999)
            if ended := self._ended(number, left):
                return self._verdict(ended)
            self._dismiss(number)

    def cost(self, name: str) -> float:
        """Wall seconds per sample: the median of the rounds."""
        return statistics.median(turn.per_sample() for turn in self.turns[name])

    def series(self, name: str) -> list[float]:
        return [turn.per_sample() for turn in self.turns[name]]

    def _take(self, name: str) -> None:
        contender = name.removesuffix(CONTROL)
        if contender in self.lost:
            return
        try:
            self.turns[name].append(self.take(contender))
        except ContenderLost as lost:
            self.lost[contender] = lost

    def _ranked(self) -> list[str]:
        """Those that are still there, the fastest first."""
        return sorted((name for name in self.names if name in self._present), key=self.cost)

    def _ended(self, number: int, left: int) -> RoundsEnd | None:
        ranked = self._ranked()
        if len(ranked) < 2:
            return RoundsEnd.ALONE
        if number >= self.limits.least_rounds:
            low, high = self._lead(ranked, self.limits.confidence)
            if low > 1 + self.limits.margin:
                return RoundsEnd.CLEAR
            if high < 1 + self.limits.margin:
                return RoundsEnd.TIE
            if self._cannot_tell(ranked, number, max(left, 0)):
                return RoundsEnd.NOISE
        return RoundsEnd.TIME if left < 1 else None

    def _lead(self, ranked: Sequence[str], confidence: float) -> tuple[float, float]:
        """Between which values the lead of the best lies, over the one that is nearest to it."""
        best = self.series(ranked[0])
        found = [ratios.by_rank(self.series(name), best, confidence=confidence) for name in ranked[1:]]
        return min(low for low, _ in found), min(high for _, high in found)

    def _cannot_tell(self, ranked: Sequence[str], number: int, left: int) -> bool:
        """Whether the lead would be within what the control scatters by, even after all rounds that are left.

        The median of n rounds is uncertain by 1.25 times what one round is, divided by √n.
        """
        own, again = self.series(self.incumbent), self.series(self.incumbent + CONTROL)
        if min(len(own), len(again)) < self.limits.least_rounds:
            return False
        at_the_end = 2.6 * 1.25 * ratios.scatter(again, own) / math.sqrt(number + left)
        lead = self.cost(ranked[1]) / self.cost(ranked[0]) - 1
        return at_the_end > max(2 * lead, self.limits.margin) and number >= 2 * self.limits.least_rounds

    def _dismiss(self, number: int) -> None:
        """Those that are hopelessly slow leave at once: their turns would take the time of all others. Of the slower
        half those leave, now and then, that are surely slower than the best."""
        ranked = self._ranked()
        leaving = {name for name in ranked if self.cost(name) > self.limits.hopeless * self.cost(ranked[0])}
        if number % self.limits.halving_every == 0:
            best = self.series(ranked[0])
            leaving |= {
                name
                for name in ranked[max(2, math.ceil(len(ranked) / 2)) :]  # never the one next to the best
                if ratios.by_rank(self.series(name), best, confidence=0.75)[0] > 1 + self.limits.margin
            }
        leaving -= {self.incumbent, self.reference}
        self._present = [name for name in self._present if name not in leaving]

    def _verdict(self, ended: RoundsEnd) -> RoundsVerdict:
        ranked = self._ranked()
        if not ranked:
            first = next(iter(self.lost.values()))
            raise ContenderLost("every way of dividing this host", f"failed; the first: {first}")
        best = ranked[0]
        lead = None
        if len(ranked) > 1:
            lead = ratios.paired(self.series(ranked[1]), self.series(best))
        chosen = best if ended is RoundsEnd.ALONE else self._simplest(ranked)
        return RoundsVerdict(best=best, chosen=chosen, ended=ended, lead=lead, control=self.control())

    def _simplest(self, ranked: Sequence[str]) -> str:
        """The simplest of those that the rounds cannot tell from the best: neither surely slower by the margin, nor
        seen slower by more than twice what two turns of the same contender differ by."""
        best_name, best = ranked[0], self.series(ranked[0])
        indistinct = 1 + 2 * max(self.limits.margin, noise(self.control()))

        def is_near(name: str) -> bool:
            low, _ = ratios.by_rank(self.series(name), best, confidence=0.9)
            return low <= 1 + self.limits.margin and self.cost(name) <= indistinct * self.cost(best_name)

        return next(name for name in self.names if name == best_name or (name in ranked and is_near(name)))

    def control(self) -> RatioInterval | None:
        """The A/A figure; None where the incumbent had no turns."""
        own, again = self.series(self.incumbent), self.series(self.incumbent + CONTROL)
        return ratios.paired(again, own) if own and again else None


def noise(control: RatioInterval | None) -> float:
    """By how much two equal contenders may seem to differ, by the A/A figure."""
    if control is None:
        return 0.0
    return max(control.high, 1 / control.low) - 1
