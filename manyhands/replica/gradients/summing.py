"""How the gradients of a team of workers become one sum, in one vector.

A gradient vector per worker would cost the most memory, so there is only the sum. The workers add to each span of it in
turn: the one after its owner begins, the owner is last. All are busy at once, and the order is always the same. Turns
follow the flat vector, which is about the order of autograd: a worker only has to know how far the one before it has
come. What the owner adds stays where autograd left it until the span is updated, when the sum is in the cache anyway.
With an undo log it is added earlier: at the gate the sum is complete, for all to see.
"""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.errors import UsageError
from manyhands.replica.flat_model import FlatModel
from manyhands.replica.gradients.factors import Factors, LinearLayers
from manyhands.replica.gradients.hooks import GradientHooks, OnReady, for_none
from manyhands.replica.gradients.tables import Tables
from manyhands.replica.gradients.turns import Turns
from manyhands.replica.gradients.used_flags import UsedFlags
from manyhands.replica.layout import Span
from manyhands.replica.memory import Team

KEPT_BYTES = 1 << 27  # per host: what its workers may keep of gradients for the owners' late additions


class Gradients:
    """One step's gradients of this worker, from autograd's hooks into the sum `total`."""

    def __init__(
        self,
        flat: FlatModel,
        owners: Sequence[int],
        team: Team,
        *,
        factors: Factors | None = None,
        tables: Tables | None = None,
        made_in_place: Collection[int] = (),
        scratch: Tensor | None = None,
    ) -> None:
        """`owners[i]` owns span i. `tables` take gradients of some rows as they are; autograd makes those of the layers
        `made_in_place` in `total` itself. With an undo log's `scratch`, the sum is complete before any update."""
        layout = flat.layout
        self.total = flat.total
        self.tables = tables
        self._factors = factors
        self.takes_factors = factors is not None
        self._layout, self._params = layout, flat.parameters
        self._before_gate = scratch is not None or flat.part.frugal
        self._index, self._workers = team.index, team.size
        self._progress = team.progress() if team.size > 1 else None
        self._before = (self._index - 1) % self._workers
        self._turns = Turns(layout, flat.total, owners, index=team.index, workers=team.size)
        self.spans, self.owned = layout.spans, self._turns.owned
        self._kept_limit = KEPT_BYTES // self._workers
        self._hooks = GradientHooks(self._params if flat.part.hooked else (), self._hook)
        layers = factors.layers if factors else made_in_place
        self._layers = {id(self._params[index]): index for index in layers}
        self._in_flight: Container[int] = ()  # spans of `total` that servers may still read
        longest = max(span.stop - span.start for span in layout.spans)
        self._scratch = flat.total.new_zeros(longest) if scratch is None else scratch
        count = len(layout.places)
        self._used = UsedFlags(count, team)
        self.all_used, self.arrived = self._used.all_used, bytearray(count)
        self._private: list[Tensor | None] = [None] * count
        self._given: set[int] = set()  # parameters whose gradient is made in `total` itself in this step
        self._factored: Mapping[int, Factors] = {}  # parameters whose gradients come as factors in this step
        self._is_last = self._passes_back = False
        self._steps_done = 0  # in units of turns: where the counting of this step begins
        self._sums_besides, self._weight = 0, 1.0  # sums counted there that belong to no step; of this worker
        self._seen = 0  # how far the worker before this one had come when we last looked
        self._turn_count = count * (self._workers - 1)

    def begin(self, on_ready: OnReady | None) -> None:
        """A new step; `on_ready` is told of each owned span as soon as it is complete, in their order."""
        for param in self._params:
            param.grad = None
        if self._hooks.are_missing:
            self._hooks.add()
        self._begin(on_ready)

    def _begin(self, on_ready: OnReady | None) -> None:
        self.arrived[:] = bytes(len(self.arrived))
        self._given.clear()
        self._on_ready = on_ready
        if self._factors:
            self._factored = {} if on_ready is for_none else self._factors.taken(streams=on_ready is not None)
            self._factors.begin(self._factored)
        self._adds_early = on_ready is not None or self._before_gate
        self._all_here = False
        self._private_bytes = self._turn = self._next_own = 0  # the turn; whose owned pieces are to be added
        self._completed = bytearray(len(self._layout.spans))
        self._to_announce = [one for one in self.owned if on_ready and one.places[0] not in self._factored]

    def watched(self) -> AbstractContextManager[object]:
        """While the gradients of large linear layers are taken as factors, or made where they are wanted."""
        return LinearLayers(self._layers, self._make) if self._layers else nullcontext()

    @contextmanager
    def passing(self, is_last: bool) -> Iterator[None]:
        """While gradients are computed; whether they are the last of this step for their parameters."""
        self._is_last, self._passes_back = is_last, True
        try:
            yield
        finally:
            self._passes_back = False

    def _make(self, index: int, inputs: Tensor, outputs: Tensor) -> Tensor | None:
        """Called by autograd in place of making a large gradient; the user's own passes get theirs as usual."""
        if self._passes_back and (factors := self._factored.get(index)):
            factors.add(index, inputs, outputs)
            if self._is_last:
                self.arrive(index, None)
            return None
        if self._passes_back and self._factors:
            self._factors.made(index, len(inputs))
        if not self._passes_back or self._factors or index in self._given:
            return outputs.t() @ inputs
        self._given.add(index)  # once in a step
        for number in self._turns.last[index]:
            if number in self._in_flight:
                self._wait(self._layout.spans[number])
        place = self._layout.places[index]
        into = self.total[place.start : place.stop].view(place.shape)
        return torch.mm(outputs.t(), inputs, out=into)

    def _hook(self, index: int, param: Tensor) -> None:
        """Called by autograd when a parameter's gradient is complete."""
        if self._is_last:  # else more batches will be added to it
            grad, param.grad = param.grad, None
            if grad is not None:
                self.arrive(index, grad)

    def arrive(self, index: int, grad: Tensor | None) -> None:
        """A parameter's gradient is complete; takes possession of it. None: all of it has been added as factors."""
        if factors := self._factored.get(index):
            self.arrived[index] = 1
            if grad is not None:
                factors.overflow(index, grad)
            else:
                factors.arrive(index)
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

    def _flat(self, index: int, grad: Tensor) -> Tensor:
        if grad.is_sparse and self.tables and self._layout.places[index].rows:
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
        self._is_last = True
        for index, param in enumerate(self._params):
            if param.grad is not None:  # used by an earlier batch of this step and not by the last one
                self._hook(index, param)
        for index, factors in self._factored.items():
            self.arrived[index] |= factors.has(index)
        self._is_last = False
        self._finish()

    def _finish(self) -> None:
        if 0 in self.arrived or self._used.missing[self._index]:
            self._used.note(self.arrived)
        self._all_here = True
        self._take_turns()
        while self._turn < self._turn_count and self._wait_for_turn():
            self._take_turns()
        if self._adds_early:
            self._add_own()
            while self._next_own < len(self.arrived):
                self._wait_for_turn()
                self._add_own()
        self._meet()

    def _meet(self) -> None:
        """The gate: return when every worker has come as far."""
        self._steps_done += self._turn_count + 1
        if self._factors and self._factors.overflows:
            if self._progress:
                with telemetry.timed("wait"):
                    for peer in range(self._index):
                        self._progress.wait_for(peer, self._steps_done)
            self._factors.flush()
        if self._progress:
            self._progress.publish(self._steps_done)
            with telemetry.timed("wait"):
                self._progress.wait(self._steps_done)
        self._seen = self._steps_done

    @property
    def used(self) -> Tensor:
        """After `finish`, per parameter: whether any worker of the team had a gradient for it."""
        return self._used.any_used if self._used.missing.any() else self.all_used

    @property
    def step(self) -> int:
        """How many steps this worker has brought to the gate."""
        return self._steps_done // (self._turn_count + 1) - self._sums_besides

    @property
    def passed(self) -> int:
        """How many steps all workers have brought to the gate, those that are gone included."""
        done = min(self._progress.values()) if self._progress else self._steps_done
        return done // (self._turn_count + 1) - self._sums_besides

    def write_after(self, wait: OnReady, in_flight: Container[int]) -> None:
        """Call `wait` before this worker's gradients of a span in flight go to `total`."""
        self._wait, self._in_flight = wait, in_flight

    def unhook(self) -> None:
        """The parameters' gradients go elsewhere from now on."""
        self._hooks.remove()

    def _take_turns(self) -> None:
        """Add what the others wait for, as far as the turns have come."""
        first = turn = self._turn
        while turn < self._turn_count:
            index, number = divmod(turn, self._workers - 1)
            if not (self.arrived[index] or self._all_here):
                break
            if number and self._progress and self._seen < self._steps_done + turn:
                self._seen = self._progress.read(self._before)
                if self._seen < self._steps_done + turn:
                    break  # the worker before this one has not taken the turn before
            grad = self._private[index]
            for into, start, stop in () if index in self._factored else self._turns.before[index][number]:
                if grad is None:
                    if not number:
                        into.zero_()
                elif number:
                    into.add_(grad[start:stop], alpha=self._weight)
                elif self._weight == 1.0:
                    into.copy_(grad[start:stop])
                else:
                    torch.mul(grad[start:stop], self._weight, out=into)
            turn += 1
            if number == self._workers - 2 and not self._turns.last[index]:
                self._drop(index)
        self._turn = turn
        if self._progress and turn > first:
            self._seen = self._progress.publish_and_read(self._steps_done + turn, self._before)
        elif self._progress:
            self._seen = self._progress.read(self._before)

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
                self._seen = self._progress.wait_for(self._before, self._steps_done + turn)
        return True

    def _add_own(self) -> None:
        """Complete the owned pieces of the next parameters, as far as the others have added theirs."""
        while (index := self._next_own) < len(self.arrived):
            if not (self.arrived[index] or self._all_here):
                break
            ready = (index + 1) * (self._workers - 1)
            if self._turn < ready or self._seen < self._steps_done + ready:
                break
            for number in () if index in self._factored else self._turns.last[index]:
                self._add_last(index, number)
            self._next_own += 1
            if self._turns.last[index]:
                self._drop(index)
        if self._on_ready:
            while self._to_announce and self._to_announce[0].places[-1] < self._next_own:
                span = self._to_announce.pop(0)
                self._completed[span.index] = 1
                self._on_ready(span)

    def recompute(self, span: Span) -> Tensor:
        """The whole sum of a span, whichever worker owns it: for a step that has passed the gate."""
        found = self._by_factors(span, self._scratch[: span.stop - span.start])
        return self.total[span.slice] if found is None else found

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
                _, start, stop = self._turns.last[span.places[0]][span.index]
                if stop - start == span.stop - span.start:
                    self._drop_after(span)
                    return grad[start:stop]
            # Through memory that stays in the cache, where the optimizer will read it.
            for start, stop in self._turns.gaps[span.index]:
                scratch[start:stop].zero_()
            for index in span.places:
                self._add_into(scratch, span, index)
            self._drop_after(span)
            return scratch

    def _by_factors(self, span: Span, into: Tensor) -> Tensor | None:
        factors = self._factored.get(span.places[0])
        if factors is None:
            return None
        with telemetry.timed("compute"):
            return factors.sum_of(span, into)

    def _add_into(self, scratch: Tensor, span: Span, index: int) -> None:
        """As `_add_last`, with the result elsewhere."""
        grad = self._private[index]
        others, start, stop = self._turns.last[index][span.index]
        offset = max(self._layout.places[index].start, span.start) - span.start
        into = scratch[offset : offset + stop - start]
        if self._workers > 1 and grad is not None:
            torch.add(others, grad[start:stop], out=into)
        elif self._workers > 1:
            into.copy_(others)
        elif grad is not None:
            into.copy_(grad[start:stop])
        else:
            into.zero_()

    def _drop_after(self, span: Span) -> None:
        for index in span.places:
            if span.index == self._turns.last_span[index]:
                self._drop(index)

    def _add_last(self, index: int, span: int) -> None:
        if span in self._in_flight:
            self._wait(self._layout.spans[span])
        grad = self._private[index]
        into, start, stop = self._turns.last[index][span]
        if self.tables and span in self.tables:
            self.tables.write(span, grad)
        elif self._workers == 1:
            if grad is None:
                into.zero_()
            elif grad.data_ptr() + start * grad.element_size() != into.data_ptr():  # else it was made there
                into.copy_(grad[start:stop])
        elif grad is not None:
            into.add_(grad[start:stop], alpha=self._weight)

    def _drop(self, index: int) -> None:
        grad, self._private[index] = self._private[index], None
        self._private_bytes -= 0 if grad is None else _size_bytes(grad)


def _size_bytes(grad: Tensor) -> int:
    return grad.values().nbytes if grad.is_sparse else grad.nbytes
