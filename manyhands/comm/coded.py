"""Sums of gradients between hosts by a codec, around the comm: no strategy knows."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manyhands.comm.between import BetweenHosts, SpanSums
from manyhands.comm.codecs.codec import Codec
from manyhands.comm.comm import Comm, Spanned, Sums
from manyhands.comm.two_shots import CodedLane, CodedPart, CodedSum, coded_parts

AHEAD = 4  # spans whose first shot is under way before this worker waits for the oldest of them


class CodedHosts(Comm):
    """Another comm, whose sums of gradients are coded; all else goes as it is."""

    def __init__(self, inner: BetweenHosts, codec: Codec, lanes: Mapping[int, CodedLane]) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self._codec = codec
        self._lanes = lanes
        self._parts: dict[int, list[CodedPart]] = {}  # by span
        self._steps = 0  # in this generation

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
        step = _CodedStep(self._lanes, self._codec.at(replica.steps), replica, self._parts, self._steps)
        self._steps += 1
        return SpanSums(self, replica, step.begin)


class _CodedStep:
    """The coded sums of one step."""

    def __init__(
        self,
        lanes: Mapping[int, CodedLane],
        codec: Codec,
        replica: Spanned,
        parts: dict[int, list[CodedPart]],
        made: int,
    ) -> None:
        self._lanes, self._codec, self._replica, self._known = lanes, codec, replica, parts
        self._made = made  # steps of this generation before this one
        self._under_way: list[CodedSum] = []

    def begin(self, span: Any) -> Callable[[], None]:
        """Send a span's first shot, and the second of one that was sent before; calling what it returns waits."""
        vector, errors = self._replica.gradient(span), self._replica.errors
        before, after = errors.of(span, self._made) if errors else (None, None)
        lane = self._lanes[self._replica.lane(span)]
        one = CodedSum(lane, self._codec, vector, self._parts(span, lane), before, after)
        one.send()
        self._under_way.append(one)
        if len(self._under_way) > AHEAD:
            self._under_way.pop(0).answer()
        return partial(self._finish, one)

    def _finish(self, one: CodedSum) -> None:
        while self._under_way:  # all second shots leave before this worker waits for the first of them
            self._under_way.pop(0).answer()
        one.finish()

    def _parts(self, span: Any, lane: CodedLane) -> list[CodedPart]:
        if span.index not in self._known:
            length = span.stop - span.start
            matrices = self._replica.matrices(span)
            self._known[span.index] = coded_parts(length, len(lane.ranks), matrices)
        return self._known[span.index]


def can_code(dtype: torch.dtype) -> bool:
    return dtype == torch.float32
