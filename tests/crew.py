"""Several workers of one host as threads of this process: the real memory, the real waiting, without the start-up."""

import os
import threading
from collections.abc import Callable
from typing import Any

from manyhands.cluster.seat import Seat
from manyhands.cluster.world import World


def in_threads(size: int, work: Callable[[World], Any], timeout_s: float = 60.0) -> list[Any]:
    """Run `work(world)` for every rank at once and return what each gave; the first exception is raised here."""
    fd = os.memfd_create("test")
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            world = World(Seat(rank=rank, size=size, launcher="test", arena_fd=fd))
            results[rank] = work(world)
            world.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        # A worker that failed leaves the others waiting for it: do not wait for them.
        while thread.is_alive() and not errors and timeout_s > 0:
            thread.join(0.05)
            timeout_s -= 0.05
    os.close(fd)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), f"{size} workers did not finish"
    return results
