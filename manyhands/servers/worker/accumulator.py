"""The deferred gradients of a worker that speaks for its host, in the host's memory: another may have to go on.

There are two versions, one before and one after the step in flight, each with the number of the last step or flush
that is in it. The worker writes the later one before the step can count.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from manyhands.servers.protocol.ownership import SpanGroup
from manyhands.servers.protocol.rows import as_table, gradient_of, touched
from manyhands.servers.transport.host_memory import HostMemory
from manyhands.servers.worker.deferral import Deferral, Deferrals, DeferredGradients

_BEING_WRITTEN = -1
_STEPS, _SEEN, _HAS_TOTAL = 0, 1, 2


class Accumulator:
    """For those of the groups that are not pushed in every step."""

    def __init__(self, memory: HostMemory, groups: Sequence[SpanGroup]) -> None:
        self._groups = [group for group in groups if group.every > 1]
        self._vectors = memory.deferred
        serials, words, missing = memory.deferred_words()
        self._serials, self._words, self._missing = serials.numpy(), words.numpy(), missing.numpy()

    def put(self, serial: int, deferrals: Mapping[int, Deferral]) -> None:
        """What is deferred after so many steps and flushes."""
        version = serial % 2
        self._serials[version] = _BEING_WRITTEN
        for group in self._groups:
            found = deferrals[group.index].deferred
            words = self._words[version, group.index]
            words[_STEPS], words[_SEEN], words[_HAS_TOTAL] = found.steps, found.seen, found.total is not None
            if found.total is not None:
                whole = found.total.to_dense().view(-1)
                self._vectors[version][group.start : group.start + len(whole)] = whole
            for place in group.places:
                self._missing[version, place] = place in found.missing
        self._serials[version] = serial

    def get(self, serial: int) -> dict[int, Deferral]:
        """What was deferred then; if no worker has put it here, everything was pushed."""
        version = serial % 2
        if self._serials[version] != serial:
            return {group.index: Deferral() for group in self._groups}
        return {group.index: Deferral(self._deferred(version, group)) for group in self._groups}

    def _deferred(self, version: int, group: SpanGroup) -> DeferredGradients:
        words = self._words[version, group.index]
        return DeferredGradients(
            steps=int(words[_STEPS]),
            total=self._total(version, group) if words[_HAS_TOTAL] else None,
            missing=frozenset(place for place in group.places if self._missing[version, place]),
            seen=int(words[_SEEN]),
        )

    def _total(self, version: int, group: SpanGroup) -> Tensor:
        vector = self._vectors[version][group.slice]
        if group.table is None:
            return vector.clone()
        numbers = touched(vector, group.table)
        return gradient_of(numbers, as_table(vector, group.table)[numbers], group.table)


class SharedDeferrals(Deferrals):
    """Deferred gradients that a neighbour finds, if it has to speak for the host in this worker's place."""

    def __init__(self, groups: Sequence[SpanGroup], accumulator: Accumulator) -> None:
        super().__init__(groups)
        self._accumulator = accumulator
        self._serial = 0  # steps and flushes

    def end_step(self) -> None:
        self._serial += 1
        self._accumulator.put(self._serial, self.by_group)

    def recall(self, serial: int) -> None:
        self._serial = serial
        self.by_group = self._accumulator.get(serial)
