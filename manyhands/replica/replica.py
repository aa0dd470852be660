"""One copy of the model's parameters, shared by the workers of a host.

All workers map the same `params` and the same optimizer state. Each has a gradient slot that its neighbours can read.
Every worker owns some of the spans: when a span's gradients are there on all workers, its owner adds them up and runs
the optimizer on that span, in place, for everyone. No gather, no second copy, and the optimizer's work is divided
instead of repeated. A replica of one worker is the same code with one slot.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands import telemetry
from manyhands.comm.transports.arena import require_memory
from manyhands.comm.transports.host import Host
from manyhands.errors import UsageError
from manyhands.replica.kept import Kept
from manyhands.replica.layout import Layout, Shape, Span, lay_out
from manyhands.replica.parameters import one_type, sparse_ids, trained
from manyhands.replica.updates import Updates, is_element_wise, needs_closure, vector_states

SPAN_BYTES = 1 << 20  # fits a core's cache: a span is added up and updated without going back to memory

Loss = Callable[[nn.Module, Any], Tensor]
OnReady = Callable[[Span], None]


@dataclass(frozen=True, kw_only=True)
class Share:
    """This worker's part of one step: batches with their numbers of samples, and what all workers have together."""

    parts: Sequence[tuple[Any, int]]
    total: Callable[
        [], float
    ]  # asked for after the forward pass: by then the others have said how much they have

    @property
    def samples(self) -> int:
        return sum(samples for _, samples in self.parts)


