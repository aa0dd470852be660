"""The model outside of a step: copies of it, the whole of it for a while, and calls of a model that lies in parts."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from manyhands.engine import handshake as handshakes
from manyhands.engine.alike import check_alike, digest
from manyhands.engine.engine import Engine
from manyhands.engine.first_batch import require
from manyhands.engine.handshake import LEAVE_WHOLE, USE, WHOLE
from manyhands.engine.pause import pause
from manyhands.engine.step import together
from manyhands.errors import UsageError

Call = Callable[[Callable[[], Any], Callable[[], Any]], Any]
"""What every script calls equally often, and what a worker does instead that has joined since."""


def watch(engine: Engine) -> None:
    """Where a script calls a model in parts outside of a step, all workers do so together, or all hear of it."""

    def on_use(inputs: Any) -> None:
        def attempt() -> None:
            handshakes.begin(engine, USE).wait()
            check_alike(engine, inputs, "give the model the same inputs on both, or call session.evaluate")

        together(engine, attempt)

    engine.placed.on_use = on_use


def model_state(engine: Engine, call: Call, *, main_only: bool) -> dict[str, Tensor]:
    require(engine, "session.model_state")

    def attempt() -> dict[str, Tensor]:
        pause(engine, WHOLE)
        state = engine.placed.model(engine.replica, everywhere=not main_only)
        return {} if main_only and engine.world.rank else state

    found: dict[str, Tensor] = call(attempt, dict)
    return found


@contextmanager
def whole_model(engine: Engine, call: Call) -> Iterator[nn.Module]:
    require(engine, "session.whole_model")
    model, placed = engine.training.model, engine.placed
    values: dict[str, Tensor] = {}

    def attempt() -> bool:
        pause(engine, WHOLE)
        values.clear()
        values.update({} if placed.is_whole else placed.model(engine.replica, everywhere=True))
        return True

    if not call(attempt, lambda: False):
        yield model  # of a moment before this worker joined
        return
    names = [name for name, _ in model.named_parameters()] if values else []
    before = digest(values[name] for name in names)
    with placed.opened(values):
        yield model
    after = digest(values[name] for name in names)
    together(engine, lambda: _leave(engine, values, after if after != before else 0))


def _leave(engine: Engine, values: Mapping[str, Tensor], changed: int) -> None:
    """All workers go on together, with what all have changed alike."""
    handshakes.begin(engine, LEAVE_WHOLE).wait()
    digests = [row[0] for row in engine.world.exchange([float(changed)])]
    if not any(digests):
        return
    if len(set(digests)) > 1:
        raise UsageError(
            "workers changed the parameters inside of session.whole_model(), and not all in the same way; "
            "make the same change on every worker"
        )
    if engine.served:
        raise UsageError(
            "parameters were changed inside of session.whole_model(), but servers have them; "
            "change them before mh.session"
        )
    engine.placed.keep(values)
    engine.keep_copies()
    engine.world.host.barrier()
