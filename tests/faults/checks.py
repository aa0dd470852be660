"""What holds after every run, whatever was lost in it."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.faults import harness, training

EPOCHS = 2
WHOLE = {"once": EPOCHS * training.LENGTH, "twice": 0, "never": 0}


def nothing_lost(ran: harness.Logs, fired: Sequence[Any], faults: Sequence[Any]) -> None:
    assert sorted(fired, key=str) == sorted(faults, key=str), "the faults fired"
    for number, end in ran.ends.items():
        assert end["pid"] == ran.logs[number][0]["pid"], "it kept its process"
        assert len([row for row in ran.logs[number] if row["kind"] == "start"]) == 1
        assert end["tally"] == WHOLE, "every sample exactly once in each epoch"
        assert end["samples"] == WHOLE["once"]
    first = ran.parameters(min(ran.ends))
    assert all(torch.equal(first, ran.parameters(number)) for number in ran.ends), "the same bits everywhere"


def one_history(
    ran: harness.Logs, optimizer: str, *, lr: float = training.LR, clip_norm: float | None = None
) -> None:
    """One process that has made the same steps has the same parameters."""
    together = harness.alone(ran.committed(), optimizer=optimizer, lr=lr, clip_norm=clip_norm)
    torch.testing.assert_close(ran.parameters(min(ran.ends)), together, rtol=1e-6, atol=1e-6)
