"""How often which class was taken for which, counted over all samples by all workers together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands import telemetry
from manyhands.cluster.worker.world import World
from manyhands.engine.plain_values import decode, encode
from manyhands.errors import UsageError
from manyhands.placement.pipeline.distant import Distant

MOST_IN_MATRIX = 256
"""Classes; with more of them only how often each was right, was there and was predicted is counted."""
TOP = 5


@dataclass(frozen=True)
class PerClass:
    """A measure that counts by class; it gives `accuracy`, and `top5` where there are more classes than that."""

    names: tuple[str, ...] = ()


def per_class(names: Sequence[str] = ()) -> PerClass:
    """A measure for `session.evaluate`: accuracy, top-5 accuracy, the confusion matrix, and by class precision, recall
    and F1, for batches of (inputs, targets) and models that give one score per class; `names` are those of the classes.

    The results have `accuracy` (and `top5`), whatever the measure is called; the rest is in the run's records and in
    its summary.
    """
    return PerClass(tuple(map(str, names)))


@dataclass(frozen=True)
class ClassReport:
    """Counts by class over a data set, and what follows from them."""

    names: tuple[str, ...]
    top: int
    right: tuple[int, ...]
    truth: tuple[int, ...]
    predicted: tuple[int, ...]
    confusion: tuple[tuple[int, ...], ...]
    """A row for each true class, with how often each class was predicted; empty where there are too many."""

    def measures(self) -> dict[str, float]:
        samples = max(sum(self.truth), 1)
        found = {"accuracy": sum(self.right) / samples}
        return {**found, "top5": self.top / samples} if len(self.names) > TOP else found

    def by_class(self) -> list[dict[str, Any]]:
        """Precision, recall and F1 of each class; 0 where it was never predicted, or not there."""
        counts = zip(self.names, self.right, self.truth, self.predicted, strict=True)
        return [
            {
                "name": name,
                "samples": truth,
                "precision": _of(right, predicted),
                "recall": _of(right, truth),
                "f1": _of(2 * right, truth + predicted),
            }
            for name, right, truth, predicted in counts
        ]

    def record(self, step: int, epoch: int) -> None:
        """A "classes" line for those who look on."""
        confusion = {"confusion": self.confusion} if self.confusion else {}
        telemetry.event(
            "classes", step=step, epoch=epoch, **self.measures(), per_class=self.by_class(), **confusion
        )


def _of(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 0.0


class ClassTally:
    """What one such measure has counted on this worker."""

    def __init__(self, measure: PerClass) -> None:
        self._measure = measure
        self._new: list[Tensor] = []
        self._counts: Tensor | None = None
        self._classes = 0

    def take(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        outputs = model(inputs)
        # Before the last stage of a pipeline there are no scores yet.
        if isinstance(outputs, Tensor) and not isinstance(outputs, Distant) and isinstance(targets, Tensor):
            self._new.append(_counted(outputs.detach(), targets))
            self._classes = outputs.shape[1]
        return torch.zeros(())

    def note(self, *, is_own: bool) -> None:
        """Whether the samples of the batch are this worker's, and count."""
        for counts in self._new if is_own else ():
            self._counts = counts if self._counts is None else self._counts + counts
        self._new = []

    def report(self, world: World, feed: int) -> ClassReport:
        """Over all workers; those that have the same `feed` have counted the same."""
        mine = None if self._counts is None else [feed, self._classes, self._counts]
        rows = [row for row in map(decode, world.gather(encode(mine))) if row is not None]
        if not rows:
            raise UsageError("mh.per_class() has counted nothing: the model gives no scores on any worker")
        told = {of: counts for of, _, counts in rows}
        return self._sorted_out(int(rows[0][1]), torch.stack(list(told.values())).sum(0))

    def _sorted_out(self, classes: int, counts: Tensor) -> ClassReport:
        right, truth, predicted, rest = counts[1:].split([classes] * 3 + [len(counts) - 1 - 3 * classes])
        given = self._measure.names
        if given and len(given) != classes:
            raise UsageError(f"mh.per_class got {len(given)} names, and the model has {classes} classes")
        matrix = rest.view(-1, classes).tolist() if len(rest) else []
        return ClassReport(
            names=given or tuple(map(str, range(classes))),
            top=int(counts[0]),
            right=tuple(right.tolist()),
            truth=tuple(truth.tolist()),
            predicted=tuple(predicted.tolist()),
            confusion=tuple(map(tuple, matrix)),
        )


def _counted(outputs: Tensor, targets: Tensor) -> Tensor:
    """In one vector: right among the first five; by class right, there, predicted; then the matrix."""
    if outputs.dim() != 2 or len(outputs) != len(targets):
        raise UsageError(
            f"mh.per_class() is for one score per sample and class, and the model gives {tuple(outputs.shape)} for "
            f"targets {tuple(targets.shape)}"
        )
    classes = outputs.shape[1]
    truth = (targets.argmax(1) if targets.dim() == 2 else targets).long().cpu()
    scores = outputs.float().cpu()
    best = scores.topk(min(TOP, classes)).indices
    predicted = best[:, 0]
    if len(truth) and not 0 <= int(truth.min()) <= int(truth.max()) < classes:
        raise UsageError(
            f"targets go from {int(truth.min())} to {int(truth.max())}, and the model has {classes} classes"
        )
    in_top = (best == truth[:, None]).any(1).sum()
    right = truth[predicted == truth]
    parts = [in_top.view(1), *(torch.bincount(each, minlength=classes) for each in (right, truth, predicted))]
    if classes <= MOST_IN_MATRIX:
        parts.append(torch.bincount(truth * classes + predicted, minlength=classes * classes))
    return torch.cat(parts)
