"""Sums of gradients between hosts by a codec, around the comm: no strategy knows."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from manyhands.comm.between import BetweenHosts, SpanSums
from manyhands.comm.codecs.codec import Codec
from manyhands.comm.codecs.power_sgd import PowerSGD
from manyhands.comm.comm import Comm, Spanned, Sums
from manyhands.comm.low_rank import THIRD, LowRankCut, LowRankSum, low_rank_cut
from manyhands.comm.two_shots import FIRST, SECOND, CodedLane, CodedPart, CodedSum, coded_parts

SHOTS = (FIRST, SECOND, THIRD)
AHEAD = 4  # spans whose first shot is under way before this worker waits for the oldest of them

_Cuts = dict[int, Any]  # by span: how it is cut, which is the same in every step
_Directions = dict[int, list[Tensor]]  # by span: those of the step before


class CodedHosts(Comm):
    """Another comm, whose sums of gradients are coded; all else goes as it is."""

    def __init__(self, inner: BetweenHosts, codec: Codec, lanes: Mapping[int, CodedLane]) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self._codec = codec
        self._lanes = lanes
        self._cuts: _Cuts = {}
        self._directions: _Directions = {}
        self._steps = 0  # in this generation

    def forget(self) -> None:
        """A run that resumes from here begins without what the steps before have found."""
        self._directions.clear()

    def sum_(self, vector: Tensor) -> None:
        self.inner.sum_(vector)

    def start_sum(self, vector: Tensor) -> None:
        self.inner.start_sum(vector)

    def sum_is_done(self) -> bool:
        return self.inner.sum_is_done()

    def finish_sum(self) -> Tensor | None:
        return self.inner.finish_sum()

    def any_(self, flags: Tensor) -> Tensor:
        return self.inner.any_(flags)

    def most_of(self, value: float) -> float:
        return self.inner.most_of(value)

    def start_quick(self, vector: Tensor) -> Callable[[], None]:
        return self.inner.start_quick(vector)

    def sums(self, replica: Spanned) -> Sums:
        codec = self._codec.at(replica.steps)
        if isinstance(codec, PowerSGD):
            step: _CodedStep = _LowRankStep(
                self._lanes, codec, replica, self._cuts, self._directions, self._steps
            )
        else:
            step = _TwoShotStep(self._lanes, codec, replica, self._cuts, self._steps)
        self._steps += 1
        return SpanSums(self, replica, step.begin)


class _CodedStep:
    """The coded sums of one step."""

    def __init__(self, lanes: Mapping[int, CodedLane], replica: Spanned, cuts: _Cuts, made: int) -> None:
        """`made` are the steps of this generation before this one."""
        self._lanes, self._replica, self._cuts, self._made = lanes, replica, cuts, made
        self._to_answer: list[CodedSum | LowRankSum] = []
        self._to_reply: list[CodedSum | LowRankSum] = []

    def begin(self, span: Any) -> Callable[[], None]:
        """Send a span's first shot, and the second of one that was sent before; calling what it returns waits."""
        errors = self._replica.errors
        before, after = errors.of(span, self._made) if errors else (None, None)
        one = self._sum(span, self._replica.gradient(span), before, after)
        one.send()
        self._to_answer.append(one)
        self._to_reply.append(one)
        if len(self._to_answer) > AHEAD:
            self._to_answer.pop(0).answer()
        return partial(self._finish, one)

    def _finish(self, one: CodedSum | LowRankSum) -> None:
        while self._to_answer:  # all shots leave before this worker waits for the first of them
            self._to_answer.pop(0).answer()
        while self._to_reply:
            self._to_reply.pop(0).reply()
        one.finish()

    def _lane(self, span: Any) -> CodedLane:
        return self._lanes[self._replica.lane(span)]

    def _sum(
        self, span: Any, vector: Tensor, before: Tensor | None, after: Tensor | None
    ) -> CodedSum | LowRankSum:
        raise NotImplementedError


class _TwoShotStep(_CodedStep):
    """By a codec that makes messages of vectors."""

    def __init__(
        self, lanes: Mapping[int, CodedLane], codec: Codec, replica: Spanned, cuts: _Cuts, made: int
    ) -> None:
        super().__init__(lanes, replica, cuts, made)
        self._codec = codec

    def _sum(self, span: Any, vector: Tensor, before: Tensor | None, after: Tensor | None) -> CodedSum:
        lane = self._lane(span)
        parts: list[CodedPart] | None = self._cuts.get(span.index)
        if parts is None:
            parts = coded_parts(span.stop - span.start, len(lane.ranks), self._replica.matrices(span))
            self._cuts[span.index] = parts
        return CodedSum(lane, self._codec, vector, parts, before, after)


class _LowRankStep(_CodedStep):
    """By thin factors of the sum."""

    def __init__(
        self,
        lanes: Mapping[int, CodedLane],
        codec: PowerSGD,
        replica: Spanned,
        cuts: _Cuts,
        directions: _Directions,
        made: int,
    ) -> None:
        super().__init__(lanes, replica, cuts, made)
        self._rank, self._directions, self._seed = codec.rank, directions, replica.steps

    def _sum(self, span: Any, vector: Tensor, before: Tensor | None, after: Tensor | None) -> LowRankSum:
        assert after is not None, "it keeps an error"
        lane = self._lane(span)
        cut: LowRankCut | None = self._cuts.get(span.index)
        if cut is None:
            pieces, widths = self._replica.matrices(span), self._replica.widths(span)
            cut = self._cuts[span.index] = low_rank_cut(span.stop - span.start, pieces, widths, self._rank)
        if span.index not in self._directions:
            self._directions[span.index] = cut.start(self._rank, self._seed << 20 | span.index)
        owner = span.index % len(lane.ranks)
        return LowRankSum(lane, cut, self._directions[span.index], vector, before, after, owner)
