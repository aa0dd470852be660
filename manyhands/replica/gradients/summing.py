"""How the gradients of a host's workers become one sum, in one vector.

A gradient vector per worker would cost the most memory of all, so there is only the sum. The workers add to each span
of it in turn: the one after its owner begins, the owner is last. With a turn for every worker at some span, all
are busy at once, and the order of the additions is always the same. What the owner adds itself stays where autograd
left it until the span is updated, when the sum is in the cache anyway, as far as `KEPT_BYTES` allow. With `before_gate`
it is added earlier: when the step comes to its gate the sum is complete, in memory that everyone sees, and whoever
dies after that, the others can finish the step.

Autograd finishes gradients roughly in the order of the flat vector, and turns are taken in exactly that order: a worker
only has to know how far the one before it has come, which is one number.
"""

from collections.abc import Callable, Container, Sequence

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.comm.transports.host import Host
from manyhands.errors import UsageError
from manyhands.replica.gradients.factors import Factors
from manyhands.replica.gradients.tables import Tables
from manyhands.replica.layout import Layout, Span

KEPT_BYTES = 1 << 27  # per host: what its workers may keep of gradients for the owners' late additions

OnReady = Callable[[Span], None]
Piece = tuple[Tensor, int, int]  # where to add, and which elements of the parameter's gradient


