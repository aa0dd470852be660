"""What autograd calls when a parameter's gradient is complete, and the sum when a span is."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from manyhands.replica.layout import Span

OnReady = Callable[[Span], None]


def for_none(span: Span) -> None:
    """In place of `on_ready`: all of the sum is to be there, and no span leaves."""


class GradientHooks:
    """One on each trained parameter; those that are thawed later get theirs later."""

    def __init__(self, params: Sequence[nn.Parameter], call: Callable[[int, nn.Parameter], None]) -> None:
        self._params = params
        self._call = call
        self._handles: dict[int, Any] = {}
        self.are_missing = bool(params)

    def add(self) -> None:
        for index, param in enumerate(self._params):
            if param.requires_grad and index not in self._handles:
                self._handles[index] = param.register_post_accumulate_grad_hook(partial(self._call, index))
        self.are_missing = len(self._handles) < len(self._params)

    def remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self.are_missing = bool(self._params)
