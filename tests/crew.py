"""Several workers of one host, and servers, as threads of this process: the real memory and the real waiting, without
the start-up."""

import os
import threading
from collections.abc import Callable
from typing import Any

from manyhands import strategies
from manyhands.cluster.seat import Seat
from manyhands.cluster.world import Station, World


def in_threads(
    size: int,
    work: Callable[[World], Any],
    timeout_s: float = 60.0,
    *,
    strategy: str = strategies.DEFAULT,
    servers: int | None = None,
) -> list[Any]:
    """Run `work(world)` for every rank at once and return what each gave; the first exception is raised here.

    A strategy with servers gets two, or as many as asked for: they run the same function, as a script does, and do not
    come back from making a session.
    """
    if servers is None:
        servers = 2 if strategies.parse(strategy).rule else 0
    total = size + servers
    fd = os.memfd_create("test")
    results: list[Any] = [None] * total
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        seat = Seat(rank=rank, size=total, servers=servers, launcher="test", arena_fd=fd)
        try:
            world: Any = World(seat) if seat.server is None else Station(seat)
            try:
                results[rank] = work(world)
            except SystemExit:
                assert seat.server is not None, "a worker ended early"
            world.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(total)]
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
    return results[:size]
