"""Steps that a worker makes with an optimizer of its own, without a session: no other worker hears of them.

The launcher says so, since a script in which the session was forgotten trains once in every worker, into the same
files, and would end as if all were well.
"""

import sys
from collections.abc import Callable
from typing import Any

from manyhands.cluster.launchers import host_page

_stop: Callable[[], None] | None = None


def watch() -> None:
    """Count from now on, if PyTorch has been loaded and our launcher wants to know."""
    global _stop
    page, torch_optimizer = host_page.own(), sys.modules.get("torch.optim.optimizer")
    if page is None or torch_optimizer is None or _stop is not None:
        return
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps in (1, host_page.TOLD_AT):
            page[0].note_own_steps(page[1], steps)

    _stop = torch_optimizer.register_optimizer_step_post_hook(count).remove


def end() -> None:
    """The worker makes a session: from here on optimizers are the session's business."""
    global _stop
    if _stop is not None:
        _stop()
    _stop = None
    if (page := host_page.own()) is not None:
        page[0].note_session(page[1])
