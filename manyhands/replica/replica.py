"""One copy of the model's parameters, shared by the workers of a host.

All workers map the same `params`, the same sum of gradients and the same optimizer state. Every worker owns some of the
spans: when all workers have added their gradients of a span, its owner runs the optimizer on it, in place, for
everyone. No gather, no second copy, and the optimizer's work is divided instead of repeated. A replica of one worker
is the same code.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from manyhands.replica.flat_model import FlatModel
from manyhands.replica.gradients.error_memory import ErrorMemory
from manyhands.replica.gradients.hooks import OnReady
from manyhands.replica.gradients.in_advance import GradientsInAdvance
from manyhands.replica.gradients.tables import Tables
from manyhands.replica.layout import Span, coded_pieces, coded_widths
from manyhands.replica.neighbours import Neighbours
from manyhands.replica.optimizer.abilities import abilities_of, needs_closure, runs_whole
from manyhands.replica.optimizer.hyper_parameters import hyper_parameters, set_hyper_parameters
from manyhands.replica.optimizer.updates import UpdatePath, skipped_in
from manyhands.replica.part import Joint
from manyhands.replica.share import Made, MadePlace, Share
from manyhands.replica.state.kept import State, StrategyState
from manyhands.replica.state.step_copies import StepCopies


class Replica:
    """The model's parameters and gradients as flat vectors, the optimizer, and how its updates are made."""

    def __init__(
        self,
        flat: FlatModel,
        gradients: GradientsInAdvance,
        path: UpdatePath,
        *,
        lanes: int,
        copies: StepCopies | None = None,
        errors: ErrorMemory | None = None,
    ) -> None:
        """`copies` outlive this worker, as its `memory` does; `errors` are what a codec leaves out of gradients."""
        self.flat = flat
        self.model, self.part, self.optimizer = flat.model, flat.part, flat.optimizer
        self.memory = flat.memory
        self.layout, self.spans = flat.layout, flat.layout.spans
        self.parameters = flat.parameters
        self.params, self.constants = flat.params, flat.constants
        self.owned = gradients.owned
        self.path = path
        self.updates = path.updates
        self.lanes = lanes
        # Backward passes, by which strategies time their exchanges: one that is under way counts already, and a
        # rollback takes it back. Committed steps are in `Progress.steps`.
        self.steps = 0
        self.needs_closure, self.runs_whole = needs_closure(self.optimizer), runs_whole(self.optimizer)
        self.own_numbers = abilities_of(self.optimizer).own_numbers
        self.kept = StrategyState()
        self.eval_batch: Share | None = None  # what a strategy has at hand for evaluating models
        self._gradients, self._copies, self.errors = gradients, copies, errors
        self.used = gradients.all_used
        if self.memory.fills and not self.is_served and not self.runs_whole:
            self.updates.take_over(self.owned, flat.given_states(flat.optimizer.state))
        self.part.bind(gradients.arrive)
        self.memory.seal()

    def write_after(self, wait: OnReady, in_flight: Collection[int]) -> None:
        """Call `wait` before gradients of a span in flight are written: servers may still read those of the last
        step."""
        self._gradients.write_after(wait, in_flight)

    @property
    def arrived(self) -> Sequence[int]:
        """Per parameter, whether it has got a gradient in this step."""
        return self._gradients.arrived

    @property
    def tables(self) -> Tables | None:
        """The tables whose gradients go to servers row by row."""
        return self._gradients.tables

    @property
    def takes_factors(self) -> bool:
        """Whether gradients of some layers come as factors."""
        return self._gradients.takes_factors

    def lane(self, span: Span) -> int:
        """Spans of one lane are exchanged by the same worker of every host."""
        return span.index % self.lanes

    # One step: backward on every worker, then apply by the owners, then settle

    def backward(self, share: Share, on_ready: OnReady | None = None) -> float:
        """Gradients of this worker's share, weighted by samples; returns its mean loss.

        `on_ready` is told of each owned span as soon as it is added up over the workers of this replica, while the
        backward pass goes on. Without it an owner's additions wait until `apply`, where the sum is in the cache anyway.
        No parameter changes before all workers of this replica have all their gradients: another one's backward
        pass may still read any of them, and a worker that dies before leaves the parameters as they were.
        """
        gradients = self._gradients
        if share.made is None or share.made.place is MadePlace.WORKER:
            gradients.begin(on_ready)
            with gradients.watched():
                if share.made is None:
                    value, count = self.part.backward(share, gradients.passing)
                else:
                    value, count = self._arrive(share, share.made), share.samples
            gradients.finish()
        else:
            value, count = self._take_sum(share, share.made), share.samples
        self.used = gradients.used
        self.path.open()
        self.steps += 1
        return value / count if count else float("nan")

    def meet_in_passes(self, joint: Joint | None) -> None:
        """Workers meet in the middle of their passes: what is to be around each of them."""
        self.part.joint = joint
        self._gradients.wait_for_none()

    def _arrive(self, share: Share, made: Made) -> float:
        """Take gradients that were computed before; returns the loss, summed over samples."""
        weight = 1.0 if made.is_weighted or not share.samples else share.samples / share.total()
        for index, param in enumerate(self.parameters):
            grad = made.gradients.get(id(param))
            if grad is not None:
                self._gradients.arrive(index, grad.detach() if weight == 1.0 else grad.detach() * weight)
        return _loss_of(made, share)

    def _take_sum(self, share: Share, made: Made) -> float:
        """The same of a sum that is complete on this host."""
        if made.place is MadePlace.HOST:
            self._gradients.use()
        else:
            self._gradients.put([made.gradients.get(id(param)) for param in self.parameters])
        return _loss_of(made, share)

    @property
    def gathers(self) -> bool:
        """Whether `gather` leaves the sum in memory that all workers of the replica see."""
        return self.steps_together and self.memory.team.size > 1

    def gather(self, gradients: Sequence[Tensor | None], weight: float) -> None:
        """Make the sum over the workers of this replica before a step: of gradients by parameter, times `weight`."""
        self._gradients.gather(gradients, weight)

    def gathered(self) -> list[Tensor | None]:
        """That sum by parameter, in memory of this worker's own; None where no worker had a gradient."""
        return self._gradients.copy()

    @property
    def grads(self) -> Tensor:
        """The sum over the workers of this replica, complete on the spans that this worker owns; `apply` uses it up."""
        for span in self.owned:
            self._gradients.complete(span)
        return self._gradients.total

    def gradient(self, span: Span) -> Tensor:
        """The sum over the workers of this replica on one owned span; also for `on_ready`, during the backward pass."""
        self._gradients.complete(span)
        return self._gradients.total[span.slice]

    def matrices(self, span: Span) -> Sequence[slice]:
        """Which elements of a span belong to matrices, or to tensors of more dimensions, and not to small ones."""
        return coded_pieces(self.layout, span)

    def widths(self, span: Span) -> Sequence[int]:
        """How long the rows of these matrices are."""
        return coded_widths(self.layout, span)

    def stretch(self, first: Span, last: Span) -> Tensor:
        """The sum over the workers of this replica from one span to another; all between are complete."""
        return self._gradients.total[first.start : last.stop]

    def apply(self, span: Span | None = None) -> None:
        """Run the user's optimizer on an owned span (on all of them if none is given)."""
        if span is None:
            self.path.apply_all(self.owned)
        else:
            self.path.apply(span)

    def exchange_factors(self) -> Sequence[Span]:
        """Behind the sum over this host: the factors of large linear layers go to the other hosts, except those of
        these owned spans, which have to go as they are."""
        return self._gradients.exchange_factors()

    def await_factors(self, *, meet: bool) -> None:
        """Return when this worker has received its part of the other hosts' factors; to `meet`: when all workers of
        the host have theirs."""
        self._gradients.await_factors(meet=meet)

    @property
    def factored(self) -> Sequence[Span]:
        """The owned spans whose sum over all hosts comes as factors in this step."""
        return self._gradients.factored

    def receive(self) -> None:
        """The sums of all hosts are here for the spans that this worker owns."""
        self.path.gate.receive()

    @property
    def used(self) -> Tensor:
        """One flag per parameter: whether any worker had a gradient for it in this step. Others are not updated."""
        return self._used

    @used.setter
    def used(self, flags: Tensor) -> None:
        self._used = flags
        everything = flags is self._gradients.all_used or bool(flags.all())
        self.path.skipped = frozenset() if everything else skipped_in(flags)

    def settle(self) -> None:
        """End of the step: every owner has updated its spans, the parameters are those of one step again."""
        self.path.settle()

    @property
    def gated(self) -> bool:
        """Whether no span is updated before the sums of all spans have come from the other hosts."""
        return self.path.gate.gated

    @property
    def is_logged(self) -> bool:
        """Whether the others can finish an update in which one of them dies."""
        return self.path.is_logged

    @property
    def begun(self) -> int:
        """How many steps all workers of this replica have brought to where updates begin."""
        return self.path.gate.begun

    def recover(self, dead: Collection[int], *, attempt: int = 1) -> int:
        """Make the replica that of a whole step, without some workers of this host; returns how many steps it has."""
        return self.path.recover(dead, attempt)

    @property
    def outlives(self) -> bool:
        """Whether another process can go on with it when all workers that have it are dead."""
        return self.memory.outlives

    def complete(self) -> None:
        """It has all that was before this generation."""
        self.keep_buffers(0)
        self.memory.complete()

    def keep_buffers(self, steps: int) -> None:
        """The buffers are what they are to be after so many steps of this generation, if it comes to undoing."""
        if self._copies:
            self._copies.make(steps)

    def put_back_buffers(self, steps: int) -> None:
        """The buffers are again what they were after so many steps of this generation."""
        if self._copies:
            self._copies.put_back(steps)

    def minimize(self, gradients: Callable[[], float]) -> float:
        """For optimizers that evaluate the loss several times in a step; `gradients` fills `grads` and returns it."""

        def evaluate() -> float:
            loss = gradients()
            self.path.limit(self.grads)
            return loss

        return self.path.minimize(evaluate)

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

    @contextmanager
    def evaluated(self) -> Iterator[None]:
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
        parts = self.eval_batch.parts if self.eval_batch else ()
        with self.evaluated():
            total = self.part.score(parts)
        return total if math.isfinite(total) else math.inf

    def to_flat(self) -> Tensor:
        """The model as one vector, its running statistics included."""
        return self.flat.to_flat()

    def load_flat(self, flat: Tensor) -> None:
        """Become the model that `to_flat` gave, here or on another worker."""
        self.flat.load_flat(flat)

    @property
    def settings(self) -> list[float]:
        """All numbers among the optimizer's settings."""
        return hyper_parameters(self.optimizer)

    @settings.setter
    def settings(self, values: Sequence[float]) -> None:
        set_hyper_parameters(self.optimizer, values)

    def forget(self) -> None:
        """Give up the optimizer's state, as if it had made no step yet."""
        self.updates.restore(self.owned, {})

    # Whose it is

    @property
    def neighbours(self) -> Neighbours:
        """The replicas of the other workers of the host, where they are open to each other."""
        return self.memory.neighbours

    @property
    def leads(self) -> bool:
        """Whether this worker speaks for the replica where one must."""
        return self.memory.leads

    @property
    def is_shared(self) -> bool:
        """Whether the workers of the host have this replica in common."""
        return self.memory.is_shared

    @property
    def steps_together(self) -> bool:
        """Whether they share it and make every step together."""
        return self.memory.steps_together

    @property
    def is_served(self) -> bool:
        """Whether servers have the parameters, and update them."""
        return self.memory.is_served

    @property
    def is_own(self) -> bool:
        """Whether this worker alone has it, all of it."""
        return not self.is_shared and not self.is_served

    def let_go(self) -> None:
        """The model's gradients go elsewhere from now on; its parameters stay here."""
        self._gradients.unhook()

    def take_back(self) -> None:
        """The model's parameters are here again, after another replica had them."""
        self.flat.take_back()

    def release(self) -> None:
        """Leave the model usable by itself: its parameters keep their values in ordinary memory."""
        self.let_go()
        self.flat.release()


def _loss_of(made: Made, share: Share) -> float:
    """Summed over samples; NaN where only the script knows it."""
    return (math.nan if made.loss is None else made.loss) * share.samples
