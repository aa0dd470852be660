"""One copy of the model's parameters, shared by the workers of a host.

All workers map the same `params`, the same sum of gradients and the same optimizer state. Every worker owns some of the
spans: when all workers have added their gradients of a span, its owner runs the optimizer on it, in place, for
everyone. No gather, no second copy, and the optimizer's work is divided instead of repeated. A replica of one worker
is the same code.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands import telemetry
from manyhands.comm.transports.arena import require_memory
from manyhands.comm.transports.host import Host
from manyhands.replica.barrier_group import BarrierGroup
from manyhands.replica.gradients.factors import Factors, LinearLayers, linear_weights
from manyhands.replica.gradients.summing import Gradients, OnReady
from manyhands.replica.gradients.tables import Tables
from manyhands.replica.layout import Span
from manyhands.replica.neighbours import Neighbours
from manyhands.replica.optimizer.abilities import needs_closure, vector_states
from manyhands.replica.optimizer.hyper_parameters import hyper_parameters, set_hyper_parameters
from manyhands.replica.optimizer.undo_log import UndoLog
from manyhands.replica.optimizer.updates import Updates
from manyhands.replica.parameters import lay_out_params, one_type, sparse_ids
from manyhands.replica.part import Loss, Part, Share
from manyhands.replica.server_memory import ServerMemory
from manyhands.replica.state.kept import State, StrategyState

SPAN_BYTES = 1 << 20  # fits a core's cache: a span is added up and updated without going back to memory


class Memory(Protocol):
    """Gives vectors, and takes them back."""

    def vector(self, length: int, dtype: torch.dtype) -> Tensor: ...

    def give_back(self, vector: Tensor) -> None: ...


class Replica:
    """The model's parameters and gradients as flat vectors over the real storage."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        *,
        host: Host | None = None,
        neighbours: Neighbours | None = None,
        together: bool = True,
        factored: bool = False,
        journaled: bool = False,
        gated: bool = False,
        exact: bool = True,
        lanes: int | None = None,
        clip_norm: float | None = None,
        agree: Callable[[Tensor], None] | None = None,
        memory: Memory | None = None,
        span_bytes: int = SPAN_BYTES,
        server_memory: ServerMemory | None = None,
        part: Part | None = None,
        barrier_group: BarrierGroup | None = None,
    ) -> None:
        self.model = model
        self.part = part or Part(model, loss)
        self.optimizer = optimizer
        self.steps = 0
        self.needs_closure = needs_closure(optimizer)
        self.kept = StrategyState()
        self.held: Share | None = None  # what a strategy has at hand for judging models
        self._clip_norm = clip_norm
        self._agree = agree  # makes a vector of the first replica everyone's, where all take the same step
        self._memory = memory  # for what this worker has to itself; else ordinary memory
        self._borrowed: list[Tensor] = []
        self._neighbours = neighbours
        self.server_memory = server_memory
        self._home = host  # whose memory the parameters are in
        # The workers that add up their gradients and divide the updates; without them each updates everything.
        self._host = host if together else None
        self._index = self._host.index if self._host else 0
        self._workers = self._host.size if self._host else 1
        # With whom every step is made: those with the same part, or all, where others have other parts.
        self._in_parts = barrier_group is not None
        self._barrier_group = barrier_group
        if self._host and barrier_group is None:
            self._barrier_group = BarrierGroup(self._host, tuple(range(self._workers)))
        self.lanes = lanes or self._workers
        self._journaled = journaled and self._workers > 1 and not server_memory
        # Whether no span is updated before the sums of all spans have come from the other hosts.
        self.gated = gated and self._host is not None
        self._names, self.parameters = self.part.trained(optimizer)
        self._device, dtype = one_type(self.parameters)
        # Gradients as factors: for workers that add them up, and where nobody else wants them as they come.
        factored = (
            factored
            and self._workers > 1
            and not server_memory
            and clip_norm is None
            and not self.part.spread
        )
        weights = linear_weights(model) if factored else set()
        self.layout = (
            server_memory.layout
            if server_memory
            else lay_out_params(
                self._names,
                self.parameters,
                optimizer,
                originals=self.part.originals(self.parameters),
                sparse=sparse_ids(model),
                span_bytes=span_bytes,
                lanes=self.lanes,
                factored=weights,
            )
        )
        # Flat order is last parameter first.
        self._names.reverse()
        self.parameters.reverse()
        self._large = self._large_weights(model)
        self._memory_from = host.arena.used if host else 0
        self._claim_memory(dtype, exact=exact)
        self._move_in()
        self._memory_to = host.arena.used if host else 0
        if not server_memory:
            self.updates.take_over(list(self.owned), self._given_states())
        self._flags.fill_(1)
        self._all_used = torch.ones(len(self.parameters), dtype=torch.uint8)
        self.used = self._all_used
        self._last_part = False
        self._passes_back = False
        self._clip_is_due = False
        self._deferred: list[Span] = []
        self._hooks: dict[int, Any] = {}
        self.part.bind(self.deliver)

    # Setting up

    def _large_weights(self, model: nn.Module) -> list[int]:
        """Weights of linear layers whose gradients servers want in one piece of memory: they are made there."""
        if not self.server_memory or self._workers > 1 or self.part.spread:
            return []
        ids = linear_weights(model)
        return [
            index
            for index, param in enumerate(self.parameters)
            if id(param) in ids and param.nbytes >= SPAN_BYTES and param.is_contiguous()
        ]

    def _claim_memory(self, dtype: torch.dtype, *, exact: bool) -> None:
        server_memory = self.server_memory
        length, count = self.layout.length, len(self.parameters)
        if self.leads and self._device.type == "cpu" and not server_memory:
            alone = 1 if self._host or not self._home else self._home.size  # a gradient for each of those
            vectors = 1 + alone + len(vector_states(self.optimizer))
            require_memory(vectors * length * dtype.itemsize, "parameters, gradients and optimizer state")
        claim = self._neighbours.claim if self._neighbours else self._common_vector
        self.params = server_memory.params if server_memory else claim(length, dtype)
        total = server_memory.grads if server_memory else self._vector(length, dtype)
        owners = [self._owner(span) for span in self.spans]
        factors = None
        if self._host and any(place.factored for place in self.layout.places):
            factors = Factors(self.layout, total, self._host)
        # Where each worker's gradients go to servers as they are, rows of tables need not become whole.
        self.tables = Tables(self.layout, total) if server_memory and self._workers == 1 else None
        self._flags = self._vector(self._workers * count, torch.uint8, on_device=False).view(
            self._workers, count
        )
        self._norms = self._vector(count + 1, dtype)  # and, last, the norm of them all
        self._clipping = self._vector(1, dtype)  # what limits the norm, where all know it before they update
        # Per worker: how many parameters got no gradient in this step.
        self._missing = self._vector(self._workers, torch.int64, on_device=False).numpy()
        self.updates = Updates(
            self.optimizer,
            self.layout,
            self.params,
            allocate=None if server_memory else lambda name: self._common_vector(length, dtype),
            common=self._host if self._journaled else None,
            exact=exact,
        )
        self._journal: UndoLog | None = None
        if self._host and self._barrier_group and self._journaled:
            changed = [self.params, *self.updates.vectors.values()]
            self._journal = UndoLog(
                self.layout,
                changed,
                self.updates.numbers,
                self._host.allocate,
                owners=self._workers,
                mine=self._index,
            )
            self._meetings = self._barrier_group.host.progress()
        self._gradients = Gradients(
            self.layout,
            total,
            owners,
            self._host,
            factors,
            self.tables,
            before_gate=self._journaled or self.part.frugal or self._in_parts,
            scratch=self._journal.scratch if self._journal else None,
        )
        self._gate = self._barrier_group.host.progress() if self._barrier_group and self._in_parts else None
        self._received = self._host.progress() if self._host and self.gated and self._workers > 1 else None

    def _given_states(self) -> dict[str, dict[str, Any]]:
        """The state that the user's optimizer already has, as far as it concerns this part."""
        states: dict[str, dict[str, Any]] = {}
        originals = self.part.originals(self.parameters)
        for param, original, place in zip(self.parameters, originals, self.layout.places, strict=True):
            piece = self.part.piece(place.name, param)
            for name, value in self.optimizer.state.get(original, {}).items():
                if isinstance(value, Tensor) and tuple(value.shape) == piece.shape:
                    value = piece.of(value)
                states.setdefault(place.name, {})[name] = value
        return states

    def _common_vector(self, length: int, dtype: torch.dtype) -> Tensor:
        """What there is one of per host."""
        if self._home and self._home.size > 1:
            return self._home.allocate(length, dtype)
        return self._vector(length, dtype)

    def _vector(self, length: int, dtype: torch.dtype, on_device: bool = True) -> Tensor:
        """What the workers that step together have in common; one of them has it to itself."""
        if self._host and self._workers > 1:
            return self._host.allocate(length, dtype)
        if self._memory and on_device:
            self._borrowed.append(self._memory.vector(length, dtype))
            return self._borrowed[-1]
        return torch.zeros(length, dtype=dtype, device=self._device if on_device else "cpu")

    def _move_in(self) -> None:
        """The first worker's values become everyone's, and the model's parameters become views of them."""
        known = {id(param) for param in self.parameters}
        others = self.part.frozen(known)
        edges = list(itertools.accumulate((-(-p.nbytes // 64) * 64 for p in others), initial=0))
        self.constants = self._common_vector(
            edges[-1], torch.uint8
        )  # frozen parameters: one copy per host as well
        views = [self.params[place.start : place.stop].view(place.shape) for place in self.layout.places]
        for param, start in zip(others, edges, strict=False):
            views.append(self.constants[start : start + param.nbytes].view(param.dtype).view(param.shape))
        skip = len(self.parameters) if self.server_memory and not self.server_memory.fills else 0
        with torch.no_grad():
            for param, view in list(zip([*self.parameters, *others], views, strict=True))[skip:]:
                if self.leads:
                    view.copy_(param)
            if self._home:
                self._home.barrier()
            for param, view in zip([*self.parameters, *others], views, strict=True):
                param.data = view

    def write_after(self, wait: OnReady, in_flight: Collection[int]) -> None:
        """Call `wait` before gradients of a span in flight are written: servers may still read those of the last
        step."""
        self._gradients.write_after(wait, in_flight)

    @property
    def arrived(self) -> Sequence[int]:
        """Per parameter, whether it has got a gradient in this step."""
        return self._gradients.arrived

    @property
    def takes_factors(self) -> bool:
        """Whether gradients of some layers come as factors."""
        return self._gradients.factors is not None

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.layout.spans

    def lane(self, span: Span) -> int:
        """Spans of one lane are exchanged by the same worker of every host."""
        return span.index % self.lanes

    @property
    def owned(self) -> Iterator[Span]:
        """The spans that this worker adds up and updates."""
        return (span for span in self.spans if self._owner(span) == self._index)

    def _owner(self, span: Span) -> int:
        return 0 if self.server_memory else self.lane(span) % self._workers

    @property
    def neighbours(self) -> Neighbours:
        """The replicas of the other workers of the host, where they are open to each other."""
        assert self._neighbours, "this strategy has not asked for an open replica"
        return self._neighbours

    @property
    def leads(self) -> bool:
        """Whether this worker speaks for the replica where one must."""
        return self._home is None or self._home.index == 0

    # One step: backward on every worker, then apply by the owners, then settle

    def backward(self, share: Share, on_ready: OnReady | None = None) -> float:
        """Gradients of this worker's share, weighted by samples; returns its mean loss.

        `on_ready` is told of each owned span as soon as it is added up over the workers of this replica, while the
        backward pass goes on. Without it an owner's additions wait until `apply`, where the sum is in the cache anyway.
        No parameter changes before all workers of this replica have all their gradients: another one's backward
        pass may still read any of them, and a worker that dies before leaves the parameters as they were.
        """
        self._begin(on_ready)
        with self._watched():
            value, count = self.part.backward(share, self._passing)
        self._end()
        self._pass_gate()
        self.steps += 1
        return value / count if count else float("nan")

    def _watched(self) -> AbstractContextManager[object]:
        """While the gradients of large linear layers are taken as factors, or made where they are wanted."""
        factors = self._gradients.factors
        layers = factors.layers if factors else self._large
        if not layers:
            return nullcontext()
        return LinearLayers({id(self.parameters[index]): index for index in layers}, self._make)

    def _make(self, index: int, inputs: Tensor, outputs: Tensor) -> Tensor | None:
        """Called by autograd in place of making a large gradient; the user's own passes get theirs as usual."""
        if self._passes_back and self._gradients.offer(index, inputs, outputs):
            if self._last_part:
                self._gradients.arrive(index, None)
            return None
        room = self._gradients.room(index) if self._passes_back and not self.takes_factors else None
        return outputs.t() @ inputs if room is None else torch.mm(outputs.t(), inputs, out=room)

    def _begin(self, on_ready: OnReady | None) -> None:
        self._gradients.begin(on_ready)
        self._deferred.clear()
        self._clip_is_due = not self.needs_closure
        for index, param in enumerate(self.parameters):
            param.grad = None
            # At the first step, or thawed since.
            if param.requires_grad and index not in self._hooks and self.part.hooked:
                self._hooks[index] = param.register_post_accumulate_grad_hook(partial(self._arrive, index))

    @contextmanager
    def _passing(self, is_last: bool) -> Iterator[None]:
        """While gradients are computed; whether they are the last of this step for their parameters."""
        self._last_part, self._passes_back = is_last, True
        try:
            yield
        finally:
            self._passes_back = False

    def deliver(self, index: int, gradient: Tensor) -> None:
        """The whole of a parameter's gradient in this step, where autograd does not leave it in the parameter."""
        self._gradients.arrive(index, gradient)

    def _arrive(self, index: int, param: Tensor) -> None:
        """Called by autograd when a parameter's gradient is complete."""
        if not self._last_part:
            return  # more batches will be added to it
        grad = param.grad
        param.grad = None
        if grad is not None:
            self._gradients.arrive(index, grad)

    def _end(self) -> None:
        """All gradients of this worker are there: say which, and wait until that is true of every worker."""
        self._last_part = True
        for index, param in enumerate(self.parameters):
            if param.grad is not None:  # used by an earlier batch of this step and not by the last one
                self._arrive(index, param)
        self._gradients.arrive_late()
        self._last_part = False
        arrived = self._gradients.arrived
        missing = len(arrived) - sum(arrived)
        if missing or self._missing[self._index]:
            self._flags[self._index].copy_(torch.frombuffer(arrived, dtype=torch.uint8))
        self._missing[self._index] = missing
        self._gradients.finish()
        self._find_used()

    def _pass_gate(self) -> None:
        """Wait until all parts have their gradients, and know what limits them: then none needs another any more."""
        if self._gate is None:
            return
        if self._clip_norm is not None:
            self._clipping.copy_(self._clip_factor(self._clip_norm))
        self._gate.publish(self._gradients.step)
        with telemetry.timed("wait"):
            self._gate.wait(self._gradients.step)

    def _find_used(self) -> None:
        self.used = self._flags.amax(0) if self._missing.any() else self._all_used

    @property
    def grads(self) -> Tensor:
        """The sum over the workers of this replica, complete on the spans that this worker owns; `apply` uses it up."""
        self._gradients.complete_all()
        return self._gradients.total

    def gradient(self, span: Span) -> Tensor:
        """The sum over the workers of this replica on one owned span; also for `on_ready`, during the backward pass."""
        self._gradients.complete(span)
        return self._gradients.total[span.slice]

    def stretch(self, first: Span, last: Span) -> Tensor:
        """The sum over the workers of this replica from one span to another; all between are complete."""
        return self._gradients.total[first.start : last.stop]

    def apply(self, span: Span | None = None) -> None:
        """Run the user's optimizer on an owned span (on all of them if none is given)."""
        for part in [span] if span else self.owned:
            if self._clip_norm is not None:
                self._gradients.complete(part)
                self._deferred.append(part)  # the norm needs all of them
            else:
                self._update(part, self._gradients.take(part))
        if span is None:
            self._clip_is_due = True  # also for gradients that are not those of the last backward pass
            self._apply_clipped()

    def _apply_clipped(self) -> None:
        if self._clip_norm is not None and self._clip_is_due:
            self._clip_is_due = False
            factor = self._clipping if self._in_parts else self._clip_factor(self._clip_norm)
            for span in self._deferred:
                self._update(span, self._gradients.total[span.slice] * factor)
            self._deferred.clear()

    def _update(self, span: Span, gradient: Tensor) -> None:
        with telemetry.timed("update"):
            if self._journal:
                self._journal.update(self.updates, span, gradient, self._skipped, self._gradients.step)
            else:
                self.updates.apply(span, gradient, self._skipped)

    def receive(self) -> None:
        """The sums of all hosts are here for the spans that this worker owns: wait until that is true of every worker
        of this host. Until then nothing has changed; from then on this host alone can finish the step."""
        if self._received:
            self._received.publish(self._gradients.step)
            with telemetry.timed("wait"):
                self._received.wait(self._gradients.step)

    @property
    def is_journaled(self) -> bool:
        """Whether the others can finish an update in which one of them dies."""
        return self._journal is not None

    @property
    def begun(self) -> int:
        """How many steps all workers of this replica have brought to where updates begin."""
        if self._gate:
            return min(self._gate.values())
        return min(self._received.values()) if self._received else self._gradients.passed()

    def recover(self, dead: Collection[int], *, attempt: int = 1) -> int:
        """Some workers of this host (by index in it) are gone for good; called by all others, who have left whatever
        they were doing.

        Makes the replica that of a whole step: of the last one that all workers, the dead included, have brought to
        the gate (with several hosts: to where the sums of all hosts are here). Returns how many steps that are.
        Afterwards every survivor alone can tell the whole state. If this raises `PeerLost`, because another worker dies
        meanwhile, all call it again with all that are gone, and with a higher `attempt`.
        """
        assert self._journal, "nobody can finish an update without a journal"
        barrier_group = self._barrier_group
        assert barrier_group
        barrier_group.host.forget(dead)
        everyone = [index for index in range(barrier_group.host.size) if index not in dead]
        survivors = [index for index, place in enumerate(barrier_group.own) if place not in dead]
        meetings = itertools.count(attempt * 8)
        self._meet(everyone, next(meetings))  # from here on nobody changes anything but below
        steps = self.begun
        if self._index == survivors[0]:
            for worker in sorted(set(range(self._workers)) - set(survivors)):
                self._journal.repair(self.updates, worker, steps)
        self._meet(everyone, next(meetings))
        left = self._journal.left(steps)
        self._meet(everyone, next(meetings))  # everyone has the same list
        if not self._received:  # else all have heard it from the other hosts
            self._find_used()
        mine = left[survivors.index(self._index) :: len(survivors)]
        self.updates.take_from_others(mine)
        factor = self._recovered_factor() if mine else 1.0
        for span in mine:
            self._update(span, self._gradients.recompute(span) * factor)
        self._meet(everyone, next(meetings))
        self.updates.take_from_others(self.spans)
        return steps

    def _meet(self, survivors: Collection[int], meeting: int) -> None:
        """All survivors have come as far; the meetings of one recovery have growing numbers."""
        self._meetings.publish(meeting)
        for peer in survivors:
            self._meetings.wait_for(peer, meeting)

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
        self._apply_clipped()
        if self._barrier_group:
            self._barrier_group.host.barrier()

    def _clip_factor(self, limit: float) -> Tensor:
        """As `clip_grad_norm_`: the norm of the norms of the parameters, each taken by one worker."""
        if self._host:
            self._host.barrier()
        skipped, total = self._skipped, self._gradients.total
        counted = [self.part.counts(place.name) for place in self.layout.places]
        for index, place in enumerate(self.layout.places):
            if index % self._workers == self._index and index not in skipped and counted[index]:
                self._norms[index] = torch.linalg.vector_norm(total[place.start : place.stop])
        if self._host:
            self._host.barrier()
        norm = self._norms[-1:]
        if self._index == 0:
            norm.copy_(self._norm_of(list(self._norms[:-1])))
            if self._agree:
                self._agree(norm)  # another processor may have rounded otherwise
        if self._host:
            self._host.barrier()
        return _factor(limit, self.part.whole_norm(norm[0]))

    def _recovered_factor(self) -> float | Tensor:
        """The same as `_clip_factor`, by a survivor alone."""
        if self._clip_norm is None:
            return 1.0
        if self._in_parts:
            return self._clipping
        total = self._gradients.total
        norms = [torch.linalg.vector_norm(total[place.start : place.stop]) for place in self.layout.places]
        return _factor(self._clip_norm, self._norm_of(norms))

    def _norm_of(self, norms: Sequence[Tensor]) -> Tensor:
        """The norm of the parameters' norms, in the model's order: one worker gets the very bits of plain PyTorch."""
        used = [
            norms[index]
            for index, place in reversed(list(enumerate(self.layout.places)))
            if index not in self._skipped and self.part.counts(place.name)
        ]
        return torch.linalg.vector_norm(torch.stack(used)) if used else torch.zeros(())

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

    def descend(self) -> None:
        """Plain gradient descent by this step's gradient, at the rates of the user's optimizer."""
        grads = self.grads
        for place in self.layout.places:
            rate = float(self.optimizer.param_groups[place.group]["lr"])
            self.params[place.start : place.stop].sub_(grads[place.start : place.stop], alpha=rate)

    @contextmanager
    def rate(self, factor: float) -> Iterator[None]:
        """While the optimizer's learning rates are `factor` times what they are."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        try:
            yield
        finally:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def keep(self, make: Callable[[], State]) -> State:
        """The strategy's own state, a dataclass of vectors and numbers; `make` makes the first."""
        return self.kept.get_or_make(make)

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

    def score(self) -> float:
        """The loss of the model as it is, summed over the samples at hand; infinite if it is not a number."""
        parts = self.held.parts if self.held else ()
        with self.judged():
            total = self.part.score(parts)
        return total if math.isfinite(total) else math.inf

    def whole(self) -> Tensor:
        """The model as one vector, its running statistics included."""
        return torch.cat([self.params, *(buffer.to(self.params).view(-1) for buffer in self._statistics())])

    def become(self, whole: Tensor) -> None:
        """Be what `whole` gave, here or elsewhere."""
        buffers = self._statistics()
        parts = whole.split([len(self.params), *(buffer.numel() for buffer in buffers)])
        for target, part in zip([self.params, *buffers], parts, strict=True):
            target.copy_(part.view(target.shape))

    def _statistics(self) -> list[Tensor]:
        return [buffer for buffer in self.part.buffers() if buffer.is_floating_point()]

    @property
    def settings(self) -> list[float]:
        """All numbers among the optimizer's settings."""
        return hyper_parameters(self.optimizer)

    @settings.setter
    def settings(self, values: Sequence[float]) -> None:
        set_hyper_parameters(self.optimizer, values)

    def forget(self) -> None:
        """Give up the optimizer's state, as if it had made no step yet."""
        self.updates.restore(list(self.owned), {})

    @property
    def is_shared(self) -> bool:
        """Whether the workers of the host have this replica in common."""
        return self._home is not None

    @property
    def steps_together(self) -> bool:
        """Whether they share it and make every step together."""
        return self._host is not None

    @property
    def is_own(self) -> bool:
        """Whether this worker alone has it, all of it."""
        return self._home is None and self.server_memory is None

    def let_go(self) -> None:
        """The model's gradients go elsewhere from now on; its parameters stay here."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def take_back(self) -> None:
        """The model's parameters are here again, after another replica had them."""
        for param, place in zip(self.parameters, self.layout.places, strict=True):
            param.data = self.params[place.start : place.stop].view(place.shape)

    def release(self) -> None:
        """Leave the model usable by itself: its parameters keep their values in ordinary memory."""
        self.let_go()
        with torch.no_grad():
            for param in [*self.parameters, *self.part.frozen({id(param) for param in self.parameters})]:
                param.data = param.data.clone()
        for vector in self._borrowed:
            assert self._memory is not None
            self._memory.give_back(vector)
        if self._neighbours:
            self._neighbours.close()
        if self._home:
            self._home.barrier()
            if self.leads and self._home.size > 1:
                self._home.arena.give_back(self._memory_from, self._memory_to)


def _factor(limit: float, norm: Tensor) -> Tensor:
    """As `clip_grad_norm_` has it."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)
