"""The groups that one server owns: their values, and how many updates each has had."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from manyhands.replica.layout import Span
from manyhands.servers.process.handlers import Handler, Reply
from manyhands.servers.protocol.messages import Pull, Put, Values
from manyhands.servers.protocol.ownership import SpanGroup
from manyhands.servers.protocol.rows import ChangedRows, as_table, pack


class OwnedGroups:
    """The parameters and the optimizer's vectors, by group.

    `versions` lies in the host's memory, where its workers read it. `copies` are the workers that do not compute on
    the very memory that the server updates: of a table the server sends them only the rows that have changed.
    """

    def __init__(
        self,
        groups: Iterable[SpanGroup],
        vectors: Mapping[str, Tensor],
        versions: Tensor,
        copies: Collection[int] = (),
    ) -> None:
        self.by_index = {group.index: group for group in groups}
        self.vectors = vectors
        self._versions = versions.numpy()
        self._changed_rows = ChangedRows(copies)
        self.pull = Handler(self._pull, self._pull_bytes)

    @property
    def dtype(self) -> torch.dtype:
        return self.vectors["params"].dtype

    @property
    def spans(self) -> Sequence[Span]:
        return [span for group in self.by_index.values() for span in group.spans]

    def parts(self, vector: Tensor) -> dict[int, Tensor]:
        """By group, its part of a flat vector."""
        return {index: vector[group.slice] for index, group in self.by_index.items()}

    def version(self, index: int) -> int:
        return int(self._versions[index])

    def set_version(self, index: int, version: int) -> None:
        self._versions[index] = version

    def regroup(self, workers: Collection[int]) -> None:
        """Other workers come; if those before had copies, these have copies as well."""
        self._changed_rows = ChangedRows(workers if self._changed_rows.workers else ())

    def note_rows(self, index: int, numbers: Tensor | None) -> None:
        """An update changed these rows of a table; None: it may have changed any."""
        self._changed_rows.note(index, numbers)

    def put(self, message: Put, payload: Tensor | None) -> None:
        if payload is not None:
            self.vectors[message.vector][self.by_index[message.group].slice] = payload
        self._changed_rows.note(message.group, None)

    def values(self, worker: int, index: int, name: str = "params", *, whole: bool = False) -> Reply:
        """A group of a vector; if not `whole`, of a table of parameters only the rows that are news to the worker."""
        group, version = self.by_index[index], self.version(index)
        vector = self.vectors[name][group.slice]
        if group.table and name == "params":
            numbers = self._changed_rows.tell(worker, index, group.table)
            if numbers is not None and not whole:
                values = Values(group=index, version=version, rows=pack(numbers))
                return worker, values, as_table(vector, group.table)[numbers].view(-1)
        return worker, Values(group=index, version=version, vector=name), vector

    def group_bytes(self, index: int, vector: str = "params") -> int | None:
        """The length of a group of a vector; None if there is none."""
        group = self.by_index.get(index)
        return None if group is None or vector not in self.vectors else group.length * self.dtype.itemsize

    def _pull(self, worker: int, message: Pull, payload: Tensor | None) -> Iterator[Reply]:
        yield self.values(worker, message.group, message.vector, whole=message.whole)

    def _pull_bytes(self, message: Pull) -> int | None:
        return None if self.group_bytes(message.group, message.vector) is None else 0
