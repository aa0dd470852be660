"""A stand-in for torchvision, as far as the ported scripts use it: tiny made-up data in the shapes of the real ones.

The original, its DDP form and the port all import it, so it is no part of what a port changes.
"""

from . import datasets, transforms, utils

__all__ = ["datasets", "transforms", "utils"]
