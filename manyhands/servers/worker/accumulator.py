"""What a worker that speaks for its host keeps back, in the host's memory: another may have to go on with it.

There are two versions of it, one before and one after the step that is under way, each with the number of the last step
or flush that is in it. The later one is written before the step can count.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from manyhands.servers.protocol.ownership import SpanGroup
from manyhands.servers.protocol.rows import as_table, gradient_of, touched
from manyhands.servers.transport.host_memory import HostMemory
from manyhands.servers.worker.deferral import Deferral, DeferredGradients

_BEING_WRITTEN = -1
_STEPS, _SEEN, _HAS_TOTAL = 0, 1, 2


class Accumulator:
    """For those of the groups that are not pushed in every step."""

    def __init__(self, memory: HostMemory, groups: Sequence[SpanGroup]) -> None:
        self._groups = [group for group in groups if group.every > 1]
        self._vectors = memory.deferred
        serials, words, missing = memory.deferred_words()
        self._serials, self._words, self._missing = serials.numpy(), words.numpy(), missing.numpy()

    def put(self, serial: int, kept_back: Mapping[int, Deferral]) -> None:
        """What is kept back after so many steps and flushes."""
        version = serial % 2
        self._serials[version] = _BEING_WRITTEN
        for group in self._groups:
            kept = kept_back[group.index].kept
            words = self._words[version, group.index]
            words[_STEPS], words[_SEEN], words[_HAS_TOTAL] = kept.steps, kept.seen, kept.total is not None
            if kept.total is not None:
                whole = kept.total.to_dense().view(-1)
                self._vectors[version][group.start : group.start + len(whole)] = whole
            for place in _places(group):
                self._missing[version, place] = place in kept.missing
        self._serials[version] = serial

    def found(self, serial: int) -> dict[int, Deferral]:
        """What was kept back then; if nobody has put it here, everything was pushed."""
        version = serial % 2
        if self._serials[version] != serial:
            return {group.index: Deferral() for group in self._groups}
        return {group.index: Deferral(self._kept(version, group)) for group in self._groups}

    def _kept(self, version: int, group: SpanGroup) -> DeferredGradients:
        words = self._words[version, group.index]
        return DeferredGradients(
            steps=int(words[_STEPS]),
            total=self._total(version, group) if words[_HAS_TOTAL] else None,
            missing=frozenset(place for place in _places(group) if self._missing[version, place]),
            seen=int(words[_SEEN]),
        )

    def _total(self, version: int, group: SpanGroup) -> Tensor:
        vector = self._vectors[version][group.slice]
        if group.table is None:
            return vector.clone()
        numbers = touched(vector, group.table)
        return gradient_of(numbers, as_table(vector, group.table)[numbers], group.table)


def _places(group: SpanGroup) -> set[int]:
    return {place for span in group.spans for place in span.places}
