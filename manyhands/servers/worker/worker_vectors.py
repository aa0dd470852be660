"""A worker's flat vectors as its servers use them: parameters come in, gradients go out.

What servers of this host own lies in common memory. Gradients are sent as a vector per group, or, of a table, as the
rows that a step has touched.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from manyhands.replica.gradients.tables import Tables
from manyhands.servers.protocol.messages import NotAMessage, Values
from manyhands.servers.protocol.ownership import SpanGroup, Table
from manyhands.servers.protocol.rows import as_table, gradient_of, pack, pays, touched, unpack
from manyhands.servers.transport.host_memory import HostMemory
from manyhands.servers.worker.server_connections import Arrived


class CopiedParameters:
    """A worker computes on its own copy, into which it puts what servers send, or what they have in common memory."""

    in_place = False

    def __init__(self, vector: Tensor, groups: Sequence[SpanGroup], memory: HostMemory | None) -> None:
        self.vector = vector
        self.seen = [0] * len(groups)  # by group: the version that the worker computes on
        self._groups = groups
        self._memory = memory  # common with servers of this host, if there are any

    def place(self, arrived: list[Arrived]) -> None:
        """Put in place what has come."""
        for values, vector in arrived:
            self._write(values, vector, self.vector)
            self.seen[values.group] = values.version
        arrived.clear()

    def collected(self, name: str, arrived: list[Arrived]) -> Tensor:
        """An optimizer state, put together."""
        whole = torch.zeros_like(self.vector)
        for values, vector in arrived:
            self._write(values, vector, whole)
        return whole

    def share(self, name: str, source: Tensor) -> None:
        """Give servers of this host a vector's values."""
        if self._memory is not None:
            home = self._memory.vector(name)
            if home.data_ptr() != source.data_ptr():
                home.copy_(source)

    def _write(self, values: Values, sent: Tensor | None, target: Tensor) -> None:
        """What a server sent, or what it has in common memory; of a table it may be some rows."""
        group = self._groups[values.group]
        home, table = target[group.slice], group.table
        if sent is not None:
            source = sent.view(target.dtype)
        elif self._memory is not None:
            source = self._memory.vector(values.vector)[group.slice]
        else:
            return
        if values.rows is None:
            home.copy_(source)
        elif table is None:
            raise NotAMessage(f"rows of group {values.group}, which is no table")
        else:
            numbers = unpack(values.rows, table)
            rows = source.view(-1, table.columns) if sent is not None else as_table(source, table)[numbers]
            as_table(home, table)[numbers] = rows


class InPlaceParameters:
    """All servers are on this host: the worker computes on the very vector that they update."""

    in_place = True

    def __init__(self, vector: Tensor, groups: int, memory: HostMemory) -> None:
        self.vector = vector
        self.seen = [0] * groups
        self._memory = memory
        self._versions = memory.versions(groups).numpy()

    def place(self, arrived: list[Arrived]) -> None:
        arrived.clear()
        self.seen = self._versions.tolist()

    def collected(self, name: str, arrived: list[Arrived]) -> Tensor:
        return self._memory.vector(name)

    def share(self, name: str, source: Tensor) -> None:
        home = self._memory.vector(name)
        if home.data_ptr() != source.data_ptr():
            home.copy_(source)


ServedParameters = CopiedParameters | InPlaceParameters


class OutgoingGradients:
    """The vector of gradients, which servers of this host read and from which ZeroMQ sends to others."""

    def __init__(self, vector: Tensor, tables: Tables | None, local_servers: Collection[int]) -> None:
        self.vector = vector
        self._tables = tables  # where the rows are known; where neighbours add up, they are found by looking
        self._local = local_servers

    def load(self, gradient: Tensor) -> None:
        """Another gradient instead of the backward pass's."""
        self.vector.copy_(gradient)
        if self._tables:
            self._tables.forget()

    def of(self, group: SpanGroup) -> Tensor:
        """A group's gradient: a vector, or a sparse tensor of rows."""
        vector = self.vector[group.slice]
        if group.table is None:
            return vector
        numbers = self._touched(group, group.table)
        return gradient_of(numbers, as_table(vector, group.table)[numbers], group.table)

    def put(self, group: SpanGroup, gradient: Tensor) -> None:
        """Another gradient of a group, in the form that `of` gives."""
        if gradient.is_sparse and self._tables:
            self._tables.put(group.spans[0], gradient)
        else:
            whole = gradient.to_dense().view(-1)
            self.vector[group.start : group.start + len(whole)] = whole

    def packed(self, group: SpanGroup) -> tuple[Tensor, bytes | None]:
        """What a push has: a vector, and the numbers of its rows where it does not have all of them.

        A server of this host reads the vector where it lies, and so it is whole.
        """
        vector = self.vector[group.slice]
        if group.table is None:
            return vector, None
        numbers = self._touched(group, group.table)
        if not pays(numbers, group.table):
            return vector, None
        is_local = group.server in self._local
        return vector if is_local else as_table(vector, group.table)[numbers].view(-1), pack(numbers)

    def _touched(self, group: SpanGroup, table: Table) -> Tensor:
        known = self._tables.touched(group.spans[0]) if self._tables else None
        return touched(self.vector[group.slice], table) if known is None else known
