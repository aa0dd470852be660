"""A worker's gradients on their way to the servers: of a group a vector, of a table the rows that a step touched."""

from torch import Tensor

from manyhands.replica.gradients.tables import Tables
from manyhands.servers.protocol.ownership import SpanGroup
from manyhands.servers.protocol.rows import as_table, gradient_of, pack, pays, touched


class Outgoing:
    """The vector of gradients, which servers of this host read and from which ZeroMQ sends to others."""

    def __init__(self, grads: Tensor, tables: Tables | None) -> None:
        self._grads = grads
        self._tables = tables  # where the rows are known; where neighbours add up, they are found by looking

    def become(self, gradient: Tensor) -> None:
        """Another gradient instead of the backward pass's."""
        self._grads.copy_(gradient)
        if self._tables:
            self._tables.forget()

    def of(self, group: SpanGroup) -> Tensor:
        """A group's gradient: a vector, or a sparse tensor of rows."""
        vector = self._grads[group.slice]
        if group.table is None:
            return vector
        numbers = self._touched(group)
        return gradient_of(numbers, as_table(vector, group.table)[numbers], group.table)

    def put(self, group: SpanGroup, gradient: Tensor) -> None:
        """Another gradient of a group, in the form that `of` gives."""
        if gradient.is_sparse and self._tables:
            self._tables.put(group.spans[0], gradient)
        else:
            whole = gradient.to_dense().view(-1)
            self._grads[group.start : group.start + len(whole)] = whole

    def packed(self, group: SpanGroup, *, travels: bool) -> tuple[Tensor, bytes | None]:
        """What a push has: a vector, and the numbers of its rows where it does not have all of them.

        A vector that does not travel is read where it lies, and so is whole.
        """
        vector = self._grads[group.slice]
        if group.table is None:
            return vector, None
        numbers = self._touched(group)
        if not pays(numbers, group.table):
            return vector, None
        return as_table(vector, group.table)[numbers].view(-1) if travels else vector, pack(numbers)

    def _touched(self, group: SpanGroup) -> Tensor:
        assert group.table is not None
        known = self._tables.touched(group.spans[0]) if self._tables else None
        return touched(self._grads[group.slice], group.table) if known is None else known
