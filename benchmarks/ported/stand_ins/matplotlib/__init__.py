"""A stand-in that draws nothing."""

from . import pyplot

__all__ = ["pyplot", "use"]


def use(backend: str) -> None:
    pass
