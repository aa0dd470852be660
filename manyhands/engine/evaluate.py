"""Measures of a model over a data set, computed by all workers together."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.data.loading import gather, moved, samples_in
from manyhands.engine.engine import Engine
from manyhands.errors import UsageError

Measure = Callable[[nn.Module, Any], Tensor]


def measure(
    engine: Engine, data: Any, measures: Mapping[str, Measure], *, batch_size: int
) -> dict[str, float]:
    """The mean of every measure over all samples, the same on each worker."""
    if not len(data):
        raise UsageError("evaluate was given a data set without samples")
    placed, part, epoch = engine.placed, engine.replica.part, engine.progress.epoch
    mesh = placed.mesh
    indices = torch.arange(len(data))[placed.feed :: mesh.feeds]
    parts = [part for part in indices.split(batch_size) if len(part)]
    # Workers that need each other's parameters evaluate equally many batches.
    rounds = -(-len(data) // (batch_size * mesh.feeds)) if mesh.shards > 1 else len(parts)
    device = engine.replica.params.device
    sums = dict.fromkeys(measures, 0.0)
    count = 0
    for number in range(rounds):
        is_own = number < len(parts)
        batch = gather(data, parts[number] if is_own else torch.tensor([0]), epoch)
        samples = samples_in(batch)
        if device.type != "cpu":
            batch = moved(batch, device)
        weight = samples if is_own and placed.counts else 0
        count += weight
        for name, one in measures.items():
            sums[name] += part.evaluate(one, batch, samples) * weight
    rows = engine.world.exchange([float(count), *sums.values()])
    total = sum(row[0] for row in rows)
    return {name: sum(row[1 + i] for row in rows) / total for i, name in enumerate(measures)}


def accuracy(model: nn.Module, batch: Any) -> Tensor:
    """The fraction of right answers, for batches of (inputs, targets) and models that give one score per class."""
    inputs, targets = batch
    right: Tensor = (model(inputs).argmax(-1) == targets).float().mean()
    return right
