"""A world that is closed leaves no thread of Gloo behind, whatever still refers to its comms."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.cluster.worker.world import World
from manyhands.errors import PeerLost


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    """Two workers on two hosts, as threads of this process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def made(rank: int) -> World:
        place = f"127.0.0.1:{store.port}"
        fd = os.memfd_create("test")
        rank_info = RankInfo(
            rank=rank, size=2, launcher="test", store=place, hosts=(0, 1), host=rank, arena_fd=fd
        )
        world = World(rank_info)
        os.close(fd)
        return world

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(made, range(2)))
        yield found
    found.clear()  # pytest keeps the list until the next test


def gloo_threads() -> int:
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that ended while we looked
            count += (task / "comm").read_text().startswith("pt_gloo")
    return count


def test_closing_ends_the_threads_of_gloo_and_does_not_sleep(
    worlds: list[World], monkeypatch: pytest.MonkeyPatch
) -> None:
    comms = [comm for world in worlds for comm in (world.comm, world.between_hosts())]
    sums = [torch.ones(1000), torch.ones(1000)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: comms[2 * rank].sum_(sums[rank]), range(2)))
    assert torch.equal(sums[0], torch.full((1000,), 2.0))
    assert gloo_threads() > 0
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for world in worlds:
        world.close()
    deadline = time.monotonic() + 5  # the kernel forgets a thread a moment after it was joined
    while gloo_threads() and time.monotonic() < deadline:
        os.sched_yield()
    assert gloo_threads() == 0
    assert slept == []
    with pytest.raises(PeerLost, match="is over"):
        comms[1].sum_(sums[0])
