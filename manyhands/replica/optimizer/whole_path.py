"""Updates by an optimizer that cannot be divided: the user's own, on the user's own parameters.

Each worker has a replica of its own and makes every step whole, as under PyTorch's DDP: the sum of the gradients has
the same bits on all, and so have the parameters afterwards. The state is where plain PyTorch keeps it, in the optimizer
that the script holds (`replica/state/whole_optimizer.py` has how a checkpoint and other workers get at it).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.errors import UsageError
from manyhands.replica.flat_model import FlatModel
from manyhands.replica.gradients.summing import Gradients
from manyhands.replica.layout import Span
from manyhands.replica.optimizer.abilities import abilities_of
from manyhands.replica.optimizer.trial import Call
from manyhands.replica.optimizer.updates import Evaluate, StepGate, UpdatePath, Updates
from manyhands.replica.parameters import in_type

stepping: set[int] = set()
"""The ids of the optimizers of which a session calls `step` itself at this moment."""


class WholePath(UpdatePath):
    """Gathers the gradients of all spans, and makes the step when the last one is here."""

    def __init__(
        self, updates: Updates, gradients: Gradients, gate: StepGate, flat: FlatModel, seed: int | None
    ) -> None:
        """`seed` gives the random numbers that the optimizer draws, where all workers must draw the same."""
        super().__init__(updates, gradients, gate)
        self._flat = flat
        self._seed = seed
        self._missing = {span.index for span in flat.layout.spans}

    def apply(self, span: Span) -> None:
        self._gradients.complete(span)
        self.make(span, self._gradients.total[span.slice])

    def make(self, span: Span, gradient: Tensor) -> None:
        home = self._gradients.total[span.slice]
        if gradient.data_ptr() != home.data_ptr():
            home.copy_(gradient)
        self._missing.discard(span.index)
        if not self._missing:
            self._missing = {span.index for span in self._flat.layout.spans}
            with telemetry.timed("update"), self._drawing():
                self.give_gradients()
                with self._stepping():
                    self._flat.optimizer.step()
                self.take_gradients()

    def minimize(self, evaluate: Evaluate) -> float:
        losses: list[float] = []

        def closure() -> Tensor:
            with torch.enable_grad():
                losses.append(evaluate())
            self.give_gradients()
            return torch.tensor(losses[-1], dtype=torch.float64)

        with self._drawing():
            if abilities_of(self._flat.optimizer).call is Call.BOTH:
                closure()
            with self._stepping():
                self._flat.optimizer.step(closure)  # type: ignore[arg-type]  # as a script gives it: a tensor
        self.take_gradients()
        if not losses:
            name = type(self._flat.optimizer).__name__
            raise UsageError(
                f"{name}.step(closure) did not call its closure, so there was no loss and no gradient; call it in "
                "every step, or let the optimizer take gradients that are there: step()"
            )
        return losses[0]

    def give_gradients(self) -> None:
        """The sum becomes the gradients of the user's parameters; those that are not used have none."""
        total = self._gradients.total
        for index, (param, place) in enumerate(
            zip(self._flat.parameters, self._flat.layout.places, strict=True)
        ):
            param.grad = None
            if index not in self.skipped:
                # A copy: an optimizer may keep it, and `total` is used again.
                grad = in_type(total[place.start : place.stop], param.dtype, copy=True).view(place.shape)
                param.grad = grad.to_sparse(1) if place.rows else grad

    def take_gradients(self) -> None:
        """Between steps there are none, as under `zero_grad`."""
        for param in self._flat.parameters:
            param.grad = None

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        stepping.add(id(self._flat.optimizer))
        try:
            yield
        finally:
            stepping.discard(id(self._flat.optimizer))

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """While all workers draw the same random numbers, those of this step."""
        if self._seed is None:
            yield
            return
        own = torch.get_rng_state()
        torch.manual_seed(hash((self._seed, self._gradients.step)))
        try:
            yield
        finally:
            torch.set_rng_state(own)
