"""Rows of numbers that some workers show each other in the middle of a step; which workers may differ from row to row.

Workers of a host write their rows where the others read them. Of each host, the first of those that take part sends
its host's rows to the others', and shows theirs to its neighbours. What goes between hosts has messages of its own: it
waits for no sum that is under way.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.comm.transports.host import Host
from manyhands.comm.transports.transport import Transport

TURNS = 2  # places for rows that are used in turn: a worker that is one row ahead disturbs no slower reader
STEP = 1 << 24  # more than the rows of a step


class RowTable:
    """The rows of all workers; those who do not take part in one need not know of it."""

    def __init__(
        self,
        host: Host,
        hosts: Sequence[Sequence[int]],
        rank: int,
        width: int,
        remote: Transport | None,
    ) -> None:
        """All workers must ask, in the same order. `hosts` are the ranks of each host, `remote` leads to others."""
        self.host, self.width = host, width
        self._others = [ranks for ranks in hosts if rank not in ranks]
        self._index = {peer: index for index, peer in enumerate(host.ranks)}
        self._rank = rank
        self._remote = remote
        size = sum(map(len, hosts))
        self._rows = host.allocate(TURNS * size * (1 + width), torch.float64).view(TURNS, size, 1 + width)
        self._written, self._brought, self._read = host.progress(), host.progress(), host.progress()
        self._count = 0
        self._readers: list[list[int]] = [[] for _ in range(TURNS)]

    def begin(self) -> None:
        """A step begins, and every worker has come to it: all count its rows from the same number."""
        self._count = (self._count // STEP + 1) * STEP
        self._readers = [[] for _ in range(TURNS)]

    def swap(self, ranks: Sequence[int], about: int, row: Tensor) -> tuple[list[int], Tensor]:
        """The rows of these workers, of whom this is one, and what each row is about; all of them must ask.

        Where rows are not about the same, those of other hosts may be missing.
        """
        with telemetry.timed("exchange"):
            self._count += 1
            count, turn = self._count, self._count % TURNS
            length = 1 + row.numel()
            table = self._rows[turn]
            local = [peer for peer in ranks if peer in self._index]
            neighbours = [self._index[peer] for peer in local if peer != self._rank]
            for index in self._readers[turn]:
                self._read.wait_for(index, count - TURNS)
            self._readers[turn] = neighbours
            table[self._rank, 0] = about
            table[self._rank, 1:length] = row
            self._written.publish(count)
            for index in neighbours:
                self._written.wait_for(index, count)
            if len(local) < len(ranks):
                self._bring(table, ranks, local, length)
            found = table[list(ranks), :length]  # a copy
            self._read.publish(count)
            telemetry.count("shared_bytes", row.nbytes)
        return found[:, 0].long().tolist(), found[:, 1:]

    def _bring(self, table: Tensor, ranks: Sequence[int], local: Sequence[int], length: int) -> None:
        """The rows of the other hosts, once for the workers of this one."""
        if self._rank != local[0]:
            self._brought.wait_for(self._index[local[0]], self._count)
            return
        assert self._remote is not None, "there are no other hosts"
        about, rows = table[list(local), 0], table[list(local), 1:length]
        others = [[peer for peer in ranks if peer in host] for host in self._others]
        others = [peers for peers in others if peers]
        sent = [self._remote.send(peers[0], part) for peers in others for part in (about, rows)]
        for peers in others:
            theirs = about.new_empty(len(peers))
            self._remote.receive(peers[0], theirs).wait()
            table[peers, 0] = theirs
        # Rows about something else have another length.
        if bool((table[list(ranks), 0] == about[0]).all()):
            for peers in others:
                values = rows.new_empty(len(peers), length - 1)
                self._remote.receive(peers[0], values).wait()
                table[peers, 1:length] = values
            for handle in sent:
                handle.wait()
        bytes_sent = (about.nbytes + rows.nbytes) * len(others)
        telemetry.count("bytes_sent", bytes_sent)
        telemetry.count("bytes_received", bytes_sent)
        self._brought.publish(self._count)
