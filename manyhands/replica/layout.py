"""Where each parameter lies in the flat vector, and how the vector is cut into spans.

Pure functions over shapes: every worker computes the same layout without a message. Parameters are laid out
last layer first, the order in which a backward pass finishes them, so the spans of lower index are ready earlier.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SPAN_BYTES = 1 << 20  # fits a core's cache: a span is added up and updated without going back to memory
ALIGN = 16  # elements: each parameter starts on a cache line of its own
SMALLEST_SPAN = 4096  # elements: below this, the overhead of one more span outweighs sharing the work
LARGEST_BLOCK = 1 << 24  # elements of a table: what travels whole at a pause fits a message


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One parameter as the model has it."""

    name: str
    shape: tuple[int, ...]
    group: int  # the optimizer's parameter group
    whole: bool = False  # may not be split: its update needs all of it together
    rows: bool = False  # a table, such as an embedding's: a step has gradients of some of its rows only
    factored: bool = (
        False  # a matrix whose gradients come as factors: its spans are rows of it and nothing else
    )
    every: int = 1  # steps from one update to the next


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
    factored: bool = False
    every: int = 1

    def own(self, vector: "Tensor") -> "Tensor":
        """The parameter in a vector, as a tensor with a storage of its own length: a file that is written of it has
        nothing else, and two of them are not taken for one."""
        return own_storage(vector[self.start : self.stop], self.shape)


def own_storage(piece: "Tensor", shape: Sequence[int]) -> "Tensor":
    """A piece of a vector in host memory as a tensor whose storage begins and ends with it."""
    if not piece.numel() or piece.device.type != "cpu":
        return piece.view(*shape)
    size, first = piece.element_size(), piece.storage_offset()
    storage = piece.untyped_storage()[first * size : (first + piece.numel()) * size]
    return piece.new_empty(0).set_(storage).view(shape)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Span:
    """A contiguous range of the flat vector: the unit of ownership, exchange and update."""

    index: int
    start: int
    stop: int
    places: tuple[int, ...]  # the parameters that lie in it, wholly or partly

    @cached_property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, kw_only=True)
class Layout:
    places: tuple[Place, ...]
    spans: tuple[Span, ...]
    length: int


def lay_out(shapes: Sequence[Shape], *, span_elements: int, lanes: int, matrix_spans: int = 1) -> Layout:
    """Place the parameters (given in the model's order) and cut spans so that every lane gets about the same.

    Those of matrices whose gradients come as factors may be `matrix_spans` times as long as others.
    """
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
                factored=shape.factored,
                every=shape.every,
            )
        )
        at += _aligned(size)
    pieces = max(1, -(-at // span_elements))
    pieces = -(-pieces // lanes) * lanes
    limit = max(_aligned(-(-at // pieces)), SMALLEST_SPAN)
    return Layout(places=tuple(places), spans=tuple(_cut(places, at, limit, lanes, matrix_spans)), length=at)


SMALLEST_CODED = 1024  # elements: what a codec does to fewer is not worth its bytes


def coded_pieces(layout: Layout, span: Span) -> list[slice]:
    """The elements of a span, counted from its beginning, that a codec may code: those of large tensors. Biases and
    norms, of one dimension, are few, and much depends on each."""
    return [
        slice(max(place.start, span.start) - span.start, min(place.stop, span.stop) - span.start)
        for place in _coded_places(layout, span)
    ]


def coded_widths(layout: Layout, span: Span) -> list[int]:
    """The same tensors as matrices: how long their rows are."""
    return [prod(place.shape[1:]) for place in _coded_places(layout, span)]


def _coded_places(layout: Layout, span: Span) -> list[Place]:
    places = (layout.places[index] for index in span.places)
    return [one for one in places if len(one.shape) > 1 and one.stop - one.start >= SMALLEST_CODED]


def table_rows(layout: Layout) -> list[slice]:
    """By span: where the numbers of its places are in a table with a row for each place of each span."""
    found, at = [], 0
    for span in layout.spans:
        found.append(slice(at, at + len(span.places)))
        at += len(span.places)
    return found


def _cut(places: Sequence[Place], length: int, limit: int, lanes: int, matrix_spans: int) -> list[Span]:
    """Spans of at most `limit` elements; only tables, matrices, and parameters that must stay whole make longer ones.

    The parameters of a span are updated equally often. A table has spans to itself, blocks of its rows, and so has a
    matrix whose gradients come as factors.
    """
    edges = [0]
    for before, place in zip([None, *places], places, strict=False):
        end = place.start + _aligned(place.stop - place.start)
        apart = before is not None and place.every != before.every
        if (apart or place.rows or place.factored) and place.start > edges[-1]:
            edges.append(place.start)
        if place.rows:
            edges += [*_row_edges(place, lanes), end]
        elif place.factored:
            edges += [*_matrix_edges(place, matrix_spans * limit, lanes), end]
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


def _matrix_edges(place: Place, limit: int, lanes: int) -> list[int]:
    """Where to cut a matrix between its rows, so that every lane gets about as many of them."""
    height, width = place.shape
    pieces = -(-height * width // limit)
    pieces = -(-pieces // lanes) * lanes
    cuts = sorted({height * piece // pieces for piece in range(1, pieces)} - {0, height})
    return [place.start + row * width for row in cuts]


def _row_edges(place: Place, lanes: int) -> range:
    """Where a table is cut: into a block of rows for every lane, unless those would be too small or too large."""
    if place.whole:
        return range(0)
    rows, columns = place.shape[0], prod(place.shape[1:])
    blocks = min(lanes, max(1, rows * columns // SMALLEST_SPAN))
    blocks = max(blocks, -(-rows // max(1, LARGEST_BLOCK // columns)))
    block = -(-rows // blocks) * columns
    return range(place.start + block, place.stop, block)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
