"""What the state of a span has besides vectors, where other processes can read it and go on with the span.

An element-wise optimizer has numbers: they lie in a table with a row for each parameter of each span. Any other
optimizer may keep anything: its state is packed into one of two slots in turn, and the table says which one is valid.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.comm.transports.slots import Slots
from manyhands.errors import TornUpdate
from manyhands.replica.layout import Layout, Span, table_rows
from manyhands.replica.optimizer.abilities import is_element_wise, number_states
from manyhands.replica.optimizer.span_pieces import SpanPiece, exported
from manyhands.replica.state import packing
from manyhands.replica.state.transcoding import Values

_EMPTY, _FIRST, _SECOND, _ELSEWHERE = 0, 1, 2, -1  # which slot has a piece's state


class CommonMemory(Protocol):
    """Memory that the other processes of the host see."""

    def allocate(self, length: int, dtype: torch.dtype) -> Tensor: ...

    def slots(self, count: int) -> Slots: ...


class StateTable:
    """The table of a process whose state no other process needs: it notes nothing."""

    changes = False
    """Whether a piece's entry changes with every step, not only when its state is made."""

    def __init__(self) -> None:
        self.numbers = torch.empty(0, 0)

    def note(self, span: Span, piece: SpanPiece, state: Mapping[str, Any]) -> None:
        """Write down a piece's state where the others see it."""

    def find(self, span: Span) -> Values:
        """The state of a span that another process has updated, by parameter; None for what is in a vector."""
        raise TornUpdate(
            "no other process has written down its optimizer's state; go on from the last checkpoint"
        )


class NumberTable(StateTable):
    """Per parameter of each span: whether it has state, and the numbers in it."""

    def __init__(
        self, optimizer: Optimizer, layout: Layout, vectors: Mapping[str, Tensor], memory: CommonMemory
    ) -> None:
        self._layout = layout
        self._vectors = vectors
        self._rows = table_rows(layout)
        self._names = number_states(optimizer)
        self.changes = bool(self._names)
        rows, columns = self._rows[-1].stop, 1 + len(self._names)
        self.numbers = memory.allocate(rows * columns, torch.float64).view(rows, columns)

    def note(self, span: Span, piece: SpanPiece, state: Mapping[str, Any]) -> None:
        first = self._rows[span.index].start + span.places.index(piece.places[0])
        row = [float(bool(state)), *(float(state.get(name, 0.0)) for name in self._names)]
        self.numbers[first : first + len(piece.places)] = torch.tensor(row, dtype=self.numbers.dtype)

    def find(self, span: Span) -> Values:
        rows = self.numbers[self._rows[span.index]].tolist()
        return {
            self._layout.places[index].name: {
                **dict.fromkeys(self._vectors),
                **{
                    name: torch.tensor(value, dtype=dtype)
                    for (name, dtype), value in zip(self._names.items(), values, strict=True)
                },
            }
            for index, (has_state, *values) in zip(span.places, rows, strict=True)
            if has_state
        }


class SlotTable(StateTable):
    """Per parameter of each span: which of its two slots has the state; the other one is free to write to."""

    changes = True

    def __init__(
        self, optimizer: Optimizer, layout: Layout, vectors: Mapping[str, Tensor], memory: CommonMemory
    ) -> None:
        self._optimizer = optimizer
        self._layout = layout
        self._vectors = vectors
        self._rows = table_rows(layout)
        rows = self._rows[-1].stop
        self._slots = memory.slots(2 * rows)
        self.numbers = memory.allocate(rows, torch.float64).view(rows, 1)

    def note(self, span: Span, piece: SpanPiece, state: Mapping[str, Any]) -> None:
        row = self._rows[span.index].start + span.places.index(piece.places[0])
        self.numbers[row] = self._put(row, piece, state)

    def _put(self, row: int, piece: SpanPiece, state: Mapping[str, Any]) -> int:
        slot = _SECOND if self.numbers[row, 0] == _FIRST else _FIRST
        known = {self._layout.places[piece.places[0]].name: dict(exported(piece, state, self._vectors))}
        try:
            fits = self._slots.put(2 * row + slot - 1, packing.pack(known))
        except packing.NotStates:
            return _ELSEWHERE
        return slot if fits else _ELSEWHERE

    def find(self, span: Span) -> Values:
        known: Values = {}
        for row, index in enumerate(span.places, self._rows[span.index].start):
            slot = int(self.numbers[row, 0])
            if slot == _ELSEWHERE:
                raise TornUpdate(
                    f"the state that {type(self._optimizer).__name__} has for {self._layout.places[index].name} is not "
                    "made of numbers and tensors, or is too large, so no other process can go on with it; go on from "
                    "the last checkpoint"
                )
            if slot != _EMPTY:
                known |= packing.unpack(self._slots.get(2 * row + slot - 1))
        return known


def table_for(
    optimizer: Optimizer, layout: Layout, vectors: Mapping[str, Tensor], memory: CommonMemory | None
) -> StateTable:
    """The table that suits the optimizer, in `memory`; without memory, one that notes nothing."""
    if memory is None:
        return StateTable()
    kind = NumberTable if is_element_wise(optimizer) else SlotTable
    return kind(optimizer, layout, vectors, memory)
