"""What one worker does for all: a log, a progress bar, a tracker of experiments.

The main worker (rank 0) has the object; it may die, and then another worker is main. So a script does not ask for its
rank once and hold on to the answer: it says how to make the object, and each use finds out anew.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from manyhands.engine.engine import Engine

T = TypeVar("T")


class Nothing:
    """Stands for the object on the other workers: whatever is done with it does nothing."""

    def __getattr__(self, name: str) -> "Nothing":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        pass

    def __call__(self, *arguments: object, **named: object) -> "Nothing":
        return self

    def __getitem__(self, key: object) -> "Nothing":
        return self

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __enter__(self) -> "Nothing":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def __repr__(self) -> str:
        return "<nothing: another worker is main>"


_NOTHING = Nothing()
_MAKE, _IS_MAIN, _MADE = "_once_make", "_once_is_main", "_once_made"


class OnMain:
    """The object on the main worker, and nothing elsewhere; every use asks which of the two this worker is."""

    def __init__(self, make: Callable[[], Any], is_main: Callable[[], bool]) -> None:
        vars(self).update({_MAKE: make, _IS_MAIN: is_main, _MADE: []})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(found(self), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(found(self), name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return found(self)(*arguments, **named)

    def __getitem__(self, key: Any) -> Any:
        return found(self)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        found(self)[key] = value

    def __iter__(self) -> Iterator[Any]:
        return iter(found(self))

    def __len__(self) -> int:
        return len(found(self))

    def __bool__(self) -> bool:
        return found(self) is not _NOTHING

    def __enter__(self) -> Any:
        return found(self).__enter__()

    def __exit__(self, *exception: Any) -> Any:
        return found(self).__exit__(*exception)

    def __repr__(self) -> str:
        return repr(found(self))


def found(one: OnMain) -> Any:
    """What this worker has now; one that has become main makes the object."""
    own = vars(one)
    if not own[_IS_MAIN]():
        return _NOTHING
    if not own[_MADE]:
        own[_MADE].append(own[_MAKE]())
    return own[_MADE][0]


def once(engine: Engine, make: Callable[[], T]) -> T:
    """Let the main worker make something, and any worker that is main later; the script uses it on all workers."""
    made = OnMain(make, lambda: engine.world.rank == 0)
    engine.on_main.append(made)
    found(made)
    return cast(T, made)


def take_over(engine: Engine) -> None:
    """A generation has begun: a worker that is main now makes what the one before it had made."""
    for made in engine.on_main:
        found(made)
