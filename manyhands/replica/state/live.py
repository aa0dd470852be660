"""The optimizer's state as its script sees it while a session runs: read from where the replica has it."""

import weakref
from collections import defaultdict
from collections.abc import Callable, ItemsView, Iterator, MutableMapping
from typing import Any, NoReturn

from torch import Tensor

from manyhands.errors import UsageError

ByParameter = dict[Any, dict[str, Any]]


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise UsageError(
        "while a session runs, the state of the optimizer is with the session: give it another one by "
        "optimizer.load_state_dict(…), or by optimizer.state = … with the whole of it, on every worker"
    )


class ShownState(dict[str, Any]):
    """The state of one parameter, which the script may read; a copy of it is a plain dictionary."""

    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    pop = popitem = clear = update = setdefault = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class LiveState(MutableMapping[Any, dict[str, Any]]):
    """In place of `optimizer.state`. What has one element per element of a parameter is the memory in which the
    optimizer works; the rest are copies. A copy of all of it is plain PyTorch's."""

    def __init__(self, read: Callable[[Any], ByParameter]) -> None:
        """`read`, a method, gives the state of one parameter, or with None of all that have some."""
        self._reader = weakref.WeakMethod(read)  # a script may keep its optimizer longer than its session
        self.shown: list[tuple[str, Tensor, int]] = []  # with how often PyTorch has seen each written to

    def _read(self, param: Any) -> ByParameter:
        read = self._reader()
        found = {} if read is None else read(param)
        self.shown += [
            (name, one, one._version)
            for state in found.values()
            for name, one in state.items()
            if isinstance(one, Tensor)
        ]
        return found

    def written(self) -> tuple[str, Tensor] | None:
        """What the script has written into, of all that it was shown since this was asked last."""
        if not self.shown:
            return None
        shown, self.shown = self.shown, []
        return next(((name, one) for name, one, then in shown if one._version != then), None)

    def __getitem__(self, param: Any) -> dict[str, Any]:
        found = self._read(param)
        # As PyTorch's own, it has a dictionary for any parameter.
        return found[param] if param in found else ShownState()

    def __contains__(self, param: object) -> bool:
        return param in self._read(param)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read(None))

    def __len__(self) -> int:
        return len(self._read(None))

    def items(self) -> ItemsView[Any, dict[str, Any]]:
        return self._read(None).items()

    def __setitem__(self, param: Any, value: Any) -> NoReturn:
        _refuse()

    def __delitem__(self, param: Any) -> NoReturn:
        _refuse()

    def clear(self) -> NoReturn:
        """Also of a state that is empty on this worker alone."""
        _refuse()

    def __reduce__(self) -> Any:
        return defaultdict, (dict, self._read(None))
