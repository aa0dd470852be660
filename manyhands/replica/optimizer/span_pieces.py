"""A span cut into the tensors that an optimizer sees.

Element-wise optimizers do not notice where a tensor is cut, so one piece may cover many small parameters or a part of a
large one; others get whole tensors in their shapes.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from manyhands.replica.layout import Layout, Place, Span


class SpanPiece:
    """A part of a span that the optimizer treats as one tensor."""

    def __init__(self, places: tuple[int, ...], where: slice, tensor: Tensor, first: Place) -> None:
        self.places = places
        self.slice = where
        self.tensor = tensor
        self.group = first.group
        self.whole = first.whole
        self.rows = first.rows
        self.adopted = False
        """Whether its state lies in the vectors that all workers of the host see."""


class SpanPieces:
    """Cuts the spans of one flat vector of parameters."""

    def __init__(self, layout: Layout, params: Tensor) -> None:
        self._layout = layout
        self._params = params

    def cut(self, span: Span) -> list[SpanPiece]:
        """The fewest pieces: neighbours of one parameter group become one, unless they must stay whole."""
        pieces: list[SpanPiece] = []
        for index in span.places:
            place = self._layout.places[index]
            start, stop = max(place.start, span.start), min(place.stop, span.stop)
            last = pieces[-1] if pieces else None
            if last and not place.whole and not last.whole and last.group == place.group:
                pieces[-1] = self._piece((*last.places, index), last.slice.start, stop)
            else:
                pieces.append(self._piece((index,), start, stop))
        return pieces

    def split(self, piece: SpanPiece) -> list[SpanPiece]:
        """One piece per parameter: needed once they are not all updated alike."""
        parts = []
        for index in piece.places:
            place = self._layout.places[index]
            start, stop = max(place.start, piece.slice.start), min(place.stop, piece.slice.stop)
            part = self._piece((index,), start, stop)
            part.adopted = piece.adopted
            parts.append(part)
        return parts

    def _piece(self, places: tuple[int, ...], start: int, stop: int) -> SpanPiece:
        place = self._layout.places[places[0]]
        tensor = self._params[start:stop]
        if place.whole or place.rows:
            tensor = tensor.view(place.shape if place.whole else (-1, *place.shape[1:]))
        return SpanPiece(places, slice(start, stop), tensor, place)


def exported(
    piece: SpanPiece, state: Mapping[str, Any], vectors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Any]]:
    """A piece's state; None for what is in a vector: named so that a restore knows it existed."""
    for name, value in state.items():
        is_there = name in vectors and _same_memory(value, vectors[name][piece.slice])
        yield name, None if is_there else value


def _same_memory(value: Any, home: Tensor) -> bool:
    return isinstance(value, Tensor) and value.data_ptr() == home.data_ptr() and value.numel() == home.numel()
