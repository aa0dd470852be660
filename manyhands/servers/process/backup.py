"""What an elastic server has of the parameters: the groups that it owns, and copies of groups that others own.

Owner and backup of a group run the same optimizer on the same gradients (`backed_up_shard.py`), so both have the same
bits after as many updates, and every update of which a worker was told is on two hosts.

When a generation begins, worker 0 asks every server what it has. A server that lacks a group gets it from one that has
it (`content`, `take`). Where servers gather gradients, a step may be in some groups and not in others. The servers take
it back (`go_back`), so each keeps its groups as they were before the last update.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.replica.optimizer.hyper_parameters import NamedNumbers, named_numbers, set_named_numbers
from manyhands.replica.optimizer.updates import Updates
from manyhands.replica.state import packing
from manyhands.servers.protocol.messages import NotAMessage, Used, states
from manyhands.servers.protocol.ownership import SpanGroup

_VECTORS = ""  # among names of parameters: no parameter is called that


@dataclass
class _Before:
    """A group before its last update."""

    vectors: dict[str, Tensor]
    numbers: Mapping[str, Mapping[str, Any]]
    count: int


class Backup:
    """By group: its values, the optimizer's state, its count of updates, and how far each worker was with its data.

    With `goes_back` the server keeps each group as it was before its last update.
    """

    def __init__(
        self,
        groups: Sequence[SpanGroup],
        optimizer: Optimizer,
        updates: Updates,
        params: Tensor,
        *,
        goes_back: bool,
    ) -> None:
        self._groups = {group.index: group for group in groups}
        self._optimizer = optimizer
        self.updates = updates
        self.vectors: Mapping[str, Tensor] = {"params": params, **updates.vectors}
        self._goes_back = goes_back
        self._before: dict[int, _Before] = {}
        self.counts: dict[int, int] = {}
        self.used: defaultdict[int, dict[int, Used]] = defaultdict(dict)
        self.used_in = 0  # the generation of these workers
        self._generation = 0

    def begin(self, group: int) -> None:
        """Worker 0 has put a group's values here."""
        self.counts[group] = self.counts.get(group, 0)
        self._before.pop(group, None)

    def begin_generation(self, generation: int, *, follows: bool = True) -> None:
        """A server that missed a generation (not `follows`) forgets what it has: the others have gone on."""
        if not follows:
            self.forget(list(self.counts))
        self._generation = generation

    def keep(self, groups: Collection[int]) -> None:
        """Forget all groups but these."""
        self.forget([group for group in self.counts if group not in groups])

    def forget(self, groups: Iterable[int]) -> None:
        for group in groups:
            self.counts.pop(group, None)
            self.used.pop(group, None)
            self._before.pop(group, None)

    def apply(
        self, index: int, gradient: Tensor | None, skipped: frozenset[int], used: Mapping[int, Used]
    ) -> None:
        """One update of a group; without a gradient it counts and changes nothing."""
        group = self._groups[index]
        if self._goes_back:
            self._keep(group)
        if gradient is not None:
            for span in group.spans:
                part = gradient[span.start - group.start : span.stop - group.start]
                self.updates.apply(span, part, skipped)
        self.counts[index] += 1
        self._note_used(index, used, self._generation)

    def apply_as(self, settings: NamedNumbers, *update: Any) -> None:
        """Make an update as the backup: with the settings that the owner's optimizer had."""
        own = named_numbers(self._optimizer)
        set_named_numbers(self._optimizer, settings)
        try:
            self.apply(*update)
        finally:
            set_named_numbers(self._optimizer, own)

    def _keep(self, group: SpanGroup) -> None:
        before = self._before.get(group.index)
        if before is None:
            vectors = {name: torch.empty_like(vector[group.slice]) for name, vector in self.vectors.items()}
            before = self._before[group.index] = _Before(vectors, {}, 0)
        for name, kept in before.vectors.items():
            kept.copy_(self.vectors[name][group.slice])
        before.numbers = {
            param: {
                name: value.clone() if isinstance(value, Tensor) else value for name, value in known.items()
            }
            for param, known in self.updates.export(group.spans).items()
        }
        before.count = self.counts[group.index]

    def go_back(self, count: int) -> None:
        """Take back the update that a group has had beyond `count`; forget a group that came here with it."""
        for index in [index for index, had in self.counts.items() if had > count]:
            before, group = self._before.pop(index, None), self._groups[index]
            if before is None or before.count != count:
                self.forget([index])
                continue
            for name, kept in before.vectors.items():
                self.vectors[name][group.slice] = kept
            self.updates.take(group.spans, before.numbers)
            self.counts[index] = count

    def content(self, index: int) -> bytes:
        """Values and state of a group, for another server."""
        group = self._groups[index]
        vectors = {name: vector[group.slice] for name, vector in self.vectors.items()}
        return packing.pack({_VECTORS: vectors, **self.updates.export(group.spans)})

    def take(self, index: int, content: bytes, count: int, used: Mapping[int, Used], used_in: int) -> None:
        """Values and state of a group, from another server, after so many updates."""
        group, known = self._groups.get(index), states(content)
        vectors = known.pop(_VECTORS, {})
        if (
            group is None
            or vectors.keys() != self.vectors.keys()
            or any(not isinstance(v, Tensor) or v.shape != (group.length,) for v in vectors.values())
        ):
            raise NotAMessage(f"group {index} has other vectors here, or is not there at all")
        for name, values in vectors.items():
            self.vectors[name][group.slice] = values
        self.updates.take(group.spans, known)
        self._before.pop(index, None)
        self.counts[index] = count
        self._note_used(index, used, used_in)

    def _note_used(self, index: int, used: Mapping[int, Used], generation: int) -> None:
        if generation > self.used_in:
            self.used.clear()
            self.used_in = generation
        if generation == self.used_in:
            self.used[index].update(used)
