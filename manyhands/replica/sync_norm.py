"""Batch norm over the samples of all workers that make a step together (`torch.nn.SyncBatchNorm`).

With worker i's n_i numbers of a channel, their mean m_i and their squared distance s_i from it, all workers take

    n = Σ n_i      m = Σ n_i m_i / n      s = Σ s_i + Σ n_i (m_i - m)²      (Chan, Golub and LeVeque 1983)

and the variance s/n. For the gradient they add up the two sums over samples that it needs, as one process does.
PyTorch's own layer needs GPUs and a process group; without these it is BatchNorm, and so it is again when its session
is closed, and so are its copies.
"""

import copyreg
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

FORWARD, BACKWARD = range(2)
_COMPILER = "torch._dynamo"


class Meeting(Protocol):
    """How workers come together in the middle of a pass."""

    @property
    def is_on(self) -> bool:
        """Whether there are other workers."""

    @property
    def alone(self) -> bool:
        """Whether this worker alone computes the pass that is under way."""

    def admit(self, name: str) -> bool:
        """Whether a layer that is called is part of a pass; elsewhere a gradient is refused."""

    def swap(self, layer: int, direction: int, row: Tensor) -> Tensor:
        """The rows of all workers that compute this pass."""


class SyncedLayer(nn.SyncBatchNorm):
    """What stands for the class of a layer while its session is open; the layer itself has nothing more than before."""

    among: ClassVar[Meeting]
    number: ClassVar[int]
    name: ClassVar[str]
    before: ClassVar[type[nn.SyncBatchNorm]]
    """The layer's own class."""

    def forward(self, input: Tensor) -> Tensor:
        among = self.among
        if not self.training or not among.is_on or not among.admit(self.name) or among.alone:
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        outputs: Tensor = _Normalise.apply(input, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return outputs

    def track(self, count: float, mean: Tensor, var: Tensor) -> None:
        """Running statistics, as BatchNorm keeps them."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        unbiased = var * (count / (count - 1.0))
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.mul_(1.0 - (factor or 0.0)).add_(value.to(running), alpha=factor or 0.0)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is of the layer's own class."""
        state = super().__reduce_ex__(protocol)[2:]
        return copyreg._reconstructor, (self.before, object, None), *state  # type: ignore[attr-defined]


def put_in(layer: nn.SyncBatchNorm, among: Meeting, number: int, name: str) -> None:
    """From here on the layer goes by the samples of all workers."""
    kind = type(layer)
    facts = {"among": among, "number": number, "name": name, "before": kind, "__module__": kind.__module__}
    if _COMPILER in sys.modules:  # what is compiled around the layer calls it as it is
        facts["forward"] = torch.compiler.disable(SyncedLayer.forward)
    layer.__class__ = type(kind.__name__, (SyncedLayer, kind), facts)


def take_out(layer: nn.SyncBatchNorm) -> None:
    """The inverse."""
    if isinstance(layer, SyncedLayer):
        layer.__class__ = layer.before  # type: ignore[assignment]


class _Normalise(torch.autograd.Function):
    """A layer's forward and backward pass, in each of which the workers meet once."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, layer: SyncedLayer
    ) -> Tensor:
        values = _wide(input)
        rows = layer.among.swap(layer.number, FORWARD, _statistics(values))
        count, mean, var = _together(rows)
        if count <= 1:
            raise ValueError(
                f"expected more than 1 value per channel when training, got {tuple(input.shape)}"
            )
        layer.track(count, mean, var)
        mean, var = mean.to(values), var.to(values)
        ctx.save_for_backward(input, weight, mean, var)
        ctx.layer, ctx.count = layer, count
        if not input.numel():
            return input.clone()
        scale, shift = (None if one is None else one.to(values.dtype) for one in (weight, bias))
        return F.batch_norm(values, mean, var, scale, shift, eps=layer.eps).to(input.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight, mean, var = ctx.saved_tensors
        layer, values = ctx.layer, _wide(input)
        of_input, of_weight, of_bias = _own_gradients(
            grad.to(values.dtype), values, weight, mean, var, layer.eps
        )
        if ctx.needs_input_grad[0]:
            row = torch.cat([of_bias, of_weight]).to("cpu", torch.float64)
            rows = layer.among.swap(layer.number, BACKWARD, row)
            sums, products = (rows.sum(0) / ctx.count).to(values).chunk(2)
            scale = torch.rsqrt(var + layer.eps)
            outer = scale if weight is None else scale * weight.to(scale.dtype)
            form = (1, -1, *[1] * (input.dim() - 2))
            of_input.sub_((outer * sums).view(form))
            of_input.addcmul_(values - mean.view(form), (outer * scale * products).view(form), value=-1.0)
        if weight is None:
            return of_input.to(input.dtype), None, None, None
        return of_input.to(input.dtype), of_weight.to(weight.dtype), of_bias.to(weight.dtype), None


def _wide(values: Tensor) -> Tensor:
    """In the precision in which one process computes statistics."""
    return values.float() if values.dtype.itemsize < 4 else values


def _statistics(values: Tensor) -> Tensor:
    """This worker's numbers of each channel: how many, their mean, and the sum of squared distances from it."""
    channels = values.shape[1]
    row = torch.zeros(1 + 2 * channels, dtype=torch.float64)
    count = values.numel() // channels
    if count:
        mean, var = torch.batch_norm_update_stats(values, None, None, 0.0)
        row[0] = count
        row[1 : 1 + channels] = mean
        row[1 + channels :] = var.to("cpu", torch.float64) * count
    return row


def _together(rows: Tensor) -> tuple[float, Tensor, Tensor]:
    """The number, mean and variance of all; in one order of workers, so they are the same bits everywhere."""
    counts = rows[:, :1]
    means, squares = rows[:, 1:].chunk(2, 1)
    count = float(counts.sum())
    mean = (counts * means).sum(0) / max(count, 1.0)
    square = squares.sum(0) + (counts * (means - mean).square()).sum(0)
    return count, mean, square / max(count, 1.0)


def _own_gradients(
    grad: Tensor, values: Tensor, weight: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Sequence[Tensor]:
    """By this worker's samples: the gradients of the input, for constant statistics, of weight and of bias."""
    if not values.numel():
        return grad.clone(), torch.zeros_like(mean), torch.zeros_like(mean)
    factor = None if weight is None else weight.to(values.dtype)
    found: Sequence[Tensor] = torch.ops.aten.native_batch_norm_backward(
        grad, values, factor, mean, var, None, None, False, eps, [True, True, True]
    )
    return found
