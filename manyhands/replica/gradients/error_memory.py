"""What coded gradients have left out until now: one vector for each host, added to its next gradients.

It is state, as the optimizer's is. A step that is made again must begin with what was left before it, so there are two
vectors: a step reads a span in one of them and writes it in the other, with its number, and the newest number that
counts says which of the two holds.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from manyhands.replica.layout import Layout, Span
from manyhands.replica.memory import Team


class ErrorMemory:
    """In memory that all workers of the host see; the owner of a span alone writes it."""

    def __init__(self, layout: Layout, team: Team) -> None:
        self._layout = layout
        self._vectors = [team.allocate(layout.length, torch.float32) for _ in range(2)]
        # By vector and span: 0, or one more than the steps of this generation after which it holds.
        numbers = team.allocate(2 * len(layout.spans), torch.int64)
        self._after = numbers.view(2, len(layout.spans)).numpy()

    def of(self, span: Span, made: int) -> tuple[Tensor | None, Tensor]:
        """What was left out in `made` steps of this generation and before it, None where that is nothing; and where
        the next step writes what it leaves out."""
        newest = self._newest(span, made)
        free = 1 - newest if newest is not None else 0
        self._after[free, span.index] = made + 2
        before = None if newest is None else self._vectors[newest][span.slice]
        return before, self._vectors[free][span.slice]

    def leave_out(self, spans: Iterable[Span], made: int) -> None:
        """The step after so many changed nothing: what was left out before it is still to come, in these spans."""
        for span in spans:
            numbers = self._after[:, span.index]
            numbers[numbers == made + 2] = 0

    def _newest(self, span: Span, made: int) -> int | None:
        """Which of the two holds after so many steps."""
        numbers = [int(number) if number <= made + 1 else 0 for number in self._after[:, span.index]]
        return numbers.index(max(numbers)) if any(numbers) else None

    def inherit(self, old: "ErrorMemory", made: int) -> None:
        """Take over what this host had left out after so many steps of the generation before."""
        self.become(old.whole(made))  # with other workers, spans are cut elsewhere

    def whole(self, made: int) -> Tensor:
        """All that is left after so many steps, as one vector."""
        found = torch.zeros(self._layout.length)
        for span in self._layout.spans:
            if (newest := self._newest(span, made)) is not None:
                found[span.slice] = self._vectors[newest][span.slice]
        return found

    def become(self, whole: Tensor | None) -> None:
        """From here on this is what was left out; None: nothing."""
        self._after[:] = 0
        if whole is not None:
            for span in self._layout.spans:
                self._put(span, whole[span.slice])

    def by_name(self, whole: Tensor) -> dict[str, Tensor]:
        """A vector of them as a checkpoint holds it."""
        return {
            place.name: whole[place.start : place.stop].view(place.shape) for place in self._layout.places
        }

    def from_names(self, saved: Mapping[str, Tensor]) -> Tensor:
        """The inverse."""
        whole = torch.zeros(self._layout.length)
        for place in self._layout.places:
            value = saved.get(place.name)
            if value is not None and tuple(value.shape) == place.shape:
                whole[place.start : place.stop] = value.reshape(-1)
        return whole

    def _put(self, span: Span, values: Tensor) -> None:
        self._vectors[0][span.slice] = values
        self._after[:, span.index] = (1, 0)
