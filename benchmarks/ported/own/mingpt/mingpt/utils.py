"""In place of the repository's settings: a namespace."""

from types import SimpleNamespace as CfgNode

__all__ = ["CfgNode"]
