"""The place of each worker: replicas × shards × stages × ways, as arithmetic over ranks.

Ways change fastest, then stages, then shards, then replicas. Launchers number the workers of a host one after the
other, so a replica lies inside a host where it fits into one, and only what replicas exchange crosses between
hosts.
"""

from collections.abc import Callable
from dataclasses import dataclass

from manyhands.errors import UsageError

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Position:
    """One worker's place in the mesh."""

    replica: int
    shard: int
    stage: int
    way: int


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The shape that the workers form."""

    replicas: int = 1
    shards: int = 1  # workers among which a replica's parameters are spread, each with samples of its own
    stages: int = 1
    ways: int = 1

    @property
    def members(self) -> int:
        """Workers of one replica."""
        return self.shards * self.stages * self.ways

    @property
    def workers(self) -> int:
        return self.replicas * self.members

    @property
    def copies(self) -> int:
        """Workers that work on the same samples."""
        return self.stages * self.ways

    @property
    def feeds(self) -> int:
        """Different batches in a step."""
        return self.replicas * self.shards

    def at(self, rank: int) -> Position:
        rest, way = divmod(rank, self.ways)
        rest, stage = divmod(rest, self.stages)
        replica, shard = divmod(rest, self.shards)
        return Position(replica=replica, shard=shard, stage=stage, way=way)

    def feed(self, rank: int) -> int:
        """Which of the step's batches a worker works on."""
        return rank // self.copies

    def peers(self) -> Groups:
        """Workers with the same part of the model, one of each replica."""
        return self._groups(lambda place: (place.shard, place.stage, place.way))

    def model_parallel_groups(self) -> Groups:
        """Workers of the same replica."""
        return self._groups(lambda place: place.replica)

    def tensor_parallel_groups(self) -> Groups:
        """Workers that divide the same layers: the ways of a stage."""
        return self._groups(lambda place: (place.replica, place.shard, place.stage))

    def _groups(self, key: Callable[[Position], object]) -> Groups:
        found: dict[object, list[int]] = {}
        for rank in range(self.workers):
            found.setdefault(key(self.at(rank)), []).append(rank)
        return tuple(tuple(ranks) for ranks in found.values())


def form(workers: int, *, shards: int = 1, stages: int = 1, ways: int = 1) -> Mesh:
    """As many replicas of this shape as the workers make; refuses workers that are left over."""
    one = Mesh(shards=shards, stages=stages, ways=ways)
    replicas, left = divmod(workers, one.members)
    if left or not replicas:
        sizes = [(stages, "stages"), (ways, "ways"), (shards, "shards")]
        words = [f"{size} {word}" for size, word in sizes if size > 1]
        shape = " × ".join(words)
        product = f" = {one.members} workers" if len(words) > 1 else ""
        fits = sorted({max(replicas, 1) * one.members, (replicas + 1) * one.members})
        raise UsageError(
            f"{workers} workers cannot form replicas of {shape}{product}: {workers} = {replicas} × "
            f"{one.members} + {left}; "
            f"use --workers {' or '.join(map(str, fits))}, or another placement"
        )
    return Mesh(replicas=replicas, shards=shards, stages=stages, ways=ways)
