"""A placement that is chosen by what a batch shows: the session enters its run with the first batch that it gets.

Until then the model is whole on every worker. A checkpoint that a script resumes waits as well.
"""

from collections.abc import Sequence
from typing import Any

import torch

from manyhands.data.loading import gather
from manyhands.data.structure import samples_in
from manyhands.engine import habits, resume
from manyhands.engine.engine import Engine
from manyhands.engine.rejoin import draw_own_numbers, enter_first
from manyhands.engine.step import survive
from manyhands.errors import UsageError


def begin(engine: Engine) -> None:
    """Enter now, unless the model is to be divided by a batch that no worker has seen yet."""
    new = engine.member.new_generation if engine.member else None
    has_begun = new is not None and bool(new.state_holders)  # then other workers say how it is divided
    if has_begun or not engine.placed.awaits_batch:
        survive(engine, lambda: enter_first(engine))
    else:
        draw_own_numbers(engine, engine.world)


def meet(engine: Engine, batches: Sequence[Any]) -> None:
    """These batches are the first that the script gives to a step."""
    if engine.has_entered or engine.is_closed:
        return
    engine.feeds.admit(batches)
    engine.placed.example = next((batch for batch in batches if samples_in(batch)), None)
    survive(engine, lambda: enter_first(engine))
    engine.placed.example = None
    resume.load_awaited(engine)
    engine.script.settle()
    habits.look(engine)


def meet_data(engine: Engine, data: Any, batch_size: int) -> None:
    """The script evaluates before its first step."""
    if not engine.has_entered and len(data):
        meet(engine, [gather(data, torch.arange(min(batch_size, len(data))), 0)])


def require(engine: Engine, what: str) -> None:
    """Refuse what needs the model in parts."""
    if not engine.has_entered and not engine.is_closed:
        raise UsageError(
            f"{what} before the first step: the model is divided by what the first batch shows; make a step first, or "
            "give the session a batch, mh.session(…, example=batch)"
        )
