"""`mh.fit(model, data)`: training in one call, with a history, as Keras users know it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from manyhands.engine.evaluate import Measure
from manyhands.engine.session import Session, session

Callback = Callable[[Session, Mapping[str, float]], Any]


@dataclass
class History:
    """What training came to, epoch by epoch."""

    history: dict[str, list[float]] = field(default_factory=dict)
    """By name, one number per epoch: `loss`, and with `validation` also `val_loss` and `val_` each measure."""
    session: Session | None = None
    """The session that trained; it is closed."""

    def add(self, numbers: Mapping[str, float]) -> None:
        """Append the numbers of an epoch."""
        for name, value in numbers.items():
            self.history.setdefault(name, []).append(value)


def fit(
    model: nn.Module,
    data: Any,
    *,
    epochs: int = 1,
    batch_size: int | None = 32,
    optimizer: Optimizer | None = None,
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy,
    validation: Any = None,
    measures: Mapping[str, Measure] | None = None,
    callbacks: Sequence[Callback] = (),
    verbose: bool = True,
    **settings: Any,
) -> History:
    """Train a model on pairs of inputs and targets; returns its history.

    `data` is a data set with `batch_size` samples per worker and step, or a `DataLoader`. `loss(outputs, targets)` is
    the mean over the batch. Without an `optimizer` it is Adam. After each epoch all workers evaluate the model on the
    `validation` data, and each of the `callbacks` gets the session and the epoch's numbers; one that returns True ends
    the training. `settings` are those of `mh.session`.
    """

    def pair_loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        return loss(model(inputs), targets)

    made = session(model, optimizer or Adam(model.parameters()), pair_loss, **settings)
    found = History(session=made)
    size = batch_size if hasattr(data, "__getitem__") else None  # a loader has its own
    while made.epoch < epochs:
        numbers = _epoch(made, data, size)
        if validation is not None:
            result = made.evaluate(validation, measures=measures)
            numbers |= {f"val_{name}": value for name, value in result.items()}
        found.add(numbers)
        if verbose and made.is_main:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())
            print(f"epoch {made.epoch}/{epochs}  {shown}", flush=True)
        ends = [callback(made, numbers) for callback in callbacks]
        if any(ends):
            break
    made.close()
    return found


def _epoch(made: Session, data: Any, batch_size: int | None) -> dict[str, float]:
    """Train for an epoch; the loss is the mean over the samples of all workers."""
    total, samples = 0.0, 0
    batches = made.batches(data) if batch_size is None else made.batches(data, batch_size=batch_size)
    for batch in batches:
        value, count = made.step(batch), len(batch[1])
        if count:
            total += float(value) * count
            samples += count
    return {"loss": float(made.mean(total / max(samples, 1), samples=samples))}
