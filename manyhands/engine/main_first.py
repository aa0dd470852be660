"""`main_process_first`: one worker of a host does something alone, the others do it afterwards."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from manyhands.cluster.launchers import host_page
from manyhands.cluster.launchers.detect import own_rank_info
from manyhands.cluster.worker import children
from manyhands.engine import worker_process

_times = itertools.count(1)
_PATIENCE = timedelta(seconds=30)  # between two looks at a store; what the first one does may take hours


@contextmanager
def main_process_first() -> Iterator[None]:
    """`with mh.main_process_first():` the first worker of each host runs the block alone, then the others do.

    For downloads and for what is prepared once: the others find it done. It needs no session. If the first worker dies
    in the block, the next one is the first. Servers wait as the workers do.
    """
    children.refuse()
    number = next(_times)
    if own_rank_info().size == 1 and not own_rank_info().is_new:
        yield
    elif (page := host_page.own()) is not None:
        with page[0].turn(page[1], number):
            yield
    else:
        with _by_store(number):
            yield


@contextmanager
def _by_store(number: int) -> Iterator[None]:
    """In a world of another launcher, where the workers of all hosts meet anyway."""
    world = worker_process.own_world()
    neighbours = world.neighbours
    rank = world.rank_info.rank
    first = neighbours.beside(rank)[0]
    key = f"main-first/{first}/{number}"
    while rank != first:
        try:
            neighbours.store.wait([key], _PATIENCE)
            break
        except dist.DistStoreError:
            continue
    try:
        yield
    finally:
        if rank == first:
            neighbours.store.set(key, "done")
