"""Rows of a table, such as that of an embedding: between hosts only those travel that a batch has touched.

A gradient has the rows that are not zero. A server remembers for each worker which rows have changed since it last told
it, by whoever's update, and answers with those: the worker ends with what it would have got from the whole table.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.servers.messages import NotAMessage

Table = tuple[int, int]  # rows and columns


def as_table(vector: Tensor, table: Table) -> Tensor:
    """The rows in a group's vector, which may be a little longer."""
    rows, columns = table
    return vector[: rows * columns].view(rows, columns)


def touched(vector: Tensor, table: Table) -> Tensor | None:
    """The numbers of the rows that are not zero; None where most are, and the whole is as quick."""
    found = as_table(vector, table).any(1).nonzero().flatten()
    return found if 2 * len(found) <= table[0] else None


def pack(numbers: Tensor) -> bytes:
    return numbers.to(torch.int32).numpy().tobytes()


def unpack(content: bytes, table: Table | None) -> Tensor:
    """The numbers of the rows; they must be rows of this table, each once and in order."""
    if table is None or len(content) % 4:
        raise NotAMessage("rows of what has none")
    numbers = (
        torch.frombuffer(bytearray(content), dtype=torch.int32)
        if content
        else torch.empty(0, dtype=torch.int32)
    )
    numbers = numbers.to(torch.int64)
    ordered = bool((numbers[1:] > numbers[:-1]).all())
    if len(numbers) and not (ordered and int(numbers[0]) >= 0 and int(numbers[-1]) < table[0]):
        raise NotAMessage(f"rows that a table of {table[0]} does not have")
    return numbers


def spread(values: Tensor | None, numbers: Tensor, table: Table, length: int, dtype: torch.dtype) -> Tensor:
    """A whole vector with the given rows in it and zeros elsewhere."""
    whole = torch.zeros(length, dtype=dtype)
    if values is not None and len(numbers):
        as_table(whole, table)[numbers] = values.view(-1, table[1])
    return whole


class Changed:
    """Which rows of each table have changed since each worker was last told."""

    def __init__(self, workers: Sequence[int]) -> None:
        self._workers = workers
        self._news: dict[tuple[int, int], Tensor] = {}

    def note(self, group: int, before: Tensor, after: Tensor) -> None:
        changed = (before != after).any(1)
        for worker in self._workers:
            news = self._news.get((worker, group))
            if news is not None:
                news |= changed

    def told(self, worker: int, group: int, table: Table) -> None:
        """The worker has been told everything."""
        if worker in self._workers:
            self._news[worker, group] = torch.zeros(table[0], dtype=torch.bool)

    def tell(self, worker: int, group: int, table: Table) -> Tensor | None:
        """The rows to tell it; None for all."""
        news = self._news.get((worker, group))
        numbers = None if news is None else news.nonzero().flatten()
        self.told(worker, group, table)
        return None if numbers is None or 2 * len(numbers) > table[0] else numbers
