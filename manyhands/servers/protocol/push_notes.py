"""What each worker has pushed last of each group, in the memory of its host.

The gradients lie in that memory anyway. A new server that goes on for a dead one finds here what belongs to them.
"""

from collections.abc import Iterator

from manyhands.servers.protocol.messages import Push
from manyhands.servers.protocol.ownership import SpanGroup
from manyhands.servers.transport.host_memory import HostMemory

_GENERATION_SHIFT = 40  # rounds that one generation can number


class PushNotes:
    """A worker writes its note before it sends the push."""

    def __init__(self, memory: HostMemory) -> None:
        self._rounds, self._samples, self._missing = (table.numpy() for table in memory.notes())

    def write(self, worker: int, group: SpanGroup, *, key: int, samples: int, missing: set[int]) -> None:
        flags = self._missing[worker]
        for place in group.places:
            flags[place] = place in missing
        self._samples[worker, group.index] = samples
        self._rounds[worker, group.index] = key

    def pushes(self, group: SpanGroup, key: int) -> Iterator[tuple[int, Push]]:
        """All pushes of a group in a round, by worker."""
        for worker in range(len(self._rounds)):
            if self._rounds[worker, group.index] == key:
                yield worker, self.last(worker, group)

    def last(self, worker: int, group: SpanGroup) -> Push:
        return Push(
            number=0,
            group=group.index,
            step=0,
            seen=0,
            samples=int(self._samples[worker, group.index]),
            missing=tuple(place for place in sorted(group.places) if self._missing[worker, place]),
        )


class NoNotes:
    """Where no new server could go on for a dead one."""

    def write(self, worker: int, group: SpanGroup, *, key: int, samples: int, missing: set[int]) -> None:
        pass


def round_key(generation: int, round_number: int) -> int:
    """A round may be made again by another generation."""
    return generation << _GENERATION_SHIFT | round_number
