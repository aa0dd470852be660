"""Every function there is, doing nothing."""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., None]:
    def nothing(*values: Any, **settings: Any) -> None:
        pass

    return nothing
