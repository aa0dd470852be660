"""What one worker has of a replica, and how its passes run: here all of it, on this worker alone.

A placement gives a replica another part: some of the layers, a slice of each of them, a shard of each parameter.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands import telemetry
from manyhands.replica.parameters import trained
from manyhands.replica.returned import detached, loss_in, number_in
from manyhands.replica.share import Share
from manyhands.replica.state import buffers
from manyhands.replica.state.slice_of import TensorSlice

Loss = Callable[[nn.Module, Any], Any]
"""`loss(model, batch)`: returns the mean over the batch, alone or in a tuple, dict or object with what else the script
wants of the step (`returned.py`)."""

# Around each pass that computes gradients: told whether they are the last of the step for their parameters.
Passing = Callable[[bool], AbstractContextManager[None]]


Joint = Callable[[int], AbstractContextManager[None]]


class Watch(Protocol):
    """Looks at the parameters around a forward pass."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


class Part:
    """All of the model; the parts of placements say what is different."""

    spread = False
    """Whether others have the rest of the replica."""
    hooked = True
    """Whether autograd completes gradients in the parameters themselves; else the part delivers them."""
    frugal = False
    """Whether memory counts more than time: a gradient goes into the sum at once, and is not kept beside it."""

    gives_up_writes = False
    """Whether what the model writes into a parameter while it computes is gone after it."""

    whole_shapes: Sequence[tuple[Tensor, torch.Size]] = ()
    """Of a model in parts: every parameter and buffer, with the shape of the whole."""
    elsewhere: Collection[int] = ()
    """The ids of parameters that another session trains: this one leaves them where they are."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model = model
        self.loss = loss
        self.first_loss: Callable[[Any, float], None] | None = None
        """Looks at what the loss function has returned first, while its graph is there, and at its samples."""
        self.joint: Joint | None = None
        """Around each pass of a step, by its number, where workers meet in the middle of their passes."""
        self.watch: Watch | None = None
        """Around the next forward pass."""

    # What is here

    def trained(self, optimizer: Optimizer) -> tuple[list[str], list[nn.Parameter]]:
        """The trained parameters that are here, in the model's order, with their names."""
        return trained(self.model, optimizer)

    def originals(self, params: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """The user's parameters that these stand for."""
        return params

    def frozen(self, known: set[int]) -> list[nn.Parameter]:
        """The parameters that are here and are not trained."""
        return [p for p in self.model.parameters() if id(p) not in known and id(p) not in self.elsewhere]

    def buffers(self) -> list[Tensor]:
        return list(self.model.buffers())

    def tensors(self) -> dict[str, Tensor]:
        """What is here of the model's state, by name."""
        return buffers.to_saved({name: value.detach() for name, value in self._state().items()})

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        own = self._state()
        found = buffers.from_saved(saved, own)
        if missing := sorted(own.keys() - found.keys()):
            raise RuntimeError(f"missing: {', '.join(missing)}")
        if unknown := sorted(found.keys() - own.keys()):
            raise RuntimeError(f"unknown: {', '.join(unknown)}")
        for name, value in own.items():
            if value.shape != found[name].shape:
                raise RuntimeError(
                    f"{name} has the shape {tuple(found[name].shape)}, not {tuple(value.shape)}"
                )
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(found[name])

    def _state(self) -> dict[str, Tensor]:
        """The model's own tensors: what is copied into a detached sparse one would not be in the model."""
        values = self.model.state_dict(keep_vars=True)
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

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
        with telemetry.computing():
            for number, (batch, samples) in enumerate(share.parts, start=1):
                with self.joint(number - 1) if self.joint else nullcontext():
                    value += self._pass(share, batch, samples, number, passing) * samples
                count += samples
        return value, count

    def _pass(self, share: Share, batch: Any, samples: int, number: int, passing: Passing) -> float:
        watch, self.watch = self.watch, None
        if watch:
            watch.begin()
        began_s = time.perf_counter()
        returned = self.loss(self.model, batch)
        telemetry.add_seconds("forward", time.perf_counter() - began_s)
        if watch:
            watch.end()
        is_plain = isinstance(returned, Tensor) and returned.requires_grad and returned.dim() == 0
        loss = returned if is_plain else loss_in(returned)
        self.look_at_first(returned, samples)
        weight = samples / share.total()
        with passing(isinstance(share.parts, Sequence) and number == len(share.parts)):
            # Weighting the loss weights every gradient, at no cost. Given as a gradient, the weight would have
            # PyTorch load the compiler's symbolic shapes to check its shape.
            (loss if weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]
        share.results.append((returned.detach() if is_plain else detached(returned), samples))
        return loss.item()

    def look_at_first(self, returned: Any, samples: float) -> None:
        """Show what the loss function has returned to who asked for it, before its backward pass."""
        if self.first_loss:
            look, self.first_loss = self.first_loss, None
            look(returned, samples)

    def evaluate(self, measure: Loss, batch: Any, samples: int) -> float:
        """A measure of the model on a batch, without gradients; the same on all workers of the replica."""
        return number_in(measure(self.model, batch))

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
