"""What holds after every run, whatever was lost in it."""

from collections.abc import Sequence
from typing import Any

import torch

from manyhands import strategies
from tests.faults import harness, registered, training

EPOCHS = 2
EVERY = torch.arange(training.LENGTH)
LEARNED = 0.5  # of the first loss; runs were measured at 0.03 to 0.12


def nothing_lost(
    ran: harness.Logs, fired: Sequence[Any], faults: Sequence[Any], *, epochs: int = EPOCHS
) -> None:
    whole = {"once": epochs * training.LENGTH, "twice": 0, "never": 0}
    assert sorted(fired, key=str) == sorted(faults, key=str), "the faults fired"
    for number, end in ran.ends.items():
        assert end["pid"] == ran.logs[number][0]["pid"], "it kept its process"
        assert len([row for row in ran.logs[number] if row["kind"] == "start"]) == 1
        assert end["tally"] == whole, "every sample exactly once in each epoch"
        assert end["samples"] == whole["once"]
        rounds = -(-training.LENGTH // (training.BATCH * end["first_workers"]))
        assert end["scheduled"] == epochs * rounds, "schedules end where they do without faults"
        assert end["steps"] == ran.ends[min(ran.ends)]["steps"], "all count the same steps"
    first = ran.parameters(min(ran.ends))
    assert all(torch.equal(first, ran.parameters(number)) for number in ran.ends), "the same bits everywhere"


def one_history(
    ran: harness.Logs,
    optimizer: str,
    *,
    lr: float = training.LR,
    clip_norm: float | None = None,
    norms: bool = False,
) -> None:
    """One process that has made the same steps has the same parameters."""
    together = harness.alone(ran.committed(), optimizer=optimizer, lr=lr, clip_norm=clip_norm, norms=norms)
    torch.testing.assert_close(ran.parameters(min(ran.ends)), together, rtol=1e-6, atol=1e-6)


def one_history_under(strategy: str, ran: harness.Logs, optimizer: str, *, lr: float) -> None:
    """A run of one replica has the parameters of one process that has made the same steps under the same strategy."""
    one = min(ran.ends)
    pauses = {row["steps"] for row in ran.logs[one] if row["kind"] == "evaluated"}
    together = harness.alone_under(strategy, ran.committed(), pauses, optimizer=optimizer, lr=lr)
    torch.testing.assert_close(ran.parameters(one), together, rtol=1e-6, atol=1e-6)


def deferred_history(ran: harness.Logs, optimizer: str, *, lr: float, layer: str, every: int) -> None:
    """The same where of one layer the mean of so many gradients is applied at once."""
    one = min(ran.ends)
    pauses = {row["steps"] for row in ran.logs[one] if row["kind"] == "evaluated"}
    together = harness.alone_and_deferred(
        ran.committed(), pauses, optimizer=optimizer, lr=lr, layer=layer, every=every
    )
    torch.testing.assert_close(ran.parameters(one), together, rtol=1e-6, atol=1e-6)


def learned(strategy: str, ran: harness.Logs, optimizer: str, *, lr: float, epochs: int = EPOCHS) -> None:
    """Where workers take every step together, one process that has made the same steps has the same parameters.

    Elsewhere the parameters depend on when a death is noticed; but the survivors have learned.
    """
    traits = strategies.parse(strategy).traits
    if strategy == registered.DEFERRED:
        deferred_history(ran, optimizer, lr=lr, layer="2", every=3)
    elif traits.synchronous and traits.repeatable:
        one_history(ran, optimizer, lr=lr)
    else:
        has_learned(ran, epochs=epochs)


def has_learned(ran: harness.Logs, *, epochs: int = EPOCHS) -> None:
    """The loss over all samples ends far below that of a net that has learned nothing."""
    start = training.loss(training.net(), training.Numbered(training.LENGTH).batch(EVERY, 0)).item()
    losses = [row["loss"] for row in ran.logs[min(ran.ends)] if row["kind"] == "evaluated"]
    assert len(losses) == epochs
    assert losses[-1] < LEARNED * start