class Replica:
    """The model's parameters and gradients as flat vectors over the real storage."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        *,
        host: Host | None = None,
        lanes: int | None = None,
        clip_norm: float | None = None,
        agree: Callable[[Tensor], None] | None = None,
        span_bytes: int = SPAN_BYTES,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.steps = 0
        self.needs_closure = needs_closure(optimizer)
        self.kept = Kept()
        self._loss = loss
        self._clip_norm = clip_norm
        self._agree = agree  # makes a vector of the first replica everyone's, where all take the same step
        self._host = host
        self._index = host.index if host else 0
        self._workers = host.size if host else 1
        self.lanes = lanes or self._workers
        self._names, self.parameters = trained(model, optimizer)
        self._device, dtype = one_type(self.parameters)
        self.layout = self._lay_out(span_bytes // dtype.itemsize)
        # Flat order is last parameter first.
        self._names.reverse()
        self.parameters.reverse()
        self._memory_from = host.arena.used if host else 0
        self._claim_memory(dtype)
        self._move_in()
        self._memory_to = host.arena.used if host else 0
        self.updates.take_over(list(self.owned), self.parameters)
        self._flags.fill_(1)
        self._all_used = torch.ones(len(self.parameters), dtype=torch.uint8)
        self.used = self._all_used
        self._arrived = bytearray(len(self.parameters))
        self._on_ready: OnReady | None = None
        self._last_part = False
        self._had_gaps = False
        self._deferred: list[Span] = []
        self._gates = host.progress() if host else None
        self._gate = 0
        self._spans_of = [
            tuple(s.index for s in self.spans if i in s.places) for i in range(len(self.parameters))
        ]
        self._hooks: dict[int, Any] = {}

    # Setting up

    def _lay_out(self, span_elements: int) -> Layout:
        group_of = {id(p): g for g, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        sparse = sparse_ids(self.model)
        whole = not is_element_wise(self.optimizer)
        shapes = [
            Shape(name=name, shape=tuple(p.shape), group=group_of[id(p)], whole=whole or id(p) in sparse)
            for name, p in zip(self._names, self.parameters, strict=True)
        ]
        return lay_out(shapes, span_elements=span_elements, lanes=self.lanes)

    def _claim_memory(self, dtype: torch.dtype) -> None:
        length, count = self.layout.length, len(self.parameters)
        if self._index == 0 and self._device.type == "cpu":
            vectors = 1 + self._workers + len(vector_states(self.optimizer))
            require_memory(
                vectors * length * dtype.itemsize,
                f"parameters, optimizer state and the gradients of {self._workers} workers",
            )
        self.params = self._vector(length, dtype)
        self._slots = [self._vector(length, dtype) for _ in range(self._workers)]
        self.grads = self._slots[0]  # where the sum over the workers of this replica is made
        self._slot_views = [
            self._slots[self._index][place.start : place.stop].view(place.shape)
            for place in self.layout.places
        ]
        self._flags = self._vector(self._workers * count, torch.uint8, on_device=False).view(
            self._workers, count
        )
        self._norms = self._vector(count + 1, dtype)  # and, last, the norm of them all
        # Per worker: whether it has gradients at all in this step, and how many parameters got none.
        self._states = (
            self._vector(self._workers * 2, torch.int64, on_device=False).view(self._workers, 2).numpy()
        )
        sparse = sparse_ids(self.model)
        self.updates = Updates(
            self.optimizer,
            self.layout,
            self.params,
            self.grads,
            allocate=lambda: self._vector(length, dtype),
            sparse=[index for index, param in enumerate(self.parameters) if id(param) in sparse],
        )

    def _vector(self, length: int, dtype: torch.dtype, on_device: bool = True) -> Tensor:
        if self._host and self._workers > 1:
            return self._host.allocate(length, dtype)
        return torch.zeros(length, dtype=dtype, device=self._device if on_device else "cpu")

    def _move_in(self) -> None:
        """The first worker's values become everyone's, and the model's parameters become views of them."""
        known = {id(param) for param in self.parameters}
        others = [param for param in self.model.parameters() if id(param) not in known]
        edges = list(itertools.accumulate((-(-p.nbytes // 64) * 64 for p in others), initial=0))
        self.constants = self._vector(edges[-1], torch.uint8)  # frozen parameters: one copy per host as well
        views = [self.params[place.start : place.stop].view(place.shape) for place in self.layout.places]
        for param, start in zip(others, edges, strict=False):
            views.append(self.constants[start : start + param.nbytes].view(param.dtype).view(param.shape))
        with torch.no_grad():
            for param, view in zip([*self.parameters, *others], views, strict=True):
                if self._index == 0:
                    view.copy_(param)
            if self._host:
                self._host.barrier()
            for param, view in zip([*self.parameters, *others], views, strict=True):
                param.data = view

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.layout.spans

    def lane(self, span: Span) -> int:
        """Spans of one lane are exchanged by the same worker of every host."""
        return span.index % self.lanes

    @property
    def owned(self) -> Iterator[Span]:
        """The spans that this worker adds up and updates."""
        return (span for span in self.spans if self.lane(span) % self._workers == self._index)

    @property
    def leads(self) -> bool:
        """Whether this worker speaks for the replica where one must."""
        return self._index == 0

    # One step: backward on every worker, then apply by the owners, then settle

    def backward(self, share: Share, on_ready: OnReady | None = None) -> float:
        """Gradients of this worker's share, weighted by samples; returns its mean loss.

        `on_ready` is told of each owned span as soon as it is added up over the workers of this replica, while the
        backward pass goes on. Without it the sums wait until `apply`, where they are still in the cache when updated.
        """
        self._begin(on_ready)
        value = 0.0
        with telemetry.timed("compute"):
            for number, (batch, samples) in enumerate(share.parts, start=1):
                loss = self._loss(self.model, batch)
                weight = samples / share.total()
                self._last_part = number == len(share.parts)
                # Weighting the loss weights every gradient, at no cost.
                loss.backward(None if weight == 1.0 else torch.full_like(loss, weight))
                value += loss.item() * samples
        self._end()
        self.steps += 1
        return value / share.samples if share.samples else float("nan")

    def _begin(self, on_ready: OnReady | None) -> None:
        self._arrived[:] = bytes(len(self.parameters))
        self._states[self._index] = (1, 0)
        self._on_ready = on_ready
        self._deferred.clear()
        self._reduced = on_ready is not None or self._workers == 1
        self._waiting_for = [len(span.places) for span in self.spans]
        self._passed = 0
        self._pending = list(self.owned) if on_ready else []
        for index, param in enumerate(self.parameters):
            param.grad = None
            if param.requires_grad and index not in self._hooks:  # at the first step, or thawed since
                self._hooks[index] = param.register_post_accumulate_grad_hook(partial(self._arrive, index))

    def _arrive(self, index: int, param: Tensor) -> None:
        """Called by autograd when a parameter's gradient is complete."""
        if not self._last_part:
            return  # more batches will be added to it
        grad = param.grad
        param.grad = None
        if grad is None:
            return
        if grad.is_sparse:
            grad = grad.to_dense()
        if self._arrived[index]:
            self._arrive_again(index, grad)
            return
        self._slot_views[index].copy_(grad)
        self._arrived[index] = 1
        if self._on_ready:
            for span in self._spans_of[index]:
                self._waiting_for[span] -= 1
            self._announce()

    def _arrive_again(self, index: int, grad: Tensor) -> None:
        """Re-entrant checkpointing runs several backward passes in one, each with a part of the gradient."""
        if any(span < self._passed for span in self._spans_of[index]):
            raise UsageError(
                f"parameter {self._names[index]!r} got a second gradient after the first had been exchanged; "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        self._slot_views[index].add_(grad)

    def _announce(self) -> None:
        """Tell the others which spans are complete here, and add up those that are complete everywhere."""
        passed = self._passed
        while passed < len(self.spans) and self._waiting_for[passed] <= 0:
            passed += 1
        if passed > self._passed:
            self._passed = passed
            if self._gates:
                self._gates.publish(self._gate + passed)
        while self._pending and self._pending[0].index < passed:
            span = self._pending[0]
            if self._gates and not self._gates.reached(self._gate + span.index + 1):
                return
            self._hand_over(self._pending.pop(0))

    def _hand_over(self, span: Span) -> None:
        assert self._on_ready is not None
        self._add_up(span)
        self._on_ready(span)

    def _end(self) -> None:
        """All gradients of this worker are there: say so, and wait until that is true of every worker.

        No parameter changes before this point. Another worker's backward pass may still read any of them, and a
        worker that dies before it leaves the parameters as they were.
        """
        for index, param in enumerate(self.parameters):
            if param.grad is not None:  # used by an earlier batch of this step and not by the last one
                self._arrive(index, param)
        self._last_part = False
        self._states[self._index, 0] = any(self._arrived)
        missing = len(self._arrived) - sum(self._arrived)
        if missing:
            self._fill_gaps()
        if missing or self._had_gaps:
            self._flags[self._index].copy_(torch.frombuffer(self._arrived, dtype=torch.uint8))
            self._had_gaps = bool(missing)
        self._states[self._index, 1] = missing
        self._waiting_for = [0] * len(self.spans)
        if self._on_ready:
            self._announce()
            for span in self._pending:
                if self._gates:
                    with telemetry.timed("wait"):
                        self._gates.wait(self._gate + span.index + 1)
                self._hand_over(span)
            self._pending = []
        if self._gates:
            self._gate += len(self.spans) + 1
            self._gates.publish(self._gate)
            with telemetry.timed("wait"):
                self._gates.wait(self._gate)
        self.used = self._flags.amax(0) if self._states[:, 1].any() else self._all_used

    def _fill_gaps(self) -> None:
        """Parameters without a gradient on this worker may have one on another."""
        if self._states[self._index, 0] or self._workers == 1:
            for index, arrived in enumerate(self._arrived):
                if not arrived:
                    self._slot_views[index].zero_()

    def _add_up(self, span: Span) -> None:
        """The sum over the workers that have gradients, into the common slot, in the order of the workers."""
        with telemetry.timed("exchange"):
            total = self.grads[span.slice]
            present = [
                slot[span.slice] for slot, (there, _) in zip(self._slots, self._states, strict=True) if there
            ]
            if not present:
                total.zero_()
                return
            if not self._states[0, 0]:
                total.copy_(present[0])
            for part in present[1:]:
                total.add_(part)
            telemetry.count("shared_bytes", (self._workers - 1) * total.nbytes)

    def apply(self, span: Span | None = None) -> None:
        """Run the user's optimizer on an owned span (on all of them if none is given)."""
        for part in [span] if span else self.owned:
            if not self._reduced:
                self._add_up(part)
            if self._clip_norm is not None:
                self._deferred.append(part)  # the norm needs all of them
            else:
                self._update(part)

    def _update(self, span: Span) -> None:
        with telemetry.timed("update"):
            self.updates.apply(span, self._skipped)

    @property
    def used(self) -> Tensor:
        """One flag per parameter: whether anyone had a gradient for it in this step. Others are not updated."""
        return self._used

    @used.setter
    def used(self, flags: Tensor) -> None:
        self._used = flags
        everything = flags is self._all_used or bool(flags.all())
        self._skipped = frozenset() if everything else frozenset(torch.nonzero(flags == 0).flatten().tolist())

    def settle(self) -> None:
        """End of the step: every owner has updated its spans, the parameters are those of one step again."""
        if self._clip_norm is not None and not self.needs_closure:
            factor = self._clip_factor(self._clip_norm)
            for span in self._deferred:
                self.grads[span.slice].mul_(factor)
                self._update(span)
            self._deferred.clear()
        if self._host:
            self._host.barrier()

    def _clip_factor(self, limit: float) -> Tensor:
        """As `clip_grad_norm_`: the norm of the norms of the parameters, each taken by one worker."""
        if self._host:
            self._host.barrier()
        skipped = self._skipped
        for index, place in enumerate(self.layout.places):
            if index % self._workers == self._index and index not in skipped:
                self._norms[index] = torch.linalg.vector_norm(self.grads[place.start : place.stop])
        if self._host:
            self._host.barrier()
        norm = self._norms[-1:]
        if self.leads:
            # In the model's order, so that one worker gets the very bits of plain PyTorch.
            norms = [
                self._norms[index] for index in reversed(range(len(self.parameters))) if index not in skipped
            ]
            norm.copy_(torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(()))
            if self._agree:
                self._agree(norm)  # another processor may have rounded otherwise
        if self._host:
            self._host.barrier()
        return torch.clamp(limit / (norm[0] + 1e-6), max=1.0)

    def minimize(self, gradients: Callable[[], float]) -> float:
        """For optimizers that evaluate the loss several times in a step; `gradients` fills `grads` and returns it."""

        def closure() -> float:
            loss = gradients()
            if self._clip_norm is not None:
                self.grads.mul_(self._clip_factor(self._clip_norm))
            for param, place in zip(self.parameters, self.layout.places, strict=True):
                param.grad = self.grads[place.start : place.stop].view(place.shape)
            return loss

        first = self.optimizer.step(closure)
        for param in self.parameters:
            param.grad = None
        return float(first) if first is not None else float("nan")

    def keep(self, name: str, start: Tensor | None = None) -> Tensor:
        """A vector of the strategy's own, saved and restored: at first a copy of `start`, or zeros like `params`."""
        return self.kept.get_or_make(name, self.params, start)

    # What is not a step

    @contextmanager
    def judged(self) -> Iterator[None]:
        """The model in evaluation mode and without gradients; afterwards every part of it as it was."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, training in modes:
                module.training = training

    def release(self) -> None:
        """Leave the model usable by itself: its parameters keep their values in ordinary memory."""
        for hook in self._hooks.values():
            hook.remove()
        with torch.no_grad():
            for param in self.model.parameters():
                param.data = param.data.clone()
        if self._host:
            self._host.barrier()
            if self.leads and self._workers > 1:
                self._host.arena.give_back(self._memory_from, self._memory_to)
