"""Gradients of weights that wait: the backward pass computes only what the stage before is waiting for.

Linear layers and convolutions, which do nearly all of the work, keep their input and the gradient of their output; the
gradient of the weight is computed from them when the worker has nothing more urgent to do. Other layers do both at
once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from manyhands.errors import UsageError

Key = tuple[int, int]  # chunk and microbatch
Later = Callable[[], None]


class Deferred:
    """What is still to be computed, by chunk and microbatch."""

    def __init__(self) -> None:
        self._todo: defaultdict[Key, list[Later]] = defaultdict(list)

    @contextmanager
    def collecting(self, key: Key) -> Iterator[None]:
        """While a forward pass runs whose gradients of weights are to wait."""
        with _GradientMode(self._todo[key]):
            yield

    def finish(self, key: Key) -> None:
        """Add the gradients that waited to those of their parameters."""
        with torch.no_grad():
            for compute in self._todo.pop(key, []):
                compute()


class _GradientMode(TorchFunctionMode):
    """Sends linear layers and convolutions another way."""

    def __init__(self, todo: list[Later]) -> None:
        super().__init__()
        self._todo = todo

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and _waits(*args[1:3], *kwargs.values()):
            weight, bias = args[1], args[2] if len(args) > 2 else kwargs.get("bias")
            return _Layer.apply(args[0], weight, bias, self._todo, _linear, ())  # type: ignore[no-untyped-call]
        if (
            func is F.conv2d
            and not kwargs
            and len(args) == 7
            and args[0].dim() == 4
            and _waits(*args[1:3])
            and isinstance(args[4], tuple)
        ):
            inputs, weight, bias, *settings = args
            return _Layer.apply(inputs, weight, bias, self._todo, _convolution, tuple(settings))  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


def _waits(weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether autograd would do no more with the gradients than add them up, as they are."""
    if not _is_plain(weight) or not weight.requires_grad or torch.is_autocast_enabled(weight.device.type):
        return False
    return bias is None or not bias.requires_grad or _is_plain(bias)


def _is_plain(param: Tensor) -> bool:
    if not isinstance(param, torch.nn.Parameter) or param._backward_hooks:
        return False
    return not getattr(param, "_post_accumulate_grad_hooks", None)


class _Layer(torch.autograd.Function):
    """A layer whose backward pass gives the gradient of its input, and leaves the rest for later."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        todo: list[Later],
        kind: Any,
        settings: Any,
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight, ctx.bias, ctx.todo, ctx.kind, ctx.settings = weight, bias, todo, kind, settings
        result: Tensor = kind.forward(inputs, weight, bias, settings)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise UsageError(
                "schedule=zero-bubble divides the backward pass, which cannot give gradients of gradients; "
                "use schedule=1f1b or gpipe"
            )
        (inputs,) = ctx.saved_tensors
        gradient, kind, weight, bias, settings = gradients[0], ctx.kind, ctx.weight, ctx.bias, ctx.settings

        def later() -> None:
            _add(weight, kind.of_weight(inputs, weight, gradient, settings))
            if bias is not None and bias.requires_grad:
                _add(bias, kind.of_bias(gradient))

        ctx.todo.append(later)
        of_input = kind.of_input(inputs, weight, gradient, settings) if ctx.needs_input_grad[0] else None
        return of_input, None, None, None, None, None


class _linear:
    @staticmethod
    def forward(inputs: Tensor, weight: Tensor, bias: Tensor | None, settings: Any) -> Tensor:
        return F.linear(inputs, weight, bias)

    @staticmethod
    def of_input(inputs: Tensor, weight: Tensor, gradient: Tensor, settings: Any) -> Tensor:
        return gradient @ weight

    @staticmethod
    def of_weight(inputs: Tensor, weight: Tensor, gradient: Tensor, settings: Any) -> Tensor:
        return _rows(gradient).t() @ _rows(inputs)

    @staticmethod
    def of_bias(gradient: Tensor) -> Tensor:
        return _rows(gradient).sum(0)


def _rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1])


class _convolution:
    @staticmethod
    def forward(inputs: Tensor, weight: Tensor, bias: Tensor | None, settings: Any) -> Tensor:
        return F.conv2d(inputs, weight, bias, *settings)

    @staticmethod
    def _gradients(
        inputs: Tensor, weight: Tensor, gradient: Tensor, settings: Any, wanted: list[bool]
    ) -> Any:
        stride, padding, dilation, groups = settings
        return torch.ops.aten.convolution_backward(
            gradient, inputs, weight, None, stride, padding, dilation, False, (0, 0), groups, wanted
        )

    @staticmethod
    def of_input(inputs: Tensor, weight: Tensor, gradient: Tensor, settings: Any) -> Tensor:
        found: Tensor = _convolution._gradients(inputs, weight, gradient, settings, [True, False, False])[0]
        return found

    @staticmethod
    def of_weight(inputs: Tensor, weight: Tensor, gradient: Tensor, settings: Any) -> Tensor:
        found: Tensor = _convolution._gradients(inputs, weight, gradient, settings, [False, True, False])[1]
        return found

    @staticmethod
    def of_bias(gradient: Tensor) -> Tensor:
        return gradient.sum((0, 2, 3))


def _add(param: Tensor, gradient: Tensor) -> None:
    if param.grad is None:
        param.grad = gradient
    else:
        param.grad.add_(gradient)
