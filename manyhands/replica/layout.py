"""Where each parameter lies in the flat vector, and how the vector is cut into spans.

Pure functions over shapes: every worker computes the same layout without a message. Parameters are laid out
last layer first, the order in which a backward pass finishes them, so the spans of lower index are ready earlier.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

ALIGN = 16  # elements: each parameter starts on a cache line of its own
SMALLEST_SPAN = 4096  # elements: below this, the overhead of one more span outweighs sharing the work


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One parameter as the model has it."""

    name: str
    shape: tuple[int, ...]
    group: int  # the optimizer's parameter group
    whole: bool = False  # may not be split: its update or its gradients need all of it together
    rows: bool = False  # gets gradients for some rows only, and has a span to itself
    every: int = 1  # steps from one update to the next; a span has parameters of one kind


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a parameter lies: `start` to `stop` of the flat vector."""

    name: str
    shape: tuple[int, ...]
    group: int
    whole: bool
    start: int
    stop: int
    rows: bool = False
    every: int = 1


@dataclass(frozen=True, kw_only=True)
class Span:
    """A contiguous range of the flat vector: the unit of ownership, exchange and update."""

    index: int
    start: int
    stop: int
    places: tuple[int, ...]  # the parameters that lie in it, wholly or partly

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, kw_only=True)
class Layout:
    places: tuple[Place, ...]
    spans: tuple[Span, ...]
    length: int


def lay_out(shapes: Sequence[Shape], *, span_elements: int, lanes: int) -> Layout:
    """Place the parameters (given in the model's order) and cut spans so that every lane gets about the same."""
    places: list[Place] = []
    at = 0
    for shape in reversed(shapes):
        size = prod(shape.shape)
        places.append(
            Place(
                name=shape.name,
                shape=shape.shape,
                group=shape.group,
                whole=shape.whole,
                start=at,
                stop=at + size,
                rows=shape.rows,
                every=shape.every,
            )
        )
        at += _aligned(size)
    pieces = max(1, -(-at // span_elements))
    pieces = -(-pieces // lanes) * lanes
    limit = max(_aligned(-(-at // pieces)), SMALLEST_SPAN)
    return Layout(places=tuple(places), spans=tuple(_cut(places, at, limit)), length=at)


def _cut(places: Sequence[Place], length: int, limit: int) -> list[Span]:
    """Spans of at most `limit` elements; only a parameter that must stay whole may make a longer one."""
    edges = [0]
    last = 1
    for place in places:
        if place.every != last and place.start > edges[-1]:
            edges.append(place.start)
        last = place.every
        end = place.start + _aligned(place.stop - place.start)
        if place.rows:
            edges += [edge for edge in (place.start, end) if edge > edges[-1]]
        elif place.whole:
            if end - edges[-1] > limit and place.start > edges[-1]:
                edges.append(place.start)
            if end - edges[-1] >= limit:
                edges.append(end)
        else:
            while end - edges[-1] > limit:
                edges.append(edges[-1] + limit)
    if edges[-1] < length:
        edges.append(length)
    return [
        Span(
            index=index,
            start=start,
            stop=stop,
            places=tuple(i for i, place in enumerate(places) if place.start < stop and place.stop > start),
        )
        for index, (start, stop) in enumerate(itertools.pairwise(edges))
    ]


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
