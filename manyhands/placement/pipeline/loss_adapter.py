"""What the user's loss is given in place of the model, whose stages are on several workers.

The first stage needs only the inputs with which the loss calls the model, the last stage only what the model returns.
"""

from typing import Any

from torch import Tensor, nn

from manyhands.errors import UsageError
from manyhands.replica.part import Loss


class _Called(BaseException):
    """Leaves the loss as soon as it has called the model."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args_given, self.kwargs_given = args, kwargs


class _Ear(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Called(args, kwargs)


class _Answer(nn.Module):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result
        self._asked = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._asked:
            raise UsageError("the loss calls the model twice; in a pipeline it may call it once")
        self._asked = True
        return self._result


def called_with(loss: Loss, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs with which the loss calls the model."""
    try:
        loss(_Ear(), batch)
    except _Called as call:
        return call.args_given, call.kwargs_given
    raise UsageError("the loss does not call the model it is given; in a pipeline it must, once")


def answered(loss: Loss, batch: Any, result: Any) -> Tensor:
    """The loss of a batch for which the model returns `result`."""
    return loss(_Answer(result), batch)
