"""Cores that the threads of a machine share."""

from collections.abc import Generator
from typing import Any

import simpy

Events = Generator[Any, Any, None]


class Machine:
    """Cores that ready threads share."""

    def __init__(self, cores: float) -> None:
        self.cores, self.ready = cores, 0.0

    def compute(self, env: simpy.Environment, seconds: float, threads: float, slices: int = 1) -> Events:
        """Work that takes so long alone."""
        self.ready += threads
        for _ in range(slices):
            yield env.timeout(seconds / slices * max(1.0, self.ready / self.cores))
        self.ready -= threads
