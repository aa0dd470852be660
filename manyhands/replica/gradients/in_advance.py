"""Sums that are made before their step begins: by `session.backward`, for scripts that look at gradients in between.

Where the workers of a host are all workers, the sum lies in their common memory. A step may then run the optimizer on
it as it is. If the scripts have looked at it, each worker has a copy that may have been changed, and the owners put
theirs back.
"""

import sys
from collections.abc import Sequence

from torch import Tensor

from manyhands.replica.gradients.hooks import for_none
from manyhands.replica.gradients.of_all_hosts import GradientsOfHosts


class GradientsInAdvance(GradientsOfHosts):
    """One step's gradients, of which the sum may be there before the step."""

    def wait_for_none(self) -> None:
        """Workers meet in the middle of their passes: one that waited there for its turn could wait for one that waits
        for it. So gradients are kept until the passes are over."""
        self._kept_limit = sys.maxsize

    def gather(self, gradients: Sequence[Tensor | None], weight: float) -> None:
        """Make the sum, to which this worker brings these times `weight`; they stay as they are."""
        self._sums_besides += 1  # no step has come to the gate
        self._begin(for_none)  # so that all of the sum is there for all to see
        self._weight = weight
        try:
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    self.arrive(index, gradient.detach())
            self._finish()
        finally:
            self._weight = 1.0

    def use(self) -> None:
        """The sum that was made last is that of this step."""
        self._sums_besides -= 1

    def copy(self) -> list[Tensor | None]:
        """The sum by parameter, in memory of this worker's own; None where no worker had a gradient."""
        whole, used = self.total.clone(), self.used.tolist()
        return [
            whole[place.start : place.stop].view(place.shape) if is_used else None
            for place, is_used in zip(self._layout.places, used, strict=True)
        ]

    def put(self, gradients: Sequence[Tensor | None]) -> None:
        """A sum that every worker has already: each brings what it owns of it."""
        self.begin(for_none)
        for index, gradient in enumerate(gradients):
            self.arrived[index] = gradient is not None
            flat = None if gradient is None else self._flat(index, gradient.detach())
            for into, start, stop in self._turns.last[index].values():
                if flat is None:
                    into.zero_()
                else:
                    into.copy_(flat[start:stop])
        for span in self.owned:
            self._completed[span.index] = 1
        self._used.note(self.arrived)
        self._meet()
