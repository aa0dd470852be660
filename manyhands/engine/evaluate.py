"""Measures of a model over a data set, computed by all workers together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.cluster.worker.world import World
from manyhands.data.loading import gather
from manyhands.data.structure import moved
from manyhands.engine import sample_count
from manyhands.engine.class_counts import ClassTally, PerClass
from manyhands.engine.engine import Engine
from manyhands.engine.plain_values import decode, encode
from manyhands.errors import UsageError
from manyhands.replica.returned import number_in

Parts = Callable[[nn.Module, Any], Sequence[Tensor]]


@dataclass(frozen=True)
class OverAll:
    """A measure that is no mean over samples: it needs what the model gives for all of them together."""

    function: Callable[..., Any]
    parts: Parts


Measure = Callable[[nn.Module, Any], Any] | OverAll | PerClass
"""`measure(model, batch)`: returns the mean over the batch, as `accuracy` does; or what `over_all` or `per_class` has
made."""


def over_all(function: Callable[..., Any], parts: Parts | None = None) -> OverAll:
    """A measure over all samples at once, such as F1 or AUC: `function(outputs, targets)` gets those of the whole data
    set, in its order, on every worker.

    `parts(model, batch)` gives the tensors of a batch, with a row for each sample; without it batches are
    `(inputs, targets)`, and the tensors are the model's outputs and the targets.
    """
    return OverAll(function, parts or _outputs_and_targets)


def _outputs_and_targets(model: nn.Module, batch: Any) -> Sequence[Tensor]:
    inputs, targets = batch
    return model(inputs), targets


class _SampleRows:
    """What one measure over all samples has got on this worker."""

    def __init__(self, measure: OverAll) -> None:
        self._measure = measure
        self._kept: list[list[Tensor]] = []
        self._indices: list[Tensor] = []

    def take(self, model: nn.Module, batch: Any) -> Tensor:
        parts = [part.detach().cpu() for part in self._measure.parts(model, batch)]
        if all(type(part) is Tensor for part in parts):  # else a stage sees what the last one will need
            self._kept.append(parts)
        return torch.zeros(())

    def note(self, indices: Tensor | None, before: int) -> None:
        """Which samples the batch has had since there were `before` parts; None: they are not this worker's."""
        if indices is None:
            del self._kept[before:]
        elif rows := sum(len(parts[0]) for parts in self._kept[before:]):
            if rows != len(indices):
                raise UsageError(
                    f"a measure over all samples got {rows} rows for {len(indices)} samples; give one row per sample"
                )
            self._indices.append(indices)

    def __len__(self) -> int:
        return len(self._kept)

    def result(self, world: World) -> float:
        """The measure over the rows of all workers; those of workers that compute the same count once."""
        own = [torch.cat(column) for column in zip(*self._kept, strict=True)]
        mine = [torch.cat(self._indices), *own] if self._indices else None
        rows = [row for row in map(decode, world.gather(encode(mine))) if row is not None]
        indices, *columns = (torch.cat(column) for column in zip(*rows, strict=True))
        _, order = np.unique(indices.numpy(), return_index=True)
        first = torch.from_numpy(order)
        return number_in(self._measure.function(*(column[first] for column in columns)))


def measure(
    engine: Engine, data: Any, measures: Mapping[str, Measure], *, batch_size: int
) -> dict[str, float]:
    """Every measure over all samples, by its mean where it is one of batches; the same on each worker."""
    if not len(data):
        raise UsageError("evaluate was given a data set without samples")
    placed, part, epoch = engine.placed, engine.replica.part, engine.progress.epoch
    mesh = placed.mesh
    indices = torch.arange(len(data))[placed.feed :: mesh.feeds]
    parts = [part for part in indices.split(batch_size) if len(part)]
    # Workers that need each other's parameters evaluate equally many batches.
    rounds = -(-len(data) // (batch_size * mesh.feeds)) if mesh.shards > 1 else len(parts)
    device = engine.replica.params.device
    rows_of = {name: _SampleRows(one) for name, one in measures.items() if isinstance(one, OverAll)}
    tallies = {name: ClassTally(one) for name, one in measures.items() if isinstance(one, PerClass)}
    calls = {name: _call_of(one, name, rows_of, tallies) for name, one in measures.items()}
    sums = dict.fromkeys(measures, 0.0)
    count = 0
    for number in range(rounds):
        is_own = number < len(parts)
        batch = gather(data, parts[number] if is_own else torch.tensor([0]), epoch)
        samples = sample_count.count(engine, batch, len(parts[number]) if is_own else 1)
        if device.type != "cpu":
            batch = moved(batch, device)
        weight = samples if is_own and placed.counts else 0
        count += weight
        before = {name: len(kept) for name, kept in rows_of.items()}
        for name, one in calls.items():
            sums[name] += part.evaluate(one, batch, samples) * weight
        for name, kept in rows_of.items():
            kept.note(parts[number] if is_own else None, before[name])
        for tally in tallies.values():
            tally.note(is_own=is_own)
    rows = engine.world.exchange([float(count), *sums.values()])
    total = sum(row[0] for row in rows)
    means = {name: sum(row[1 + i] for row in rows) / total for i, name in enumerate(measures)}
    found = means | {name: kept.result(engine.world) for name, kept in rows_of.items()}
    return _with_classes(engine, found, tallies)


def _call_of(
    one: Measure, name: str, rows_of: Mapping[str, _SampleRows], tallies: Mapping[str, ClassTally]
) -> Callable[[nn.Module, Any], Any]:
    if isinstance(one, OverAll):
        return rows_of[name].take
    return tallies[name].take if isinstance(one, PerClass) else one


def _with_classes(
    engine: Engine, found: dict[str, float], tallies: Mapping[str, ClassTally]
) -> dict[str, float]:
    """With what was counted by class, which is recorded once and stays for the summary."""
    for name, tally in tallies.items():
        engine.class_report = tally.report(engine.world, engine.placed.feed)
        del found[name]
        found |= engine.class_report.measures()
        if engine.world.rank == 0:
            engine.class_report.record(engine.progress.steps, engine.progress.epoch)
    return found


def accuracy(model: nn.Module, batch: Any) -> Tensor:
    """The fraction of right answers, for batches of (inputs, targets) and models that give one score per class."""
    inputs, targets = batch
    right: Tensor = (model(inputs).argmax(-1) == targets).float().mean()
    return right
