"""The workers of one host: their shared memory, and how they wait for each other in it.

Everything the other parts need is here in four words: `allocate` memory that all see, `exchange` a few numbers,
`publish` progress and `wait` for that of another worker.
"""

import contextlib
import os
import select
import signal
import struct
import threading
import time
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.comm.transports import slots
from manyhands.comm.transports.arena import Arena
from manyhands.comm.transports.counters import Counters, CounterTable, StepCounter, refuse_several
from manyhands.comm.transports.slots import Slots
from manyhands.errors import PeerLost

ROW = 128  # numbers one worker can put into an exchange
_ENDING_S = 1.0  # for a worker that has finished and is about to exit


class Host:
    """This worker's place among the `size` workers of its host; `ranks` are their ranks in the world.

    Their memory begins at `start`. `check` is called now and then while waiting, and may raise. `names` is what
    messages call them, where ranks count a part of the world.
    """

    def __init__(
        self,
        arena_fd: int,
        ranks: Sequence[int],
        index: int,
        *,
        start: int = 0,
        check: Callable[[], None] = lambda: None,
        names: Sequence[int] | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self._names = tuple(names or ranks)
        self.index = index
        self.size = len(self.ranks)
        refuse_several(self.size)
        self.arena = Arena(arena_fd, start)
        self._check = check
        rows_bytes = 2 * self.size * ROW * 8
        # Spinning only helps while every worker has a core of its own.
        self._spins = 400 if self.size <= (os.cpu_count() or 1) else 0
        self._counters = self.counters(self.size)
        self._rows = memoryview(self.arena.map(rows_bytes))
        self._meetings = 0
        self._pids: dict[int, int] = {}
        self.process_ids: dict[int, int] = {}
        """Of the workers of this host, by rank."""
        self._poll = select.poll()
        self._poll_lock = threading.Lock()
        self._meet_all()

    def _meet_all(self) -> None:
        """Learn the peers' process ids, so that a death is noticed from the exited process itself."""
        # Until then the launcher notices a peer that dies.
        for index, row in enumerate(self.exchange([float(os.getpid())])):
            self.process_ids[self.ranks[index]] = int(row[0])
            if index != self.index:
                with contextlib.suppress(OSError):
                    pidfd = os.pidfd_open(int(row[0]))
                    self._pids[pidfd] = self.ranks[index]
                    self._poll.register(pidfd, select.POLLIN)

    def gone(self) -> list[int]:
        """The ranks of those whose processes have ended."""
        with self._poll_lock:  # a thread that sums in the background looks after them as well
            return [self._pids[pidfd] for pidfd, _ in self._poll.poll(0)]

    def check_peers(self) -> None:
        """While waiting for others: raises if that is of no use any more."""
        for rank in self.gone():
            names = [self._names[index] for index in (self.ranks.index(rank), self.index)]
            raise PeerLost(f"worker {names[0]} is gone while worker {names[1]} waited for it")
        self._check()

    def end(self, ranks: Collection[int]) -> None:
        """Make sure that some workers have ended before others touch their memory: they may only be stopped."""
        for pidfd in [pidfd for pidfd, rank in self._pids.items() if rank in ranks]:
            if not select.select([pidfd], [], [], _ENDING_S)[0]:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                select.select([pidfd], [], [])

    def forget(self, dead: Collection[int]) -> None:
        """Go on without some workers, by local index: waiting no longer raises `PeerLost` for them."""
        ranks = {self.ranks[index] for index in dead}
        with self._poll_lock:
            for pidfd in [pidfd for pidfd, rank in self._pids.items() if rank in ranks]:
                self._poll.unregister(pidfd)
                del self._pids[pidfd]
                os.close(pidfd)

    def allocate(self, length: int, dtype: torch.dtype) -> Tensor:
        """A zero-filled vector that every worker of the host sees; all must ask, in the same order."""
        return self.arena.tensor(length, dtype)

    def slots(self, count: int) -> Slots:
        """Places for bytes that every worker of the host sees; all must ask, in the same order."""
        return Slots(self.arena.fd, self.arena.reserve(slots.BYTES), count)

    def counters(self, count: int) -> Counters:
        """Counters for a purpose of one's own; all must ask, in the same order."""
        return Counters(self.arena.map(Counters.bytes_needed(count)), self.check_peers, self._spins)

    def exchange(self, row: Sequence[float]) -> list[list[float]]:
        """The numbers of every worker, by local index; returns when all have arrived."""
        width = len(row)
        if width > ROW:
            raise ValueError(f"an exchange carries {ROW} numbers, not {width}")
        self._meetings += 1
        # Two sets of rows take turns: a worker that is one exchange ahead cannot disturb a slower reader.
        base = (self._meetings % 2) * self.size * ROW * 8
        form = f"{width}d"
        struct.pack_into(form, self._rows, base + self.index * ROW * 8, *row)
        self._counters.publish(self.index, self._meetings)
        began_s = time.perf_counter()
        try:
            for peer in range(self.size):
                self._counters.wait(peer, self._meetings)
        finally:
            telemetry.add_seconds("wait", time.perf_counter() - began_s)
        rows = self._rows[base : base + self.size * ROW * 8]
        return list(map(list, struct.iter_unpack(f"{form}{(ROW - width) * 8}x", rows)))

    def barrier(self) -> None:
        self.exchange([])

    def progress(self) -> StepCounter:
        """A new set of counters, one per worker, for publishing how far each has come."""
        return StepCounter(self.counters(self.size), self.index, self.size)

    def table(self, columns: int) -> CounterTable:
        """As above, with several counters for each worker."""
        return CounterTable(self.counters(self.size * columns), self.index, self.size, columns)

    def close(self) -> None:
        for pidfd in self._pids:
            os.close(pidfd)
        self._pids.clear()
        self._rows.release()
        self._counters.close()
        self.arena.close()
