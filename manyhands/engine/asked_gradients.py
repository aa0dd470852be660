"""Between two calls of the session a script may ask a parameter for its gradient: then that is noticed.

PyTorch does not tell that `param.grad` is read. So until the session's next call, or until a script asks, the
parameters have another class, in which `grad` tells the session first.
"""

import copy
import functools
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn


class AskedGradients:
    """Parameters that are watched; one of several that watch the same ones, the last."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        for param in params:
            if before := _watching.get(id(param)):
                before.hide()
        self._params = params
        self._classes = [type(param) for param in params]
        for param, kind in zip(params, self._classes, strict=True):
            _watching[id(param)] = self
            param.__class__ = _asking(kind)
        self._asks = True

    def asked(self, *, reads: bool) -> None:
        """A script reads a gradient, or does something else for which the parameters must be like any others."""
        self.hide()

    def hide(self) -> None:
        """The parameters are like any others again."""
        if self._asks:
            self._asks = False
            for param, kind in zip(self._params, self._classes, strict=True):
                param.__class__ = kind
                del _watching[id(param)]


# By the parameter's id, which is its own as long as the parameter is there.
_watching: weakref.WeakValueDictionary[int, AskedGradients] = weakref.WeakValueDictionary()


def _ask(param: Any, *, reads: bool = False) -> None:
    watching = _watching.get(id(param))
    if watching is not None:
        watching.asked(reads=reads)
    else:
        param.__class__ = type(param).__bases__[1]  # the session is gone


class _Asking:
    """Mixed into the class of a parameter that is watched."""

    __slots__ = ()

    @property
    def grad(self) -> Any:
        _ask(self, reads=True)
        return self.grad  # of its own class again

    @grad.setter
    def grad(self, gradient: Any) -> None:
        _ask(self)
        self.grad = gradient

    @grad.deleter
    def grad(self) -> None:
        _ask(self)
        del self.grad

    def __deepcopy__(self, memo: Any) -> Any:
        _ask(self)  # a copy is a parameter like any other
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _ask(self)
        return self.__reduce_ex__(protocol)


@functools.cache
def _asking(kind: type[nn.Parameter]) -> Any:
    return type(kind.__name__, (_Asking, kind), {"__module__": kind.__module__})
