"""What the first steps show of how a script counts samples, and of its loss.

A buffer in which a model counts samples has those of its worker alone, where one process counts all. Such buffers are
equal on workers that have equally many samples, so that no comparison shows it; but they grow by the samples.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_STEPS = 2  # that are looked at
_LARGEST = 4096  # elements: counts by class, say; a memory of samples is larger and differs between workers


class CountingBuffers:
    """Those of a model that several workers have, as they were before a step."""

    def __init__(self, model: nn.Module, workers: int) -> None:
        self._model, self._workers = model, workers
        self._looks = 0
        self._before = self._values()

    def look(self, samples: int) -> str:
        """A step of so many samples of this worker is made; returns a warning, if one of them has counted these."""
        now = self._values()
        before, self._before = self._before, now
        self._looks += 1
        for name, value in now.items() if samples > 1 else ():
            if (
                name in before
                and before[name].shape == value.shape
                and _counts(value - before[name], samples)
            ):
                return (
                    f"the buffer {name!r} grew with the {samples} samples of one worker, and each of {self._workers} "
                    "workers counts its own, where one process counts all; session.samples is the number that all "
                    "workers have used, and session.gather(value) gives what each of them has counted"
                )
        return ""

    @property
    def is_over(self) -> bool:
        return self._looks == _STEPS

    def _values(self) -> dict[str, Tensor]:
        return {name: buffer.detach().clone() for name, buffer in _small(self._model)}


@dataclass
class FirstSteps:
    """What is looked at in them, each until it has shown something, or is no more expected to."""

    loss: Callable[[Any, float], None] | None = None
    counting: CountingBuffers | None = None
    lengths: set[tuple[int, int]] | None = field(default_factory=set)
    """Of the first batches, in their first two dimensions."""

    def look(self, samples: int) -> str:
        """A step of so many samples of this worker is made; returns a warning, if it shows something."""
        if self.counting is None:
            return ""
        warning = self.counting.look(samples)
        if self.counting.is_over:
            self.counting = None
        return warning


def _counts(change: Tensor, samples: int) -> bool:
    """Whether it is a number for each sample: none is by the number of passes alone."""
    if bool((change < 0).any()) or not bool((change == change.round()).all()):
        return False
    total = int(change.sum())
    return total > 0 and total % samples == 0


def _small(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those of batch norm count passes."""
    for path, module in model.named_modules():
        if isinstance(module, _NormBase):
            continue
        for name, buffer in module.named_buffers(recurse=False):
            is_plain = buffer.layout == torch.strided and not buffer.is_quantized and not buffer.is_complex()
            if is_plain and buffer.dtype != torch.bool and 0 < buffer.numel() <= _LARGEST:
                yield f"{path}.{name}".removeprefix("."), buffer
