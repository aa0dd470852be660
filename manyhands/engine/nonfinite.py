"""Steps that are left out because their gradient is not finite: on all workers that update by it, alike."""

import math

from manyhands.engine.engine import Engine
from manyhands.errors import Diverged


def can_leave_out(engine: Engine, loss: float) -> bool:
    """Whether a step whose gradient is not finite is one of those that the script allows; where the loss looks good,
    it is judged by its gradient, too."""
    return engine.settings.skip_nonfinite > 0 or math.isfinite(loss)


def leave_out(engine: Engine) -> None:
    """The gradient was not finite, so no parameter has changed; running statistics are as before the step."""
    progress, most = engine.progress, engine.settings.skip_nonfinite
    progress.skipped += 1
    if progress.skipped > most:
        raise Diverged(
            f"step {progress.steps} has a gradient that is not finite, after {most} others that were left out "
            f"(skip_nonfinite={most}): look for a learning rate that is too high, or for such numbers in the data"
        )
    for buffer, before in zip(engine.replica.part.buffers(), engine.buffers_before, strict=True):
        buffer.copy_(before)
    if engine.replica.errors is not None:
        engine.replica.errors.leave_out(engine.replica.owned, progress.steps_here - 1)
    engine.keep_copies()
    engine.warn(
        f"this step was left out, because its gradient is not finite ({progress.skipped} of at most {most})"
    )


def keep_buffers(engine: Engine) -> None:
    """Before a forward pass of a step that may be left out."""
    if engine.settings.skip_nonfinite:
        engine.buffers_before = [buffer.clone() for buffer in engine.replica.part.buffers()]