class Gradients:
    """One step's gradients of this worker on their way into `total`; `owners[i]` is the worker that owns span i."""

    def __init__(
        self,
        layout: Layout,
        total: Tensor,
        owners: Sequence[int],
        host: Host | None,
        factors: Factors | None = None,
        tables: Tables | None = None,
        *,
        before_gate: bool = False,
        scratch: Tensor | None = None,
    ) -> None:
        self.total = total
        self.factors = factors
        self._factored: Container[int] = ()  # parameters whose gradients come as factors in this step
        self._before_gate = before_gate
        self._tables = tables  # where gradients of some rows need not become whole
        self.arrived = bytearray(len(layout.places))
        self._layout = layout
        self._index, self._workers = (host.index, host.size) if host else (0, 1)
        self._progress = host.progress() if host else None
        self._before = (self._index - 1) % self._workers
        self._owned = [span for span in layout.spans if owners[span.index] == self._index]
        self._kept_limit = KEPT_BYTES // self._workers
        self._private: list[Tensor | None] = [None] * len(layout.places)
        self._in_flight: Container[int] = ()  # spans of `total` that servers may still read
        self._given: set[int] = set()  # parameters whose gradient is made in `total` itself in this step
        # By parameter: for each turn before the owner's, the pieces that are this worker's to add in it.
        self._turns: list[list[list[Piece]]] = [[[] for _ in range(self._workers - 1)] for _ in layout.places]
        self._own: list[dict[int, Piece]] = [{} for _ in layout.places]  # by span, where this worker is owner
        for span in layout.spans:
            turn = (self._index - owners[span.index] - 1) % self._workers
            for place in span.places:
                piece = _piece(layout, place, span, total)
                if turn == self._workers - 1:
                    self._own[place][span.index] = piece
                else:
                    self._turns[place][turn].append(piece)
        self._last_own = [max(pieces, default=-1) for pieces in self._own]
        longest = max(span.stop - span.start for span in layout.spans)
        self._scratch = total.new_zeros(longest) if scratch is None else scratch
        self._gaps = [_gaps(layout, span) for span in layout.spans]
        self._steps_done = 0  # in units of turns: where the counting of this step begins
        self._turn_count = len(layout.places) * (self._workers - 1)

    def begin(self, on_ready: OnReady | None) -> None:
        """A new step; `on_ready` is told of each owned span as soon as it is complete, in their order."""
        self.arrived[:] = bytes(len(self.arrived))
        self._given.clear()
        self._on_ready = on_ready
        if self.factors:
            # Spans that leave before the others' backward passes have ended are added up as they come.
            self._factored = self.factors.layers if not on_ready else ()
            self.factors.begin()
        self._adds_early = on_ready is not None or self._before_gate
        self._all_here = False
        self._private_bytes = 0
        self._turn = 0  # the next turn to take
        self._next_own = 0  # the next parameter whose owned pieces have not been added
        self._completed = bytearray(len(self._layout.spans))
        self._to_announce = list(self._owned) if on_ready else []

    def offer(self, index: int, inputs: Tensor, outputs: Tensor) -> bool:
        """Factors of a part of a parameter's gradient; says whether they are taken."""
        if index not in self._factored:
            return False
        assert self.factors is not None
        self.factors.add(index, inputs, outputs)
        return True

    def room(self, index: int) -> Tensor | None:
        """Where autograd may make a parameter's gradient, so that nobody has to copy it there; once in a step."""
        if index in self._given:
            return None
        self._given.add(index)
        for number in self._own[index]:
            if number in self._in_flight:
                self._wait(self._layout.spans[number])
        place = self._layout.places[index]
        return self.total[place.start : place.stop].view(place.shape)

    def arrive(self, index: int, grad: Tensor | None) -> None:
        """A parameter's gradient is there, and will not change any more; takes possession of it.

        Without a matrix, all of it has been offered as factors.
        """
        if index in self._factored:
            assert self.factors is not None
            self.arrived[index] = 1
            if grad is not None:
                self.factors.spill(index, grad)
            self._take_turns()
            return
        if grad is None:
            return
        if self.arrived[index]:
            self._arrive_again(index, grad)
            return
        self.arrived[index] = 1
        grad = self._flat(index, grad)
        self._private[index] = grad
        self._private_bytes += _size_bytes(grad)
        self._take_turns()
        if self._adds_early or self._private_bytes > self._kept_limit:
            self._add_own()
            while self._private_bytes > 2 * self._kept_limit and self._wait_for_turn():
                self._take_turns()
                self._add_own()

    def arrive_late(self) -> None:
        """Parameters of which only earlier batches of this step have offered factors."""
        if self.factors and self._factored:
            for index in self.factors.layers:
                self.arrived[index] |= self.factors.has(index)

    def _flat(self, index: int, grad: Tensor) -> Tensor:
        if grad.is_sparse and self._tables and self._layout.places[index].rows:
            return grad.coalesce()
        return (grad.to_dense() if grad.is_sparse else grad).reshape(-1)

    def _arrive_again(self, index: int, grad: Tensor) -> None:
        """Re-entrant checkpointing runs several backward passes in one, each with a part of the gradient."""
        place = self._layout.places[index]
        kept = self._private[index]
        if kept is not None and self._turn <= index * (self._workers - 1):
            self._private[index] = kept + self._flat(index, grad)
        elif self._workers == 1 and not self._on_ready and not grad.is_sparse:
            self.total[place.start : place.stop].add_(grad.reshape(-1))
        else:
            raise UsageError(
                f"parameter {place.name!r} got a second gradient after the first had been added to those of the other "
                "workers; use torch.utils.checkpoint with use_reentrant=False"
            )

    def finish(self) -> None:
        """Everything that will come has come: add it, say so, and wait until that is true of every worker."""
        self._all_here = True
        self._take_turns()
        while self._turn < self._turn_count:
            self._wait_for_turn()
            self._take_turns()
        if self._adds_early:
            self._add_own()
            while self._next_own < len(self.arrived):
                self._wait_for_turn()
                self._add_own()
        if self._progress:
            self._steps_done += self._turn_count + 1
            if self.factors and self.factors.spills:
                with telemetry.timed("wait"):
                    for peer in range(self._index):
                        self._progress.wait_for(peer, self._steps_done)
                self.factors.pour()
            self._progress.publish(self._steps_done)
            with telemetry.timed("wait"):
                self._progress.wait(self._steps_done)

    @property
    def step(self) -> int:
        """How many steps this worker has brought to the gate."""
        return self._steps_done // (self._turn_count + 1)

    def passed(self) -> int:
        """How many steps all workers have brought to the gate, those that are gone included."""
        assert self._progress
        return min(self._progress.values()) // (self._turn_count + 1)

    def recompute(self, span: Span) -> Tensor:
        """The whole sum of a span, whoever owns it: for a step that has passed the gate."""
        found = self._by_factors(span, self._scratch[: span.stop - span.start])
        return self.total[span.slice] if found is None else found

    def _take_turns(self) -> None:
        """Add what the others wait for, as far as the turns have come."""
        first = turn = self._turn
        while turn < self._turn_count:
            index, number = divmod(turn, self._workers - 1)
            if not (self.arrived[index] or self._all_here):
                break
            if number and not self._is_my_turn(turn):
                break
            grad = self._private[index]
            for into, start, stop in () if index in self._factored else self._turns[index][number]:
                if grad is None:
                    if not number:
                        into.zero_()
                elif number:
                    into.add_(grad[start:stop])
                else:
                    into.copy_(grad[start:stop])
            turn += 1
            if number == self._workers - 2 and not self._own[index]:
                self._drop(index)
        if turn > first and self._progress:
            self._turn = turn
            self._progress.publish(self._steps_done + turn)

    def _is_my_turn(self, turn: int) -> bool:
        """Whether the worker before this one has taken the turn before."""
        return self._progress is None or self._progress.has(self._before, self._steps_done + turn)

    def _wait_for_turn(self) -> bool:
        """Wait for the worker before this one, if that is what keeps us; says whether it was."""
        if self._turn < self._turn_count:
            turn, index = self._turn, self._turn // (self._workers - 1)
        else:
            turn = (self._next_own + 1) * (self._workers - 1)
            index = self._next_own
        if index >= len(self.arrived) or not (self.arrived[index] or self._all_here):
            return False
        if self._progress:
            with telemetry.timed("wait"):
                self._progress.wait_for(self._before, self._steps_done + turn)
        return True

    def _add_own(self) -> None:
        """Complete the owned pieces of the next parameters, as far as the others have added theirs."""
        while (index := self._next_own) < len(self.arrived):
            if not (self.arrived[index] or self._all_here):
                break
            ready = (index + 1) * (self._workers - 1)
            if self._turn < ready or not self._is_my_turn(ready):
                break
            for number in () if index in self._factored else self._own[index]:
                self._add_last(index, number)
            self._next_own += 1
            if self._own[index]:
                self._drop(index)
        while self._to_announce and self._to_announce[0].places[-1] < self._next_own:
            span = self._to_announce.pop(0)
            self._completed[span.index] = 1
            assert self._on_ready is not None
            self._on_ready(span)

    def complete(self, span: Span) -> None:
        """After `finish`: see to it that an owned span is the whole sum."""
        if self._completed[span.index]:
            return
        self._completed[span.index] = 1
        if self._by_factors(span, self.total[span.slice]) is not None:
            return
        with telemetry.timed("exchange"):
            for index in span.places:
                if index >= self._next_own:
                    self._add_last(index, span.index)
            self._drop_after(span)

    def complete_all(self) -> None:
        for span in self._owned:
            self.complete(span)

    def take(self, span: Span) -> Tensor:
        """After `finish`: the whole sum of an owned span, to be used at once; it need not get into `total`."""
        scratch = self._scratch[: span.stop - span.start]
        if not self._completed[span.index] and self._by_factors(span, scratch) is not None:
            return scratch
        if self._completed[span.index] or span.places[0] < self._next_own:
            self.complete(span)
            return self.total[span.slice]
        self._completed[span.index] = 1
        with telemetry.timed("exchange"):
            grad = self._private[span.places[0]]
            if self._workers == 1 and len(span.places) == 1 and grad is not None:
                _, start, stop = self._own[span.places[0]][span.index]
                if stop - start == span.stop - span.start:
                    self._drop_after(span)
                    return grad[start:stop]
            # Through memory that stays in the cache, where the optimizer will read it.
            for start, stop in self._gaps[span.index]:
                scratch[start:stop].zero_()
            for index in span.places:
                self._add_into(scratch, span, index)
            self._drop_after(span)
            return scratch

    def _by_factors(self, span: Span, into: Tensor) -> Tensor | None:
        if span.places[0] not in self._factored:
            return None
        assert self.factors is not None
        with telemetry.timed("compute"):
            return self.factors.sum_of(span, into)

    def _add_into(self, scratch: Tensor, span: Span, index: int) -> None:
        """As `_add_last`, with the result elsewhere."""
        grad = self._private[index]
        others, start, stop = self._own[index][span.index]
        offset = max(self._layout.places[index].start, span.start) - span.start
        into = scratch[offset : offset + stop - start]
        if self._workers == 1:
            if grad is None:
                into.zero_()
            else:
                into.copy_(grad[start:stop])
        elif grad is None:
            into.copy_(others)
        else:
            torch.add(others, grad[start:stop], out=into)

    def _drop_after(self, span: Span) -> None:
        for index in span.places:
            if span.index == self._last_own[index]:
                self._drop(index)

    def write_after(self, wait: OnReady, in_flight: Container[int]) -> None:
        """Call `wait` before this worker's gradients of a span in flight go to `total`."""
        self._wait, self._in_flight = wait, in_flight

    def _add_last(self, index: int, span: int) -> None:
        if span in self._in_flight:
            self._wait(self._layout.spans[span])
        grad = self._private[index]
        into, start, stop = self._own[index][span]
        if self._tables and span in self._tables:
            self._tables.write(span, grad)
        elif self._workers == 1:
            if grad is None:
                into.zero_()
            elif grad.data_ptr() + start * grad.element_size() != into.data_ptr():  # else it was made there
                into.copy_(grad[start:stop])
        elif grad is not None:
            into.add_(grad[start:stop])

    def _drop(self, index: int) -> None:
        grad = self._private[index]
        if grad is not None:
            self._private_bytes -= _size_bytes(grad)
            self._private[index] = None


def _size_bytes(grad: Tensor) -> int:
    return grad.values().nbytes if grad.is_sparse else grad.nbytes


def _gaps(layout: Layout, span: Span) -> list[tuple[int, int]]:
    """The elements of a span between its parameters and after them, which no gradient fills."""
    gaps, at = [], span.start
    for index in span.places:
        place = layout.places[index]
        if place.start > at:
            gaps.append((at - span.start, place.start - span.start))
        at = min(place.stop, span.stop)
    if at < span.stop:
        gaps.append((at - span.start, span.stop - span.start))
    return gaps


def _piece(layout: Layout, index: int, span: Span, total: Tensor) -> Piece:
    place = layout.places[index]
    start, stop = max(place.start, span.start), min(place.stop, span.stop)
    return total[start:stop], start - place.start, stop - place.start
