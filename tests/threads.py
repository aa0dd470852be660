"""Several workers of one host, and servers, as threads of this process: the real memory and the real waiting, without
the start-up."""

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from manyhands import strategies
from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.cluster.worker.server_context import ServerContext
from manyhands.cluster.worker.world import World
from manyhands.errors import PeerLost


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
        servers = 2 if strategies.parse(strategy).traits.servers else 0
    total = size + servers
    fd = os.memfd_create("test")
    results: list[Any] = [None] * total
    errors: list[BaseException] = []

    def check() -> None:
        if errors:
            raise PeerLost("another worker failed")

    def one(rank: int) -> None:
        rank_info = RankInfo(rank=rank, size=total, servers=servers, launcher="test", arena_fd=fd)
        world: Any = None
        try:
            world = World(rank_info, check) if rank_info.server is None else ServerContext(rank_info)
            try:
                results[rank] = work(world)
            except SystemExit:
                assert rank_info.server is not None, "a worker ended early"
            except Exception:
                if rank_info.server is None or world.serving is None or world.serving.is_over:
                    raise
                with contextlib.suppress(SystemExit):
                    world.serving.run()
        except BaseException as error:
            errors.append(error)
            # Servers end when their workers' connections do: nothing must hold on to the session that failed.
            traceback.clear_frames(error.__traceback__)
        try:
            if world is not None:
                world.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(total)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    os.close(fd)
    # A worker that is left behind would hold memory and telemetry that later tests count.
    assert not any(thread.is_alive() for thread in threads), f"{size} workers did not finish: {errors}"
    if errors:  # that a peer is gone follows from what went wrong with the peer, and may be noticed first
        raise next((error for error in errors if not isinstance(error, PeerLost)), errors[0])
    return results[:size]
