"""The gradient of all workers in the host's memory, where a script can ask for it between the halves of a step.

Most scripts do not: then the update takes the sum where it is, and no worker has written it a second time. A script
that reads or sets `param.grad` of any parameter gets all of them, in memory of its own.
"""

from dataclasses import replace

import torch
from torch import Tensor

from manyhands.engine.asked_gradients import AskedGradients
from manyhands.engine.engine import Engine
from manyhands.engine.handshake import UPDATE, Handshake
from manyhands.replica.replica import Replica
from manyhands.replica.share import Made, MadePlace


class HeldGradients(AskedGradients):
    """Of one session, from `session.backward` to the update, or until the script looks."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica.parameters)
        self._replica = replica
        self.is_there = True
        """Whether no script has looked at the sum."""

    def asked(self, *, reads: bool) -> None:
        self.take()

    def take(self) -> None:
        """Copy the sum into the parameters, before it goes or when it is asked for."""
        if not self.is_there:
            return
        self.hide()
        self.is_there = False
        with torch.no_grad():
            for param, gradient in zip(self._replica.parameters, self._replica.gathered(), strict=True):
                if gradient is not None:  # a pass of the script that is under way may have begun the next one
                    param.grad = gradient if param.grad is None else param.grad.add_(gradient)


def can_hold(engine: Engine) -> bool:
    """Whether a sum that the workers make lies in memory that all of them see."""
    return engine.replica.gathers and engine.generation.one_host and engine.generation.is_whole


def is_looked_at(engine: Engine) -> bool:
    """Whether the script may have changed the gradient that waits for an update."""
    held: HeldGradients | None = engine.pending.held if engine.pending is not None else None
    return held is None or not held.is_there


def of_update(engine: Engine, made: Made | None, handshake: Handshake) -> Made | None:
    """What this worker brings to an update by a gradient that all workers have, where the step is one."""
    answers = handshake.wait()
    updating = answers.who(UPDATE)
    if not updating:
        return made
    held: HeldGradients | None = engine.pending.held if engine.pending is not None else None
    is_common = can_hold(engine)
    if is_common and not answers.looked:
        if made is not None and held is not None:
            held.hide()
        made = made or Made(gradients={}, loss=None, is_weighted=True)
        return replace(made, place=MadePlace.HOST)
    if made is None:
        return None
    if held is not None:  # another worker's script has looked, or is not there any more
        held.take()
        made = replace(made, gradients=found(engine))
    if is_common and len(updating) == engine.world.size:
        return replace(made, place=MadePlace.WORKERS)
    return made.share_of(engine.world.rank, updating)


def found(engine: Engine) -> dict[int, Tensor]:
    """By the parameter's id, the gradients that are in the parameters."""
    return {id(param): param.grad for param in engine.replica.parameters if param.grad is not None}
