"""How the workers of a team divide the additions: whose turn it is at which piece of the sum."""

from collections.abc import Sequence

from torch import Tensor

from manyhands.replica.layout import Layout, Span

Piece = tuple[Tensor, int, int]  # where to add, and which elements of the parameter's gradient


class Turns:
    """What one worker adds, and when; `owners[i]` is the worker that owns span i."""

    def __init__(
        self, layout: Layout, total: Tensor, owners: Sequence[int], *, index: int, workers: int
    ) -> None:
        self.owned = tuple(span for span in layout.spans if owners[span.index] == index)
        # By parameter: for each turn before the owner's, the pieces that are this worker's to add in it.
        self.before: list[list[list[Piece]]] = [[[] for _ in range(workers - 1)] for _ in layout.places]
        # By parameter and span, where this worker is the owner, who adds last.
        self.last: list[dict[int, Piece]] = [{} for _ in layout.places]
        for span in layout.spans:
            turn = (index - owners[span.index] - 1) % workers
            for place in span.places:
                piece = _piece(layout, place, span, total)
                if turn == workers - 1:
                    self.last[place][span.index] = piece
                else:
                    self.before[place][turn].append(piece)
        self.last_span = [max(pieces, default=-1) for pieces in self.last]
        self.gaps = [_gaps(layout, span) for span in layout.spans]


def _gaps(layout: Layout, span: Span) -> list[tuple[int, int]]:
    """The elements of a span between its parameters and after them, which no gradient fills."""
    gaps, at = [], span.start
    for index in span.places:
        place = layout.places[index]
        if place.start > at:
            gaps.append((at - span.start, place.start - span.start))
        at = min(place.stop, span.stop)
    if at < span.stop:
        gaps.append((at - span.start, span.stop - span.start))
    return gaps


def _piece(layout: Layout, index: int, span: Span, total: Tensor) -> Piece:
    place = layout.places[index]
    start, stop = max(place.start, span.start), min(place.stop, span.stop)
    return total[start:stop], start - place.start, stop - place.start
