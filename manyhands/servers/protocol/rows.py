"""Rows of tables, such as an embedding's: only the rows that a step has touched travel.

A worker sends the numbers of the rows with their gradients. The server remembers for each worker which rows any update
has changed since its last answer, and sends only those: the worker then has the whole table as it is.
"""

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from manyhands.servers.protocol.messages import NotAMessage
from manyhands.servers.protocol.ownership import Table


def as_table(vector: Tensor, table: Table) -> Tensor:
    """The rows in a group's vector, which may be a little longer."""
    return vector[: table.rows * table.columns].view(table.rows, table.columns)


def touched(vector: Tensor, table: Table) -> Tensor:
    """The numbers of the rows that are not zero, where the worker has not sent them."""
    return as_table(vector, table).any(1).nonzero().flatten()


def pays(numbers: Tensor, table: Table) -> bool:
    """Whether these rows with their numbers are less than the whole table."""
    return len(numbers) * (table.columns + 1) < table.rows * table.columns


def gradient_of(numbers: Tensor, values: Tensor, table: Table) -> Tensor:
    """Some rows as the tensor that torch's optimizers take."""
    return torch.sparse_coo_tensor(
        numbers[None],
        values,
        (table.rows, table.columns),
        is_coalesced=True,  # each number once, in order
        check_invariants=False,
    )


def pack(numbers: Tensor) -> bytes:
    return numbers.to(torch.int32).numpy().tobytes()


def unpack(content: bytes, table: Table | None) -> Tensor:
    """The numbers of the rows; they must be rows of this table, each once and in order."""
    if table is None or len(content) % 4:
        raise NotAMessage("rows of what has none")
    numbers = torch.from_numpy(np.frombuffer(content, dtype=np.int32).astype(np.int64))
    ascending = bool((numbers[1:] > numbers[:-1]).all())
    if len(numbers) and not (ascending and int(numbers[0]) >= 0 and int(numbers[-1]) < table.rows):
        raise NotAMessage(f"rows that a table of {table.rows} does not have")
    return numbers


class ChangedRows:
    """Which rows of each table have changed since each worker that has a copy of it was last told."""

    def __init__(self, workers: Collection[int]) -> None:
        self.workers = workers
        self._changed: dict[
            tuple[int, int], Tensor
        ] = {}  # by worker and group; none: it must be told everything

    def note(self, group: int, numbers: Tensor | None) -> None:
        """These rows were changed; None: any may have been."""
        for worker in self.workers:
            if numbers is None:
                self._changed.pop((worker, group), None)
            elif (changed := self._changed.get((worker, group))) is not None:
                changed[numbers] = True

    def tell(self, worker: int, group: int, table: Table) -> Tensor | None:
        """The rows to tell a worker now; None for all."""
        changed = self._changed.get((worker, group))
        numbers = None if changed is None else changed.nonzero().flatten()
        if worker in self.workers:
            self._changed[worker, group] = torch.zeros(table.rows, dtype=torch.bool)
        return numbers if numbers is not None and pays(numbers, table) else None
