"""RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as scripts and libraries know them.

They are set as soon as they are known: at the start on one host, with the session where several hosts come together;
and again whenever the members of the run change. MASTER_ADDR and MASTER_PORT are not set: libraries would take them as
an order to connect the workers, which the session does.
"""

import os

from manyhands.cluster.launchers import host_page
from manyhands.cluster.launchers.rank_info import RankInfo


def announce_start(info: RankInfo) -> None:
    """What a process of our launcher knows before it has a session."""
    if info.address is not None:
        return
    workers = info.workers
    if info.is_new:  # its rank comes with its session; until then it is the last one, and never the first
        workers = max(2, workers)
    rank = workers - 1 if info.is_new else info.rank
    announce(rank, workers, rank, workers)


def announce(rank: int, workers: int, local_rank: int, local_workers: int) -> None:
    if host_page.own() is not None:  # our launcher has started this process
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(workers),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_workers),
        }
