"""A progress bar that shows nothing."""

from collections.abc import Iterable, Iterator
from typing import Any


class tqdm:
    def __init__(self, items: Iterable[Any], **settings: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def set_postfix(self, *values: Any, **settings: Any) -> None:
        pass
