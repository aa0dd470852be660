"""Factors of large linear layers that travel between hosts in place of the matrices (Xie et al. 2014; Poseidon 2017).

With R rows on all hosts together, the factors of an n × m matrix are  R (n + m)  numbers, and the ring that sums the
matrix sends  2 n m.  Every layer travels as what is less. Each worker sends its rows to one worker of every other host,
which puts them where all workers of that host see them; the owner of some rows of the matrix makes their sum, over all
workers in the order of ranks. So all hosts compute the same products in the same order.

How many rows the others have is known for sure only when all have ended their backward passes. So a worker assumes that
all bring as many as in the last step, and sends those of a layer as soon as it has them; then all tell each other
what they have, and what was not as assumed goes after.
"""

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from manyhands.comm.row_links import RowLinks
from manyhands.comm.transports.transport import Handle
from manyhands.replica.gradients.factors import Factors
from manyhands.replica.layout import Layout
from manyhands.replica.memory import Team


class FactorsBetween(Factors):
    """The factors of one step, of all workers of all hosts."""

    def __init__(self, layout: Layout, total: Tensor, team: Team, links: RowLinks, density: float) -> None:
        """A matrix travels in so much of its bytes (`density`), where a codec makes them fewer."""
        self._links, self._density = links, density
        super().__init__(layout, total, team)
        layers = len(self._slots)
        self._places = {slot: layout.places[index] for index, slot in self._slots.items()}
        # Of this host's workers in this step: rows times two, and one more where a gradient was no product.
        self._told = team.allocate(layers * team.size, torch.int64).view(layers, team.size).numpy()
        self._counted = np.zeros((layers, links.size), dtype=np.int64)  # rows of the last step, by rank
        self._travels = np.ones(layers, dtype=bool)  # as factors in the next step
        self._is_mixed = np.zeros(
            layers, dtype=bool
        )  # whether a gradient was ever no product: then a matrix for good
        self._taken: list[int] = []
        self._sent: set[int] = set()
        self._handles: list[Handle] = []
        self._table = torch.zeros(layers, links.size, dtype=torch.int64)
        self._is_told = False  # whether `_counted` is of this step, and sums are those of all hosts
        self._received = team.progress() if team.size > 1 else None
        self._steps = 0

    def _sets(self, team: Team) -> tuple[int, int]:
        return self._links.rank, self._links.size

    def _most_rows(self, height: int, width: int) -> int:
        return int(self._density * 2 * height * width / (height + width))

    @property
    def is_over(self) -> bool:
        """Whether all layers travel as matrices from now on."""
        return bool(self._is_mixed.all())

    def taken(self, *, streams: bool) -> Mapping[int, Factors]:
        """All workers of all hosts say the same, since they have heard the same."""
        return {index: self for index, slot in self._slots.items() if self._travels[slot]} if streams else {}

    def begin(self, taken: Collection[int]) -> None:
        super().begin(taken)
        self._taken, self._is_told = list(taken), False
        self._told[:, self._mine] = 0
        self._sent.clear()
        self._steps += 1
        for index in taken:
            slot = self._slots[index]
            for source in self._links.sources:
                self._receive(slot, source, int(self._counted[slot, source]))

    def add(self, index: int, inputs: Tensor, outputs: Tensor) -> None:
        self._told[self._slots[index], self._mine] += 2 * len(inputs)
        super().add(index, inputs, outputs)

    def made(self, index: int, rows: int) -> None:
        self._told[self._slots[index], self._mine] += 2 * rows

    def overflow(self, index: int, gradient: Tensor) -> None:
        self._told[self._slots[index], self._mine] |= 1
        super().overflow(index, gradient)

    def arrive(self, index: int) -> None:
        """All rows of this worker are there: they leave while the backward pass goes on."""
        slot = self._slots[index]
        is_as_assumed = self._told[slot, self._mine] == 2 * self._counted[slot, self._links.rank]
        if is_as_assumed and slot not in self._sent:
            self._send(slot)

    def tell(self) -> None:
        """Behind the gate of this host: begin to tell the other hosts what its workers have."""
        for index in self._taken:
            if self._slots[index] not in self._sent:
                self._send(self._slots[index])  # they wait for as many as the last time, whatever is in them
        self._table.zero_()
        self._table[:, list(self._links.local)] = torch.from_numpy(self._told)
        self._answered = self._links.start_sum(self._table)

    def hear(self) -> set[int]:
        """What all workers have: returns the layers that are matrices in this step."""
        self._answered()
        table = self._table.numpy()
        self._before, self._counted = self._counted, table >> 1
        is_mixed = np.asarray((table & 1).any(axis=1))
        dense = {index for index in self._taken if is_mixed[self._slots[index]]}
        self._is_mixed |= is_mixed
        for slot, rows in enumerate(self._counted.sum(axis=1).tolist()):
            if rows:
                height, width = self._places[slot].shape
                self._travels[slot] = rows * (height + width) < self._density * 2 * height * width
            self._travels[slot] &= not self._is_mixed[slot]
        self._taken = [index for index in self._taken if index not in dense]
        return dense

    def send_rest(self) -> None:
        """What was not as assumed. From here on sums are those of all hosts."""
        self._is_told = True
        for index in self._taken:
            slot = self._slots[index]
            changed = self._counted[slot] != self._before[slot]
            if changed[self._links.rank]:
                self._send(slot)
            for source in self._links.sources:
                if changed[source]:
                    self._receive(slot, source, int(self._counted[slot, source]))

    def wait(self) -> None:
        """Return when what this worker sends has left, and what it receives for its host is here."""
        while self._handles:
            self._handles.pop(0).wait()

    def meet(self) -> None:
        """Return when all workers of the host have come as far."""
        if self._received:
            self._received.publish(self._steps)
            self._received.wait(self._steps)

    def _send(self, slot: int) -> None:
        """As many rows as the others know of."""
        self._sent.add(slot)
        mine = self._links.rank
        count = int(self._counted[slot, mine])
        for side, rows in enumerate((self._inputs, self._outputs)) if count else ():
            self._handles += self._links.send(2 * slot + side, rows[slot][mine, :count])

    def _receive(self, slot: int, source: int, count: int) -> None:
        for side, rows in enumerate((self._inputs, self._outputs)) if count else ():
            self._handles.append(self._links.receive(2 * slot + side, source, rows[slot][source, :count]))

    def _counts(self, slot: int) -> list[tuple[int, int]]:
        if self._is_told:
            return list(enumerate(self._counted[slot].tolist()))
        return list(zip(self._links.local, self._rows[slot].tolist(), strict=True))
