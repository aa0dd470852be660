"""Where the worker that is recorded stands, and the spans that its strategy sees."""

import itertools
from dataclasses import dataclass

from manyhands.planner.facts import ModelFacts
from manyhands.strategies import Traits

MOST_SPANS = 12
"""Spans are put together to so many: what leaves when stays nearly the same."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """Where the worker that is recorded stands: the first of its host."""

    workers: int
    """Of all, each with a part of the model like this worker's."""
    hosts: int
    neighbours: int
    """Workers of its own host, itself included."""
    samples: int
    """Of its batch."""
    shares_replica: bool
    """Whether the workers of a host have one replica in common."""

    @property
    def peers(self) -> int:
        """Replicas."""
        return self.hosts if self.shares_replica else self.workers


@dataclass(frozen=True, kw_only=True)
class SpanFacts:
    """Of the flat vector that a worker's strategy sees, in the order in which a backward pass finishes them."""

    sizes: tuple[float, ...]
    """In bytes."""
    ready: tuple[float, ...]
    """As shares of the pass."""

    @property
    def bytes(self) -> float:
        return sum(self.sizes)


def spans_of(model: ModelFacts, parts: int = 1) -> SpanFacts:
    """Those of one of so many equal parts of the model."""
    count = len(model.span_bytes)
    edges = sorted(
        {round(place * count / min(count, MOST_SPANS)) for place in range(min(count, MOST_SPANS) + 1)}
    )
    pairs = [(start, stop) for start, stop in itertools.pairwise(edges) if stop > start]
    return SpanFacts(
        sizes=tuple(sum(model.span_bytes[start:stop]) / parts for start, stop in pairs),
        ready=tuple(model.ready[stop - 1] for _, stop in pairs),
    )


def role_of(traits: Traits, workers: int, hosts: int, samples: int, *, divisible: bool = True) -> Role:
    """As the engine lays out replicas: `engine/build.py`."""
    cached = traits.servers is not None and traits.servers.cached
    shares = cached or (traits.servers is None and traits.replica == "shared" and divisible)
    return Role(
        workers=workers,
        hosts=hosts,
        neighbours=max(1, -(-workers // hosts)),
        samples=samples,
        shares_replica=shares,
    )
