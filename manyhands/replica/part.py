"""What one worker has of a replica, and how its passes run: here all of it, on this worker alone.

A placement gives a replica another part: some of the layers, a slice of each of them, a shard of each parameter.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands import telemetry
from manyhands.replica.parameters import trained
from manyhands.replica.share import Share
from manyhands.replica.state.slice_of import TensorSlice

Loss = Callable[[nn.Module, Any], Tensor]

# Around each pass that computes gradients: told whether they are the last of the step for their parameters.
Passing = Callable[[bool], AbstractContextManager[None]]


class Part:
    """All of the model; the parts of placements say what is different."""

    spread = False
    """Whether others have the rest of the replica."""
    hooked = True
    """Whether autograd completes gradients in the parameters themselves; else the part delivers them."""
    frugal = False
    """Whether memory counts more than time: a gradient goes into the sum at once, and is not kept beside it."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model = model
        self.loss = loss

    # What is here

    def trained(self, optimizer: Optimizer) -> tuple[list[str], list[nn.Parameter]]:
        """The trained parameters that are here, in the model's order, with their names."""
        return trained(self.model, optimizer)

    def originals(self, params: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """The user's parameters that these stand for."""
        return params

    def frozen(self, known: set[int]) -> list[nn.Parameter]:
        """The parameters that are here and are not trained."""
        return [param for param in self.model.parameters() if id(param) not in known]

    def buffers(self) -> list[Tensor]:
        return list(self.model.buffers())

    def tensors(self) -> dict[str, Tensor]:
        """What is here of the model's state, by name."""
        return {name: value for name, value in self.model.state_dict().items() if isinstance(value, Tensor)}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        self.model.load_state_dict(saved)

    def piece(self, name: str, value: Tensor) -> TensorSlice:
        """Where a parameter or buffer that is here lies in the whole one."""
        return TensorSlice(shape=tuple(value.shape))

    def bind(self, deliver: Callable[[int, Tensor], None]) -> None:
        """Where a part that is not `hooked` delivers gradients: by the parameter's place in the flat vector."""

    # Passes

    def backward(self, share: Share, passing: Passing) -> tuple[float, int]:
        """Gradients of the share into the parameters, each pass inside `passing`.

        Returns the loss, summed over samples, and their number.
        """
        value, count = 0.0, 0
        with telemetry.timed("compute"):
            for number, (batch, samples) in enumerate(share.parts, start=1):
                loss = self.loss(self.model, batch)
                weight = samples / share.total()
                with passing(isinstance(share.parts, Sequence) and number == len(share.parts)):
                    # Weighting the loss weights every gradient, at no cost. Given as a gradient, the weight would have
                    # PyTorch load the compiler's symbolic shapes to check its shape.
                    (loss if weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]
                value += loss.item() * samples
                count += samples
        return value, count

    def evaluate(self, measure: Loss, batch: Any, samples: int) -> float:
        """A measure of the model on a batch, without gradients; the same on all workers of the replica."""
        return float(measure(self.model, batch))

    def score(self, batches: Iterable[tuple[Any, int]]) -> float:
        """The loss summed over the samples that the replica has at hand, without gradients; the same on all its
        workers."""
        return sum(self.evaluate(self.loss, batch, samples) * samples for batch, samples in batches)

    # What the parts of a replica have in common

    def counts(self, name: str) -> bool:
        """Whether this worker speaks for a parameter that others have as well."""
        return True

    def whole_norm(self, norm: Tensor) -> Tensor:
        """The norm over the whole replica, from that of this part."""
        return norm

    def become_whole(self, tensors: Mapping[str, Tensor]) -> None:
        """Leave the model whole, after the session; `tensors` are its state by name."""
