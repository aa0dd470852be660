"""What an owner is about to change, where the others can read it, so that they can finish its work if it dies.

Before a span is updated, its parameters and its optimizer state are copied to a place that is used again for every
span, and so stays in the cache. If the owner dies in the middle, the survivors put the copy back; which spans of this
step are done, and which are not, is written down as well. The gradients of a step that has passed its gate are in
common memory: the survivors update the rest.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from manyhands.comm.transports.host import Host
from manyhands.replica.layout import Layout, Span, slots


class Journal:
    """The spans of one step that are done, and for each worker the span it is changing, as it was before."""

    def __init__(self, host: Host, layout: Layout, vectors: Sequence[Tensor], numbers: Tensor) -> None:
        self._host = host
        self._vectors = vectors
        self._numbers = numbers  # by place of a span
        self._slots = slots(layout)
        longest = max(span.stop - span.start for span in layout.spans)
        self._values_before = [
            host.allocate(host.size * longest, vector.dtype).view(host.size, longest) for vector in vectors
        ]
        most = max(len(span.places) for span in layout.spans)
        size = host.size * most * numbers.shape[1]
        self._numbers_before = host.allocate(size, numbers.dtype).view(host.size, most, numbers.shape[1])
        self._changing = host.allocate(
            host.size, torch.int64
        ).numpy()  # by worker: 1 + index of the span, or 0
        self._done = host.allocate(
            len(layout.spans), torch.int64
        ).numpy()  # by span: the last step that is in it
        self._layout = layout
        self._meetings = host.progress()

    def begin(self, span: Span) -> None:
        """This worker is about to update a span."""
        mine, length = self._host.index, span.stop - span.start
        for before, vector in zip(self._values_before, self._vectors, strict=True):
            before[mine, :length].copy_(vector[span.slice])
        if self._numbers.shape[1]:
            self._numbers_before[mine, : len(span.places)].copy_(self._numbers[self._slots[span.index]])
        self._changing[mine] = span.index + 1

    def end(self, span: Span, step: int) -> None:
        self._done[span.index] = step
        self._changing[self._host.index] = 0

    def undo(self, worker: int) -> None:
        """Put back what a dead worker was changing."""
        index = int(self._changing[worker]) - 1
        if index < 0:
            return
        span = self._layout.spans[index]
        for before, vector in zip(self._values_before, self._vectors, strict=True):
            vector[span.slice].copy_(before[worker, : span.stop - span.start])
        if self._numbers.shape[1]:
            self._numbers[self._slots[index]] = self._numbers_before[worker, : len(span.places)]
        # In this order: if we die as well, someone does it again.
        self._done[index] = 0
        self._changing[worker] = 0

    def left(self, step: int) -> list[Span]:
        """The spans that this step has not reached."""
        return [span for span in self._layout.spans if self._done[span.index] < step]

    def meet(self, survivors: Collection[int], meeting: int) -> None:
        """All survivors have come as far; the meetings of one recovery have growing numbers."""
        self._meetings.publish(meeting)
        for peer in survivors:
            if peer != self._host.index:
                self._meetings.wait_for(peer, meeting)
