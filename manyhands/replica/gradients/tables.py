"""Gradients of tables, such as an embedding's: a step touches some rows, and only those are written.

In the flat vector of gradients the other rows of a table are zero, and stay so without being written: what one step has
put there the next one takes away. So the vector always is the whole gradient, at the cost of the touched rows.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from manyhands.replica.layout import Layout, Span

_NONE = torch.empty(0, dtype=torch.int64)


@dataclass
class _TableBlock:
    """The rows of a table that lie in one span; `first` is their first row's number in the table."""

    values: Tensor
    first: int
    touched: Tensor | None  # the rows that may be other than zero, ascending; None: any


class Tables:
    """The tables in a vector of gradients that one worker alone writes."""

    def __init__(self, layout: Layout, total: Tensor) -> None:
        self._blocks: dict[int, _TableBlock] = {}
        for span in layout.spans:
            place = layout.places[span.places[0]]
            if place.rows:
                columns = prod(place.shape[1:])
                self._blocks[span.index] = _TableBlock(
                    values=total[span.start : min(span.stop, place.stop)].view(-1, columns),
                    first=(span.start - place.start) // columns,
                    touched=_NONE,
                )

    def __contains__(self, span: int) -> bool:
        return span in self._blocks

    def write(self, span: int, gradient: Tensor | None) -> None:
        """A step's gradient of the whole table, of which this span has a part: some rows, all as a vector, or none."""
        block = self._blocks[span]
        if gradient is not None and not gradient.is_sparse:
            start = block.first * block.values.shape[1]
            block.values.view(-1).copy_(gradient[start : start + block.values.numel()])
            block.touched = None
            return
        self._clear(block)
        if gradient is not None:
            edges = torch.tensor([block.first, block.first + len(block.values)])
            numbers = gradient.indices()[0]
            start, stop = torch.searchsorted(numbers, edges).tolist()
            self._fill(block, numbers[start:stop] - block.first, gradient.values()[start:stop])

    def put(self, span: Span, rows: Tensor) -> None:
        """Other rows of a block instead, as a sparse tensor."""
        block, rows = self._blocks[span.index], rows.coalesce()
        self._clear(block)
        self._fill(block, rows.indices()[0], rows.values())

    def touched(self, span: Span) -> Tensor | None:
        """The rows of a block that have a gradient, ascending; None where they were not counted."""
        block = self._blocks.get(span.index)
        return None if block is None else block.touched

    def forget(self) -> None:
        """The vector was written to from outside."""
        for block in self._blocks.values():
            block.touched = None

    def _clear(self, block: _TableBlock) -> None:
        if block.touched is None:
            block.values.zero_()
        else:
            block.values[block.touched] = 0.0
        block.touched = _NONE

    def _fill(self, block: _TableBlock, numbers: Tensor, values: Tensor) -> None:
        block.values[numbers] = values
        block.touched = numbers
