"""Which launcher has started this process, and which rank it gave it.

The same script runs under our own launcher, torchrun, MPI, Slurm, or alone. Each launcher leaves its own variables,
and each file of this folder reads only its own.
"""

import functools
import os
from collections.abc import Mapping
from dataclasses import replace

from manyhands.cluster.launchers import local, mpi, slurm, torchrun
from manyhands.cluster.launchers.rank_info import SERVERS, RankInfo, whole_number

# Ours first: a world that our launcher starts inside a Slurm job is still ours.
DETECTORS = (local.detect, torchrun.detect, mpi.detect, slurm.detect)


def find_rank_info(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Ask every launcher in turn; call it once per process, since under MPI it is a collective act."""
    for detect in DETECTORS:
        rank_info = detect(environ)
        if rank_info is not None:
            return rank_info
    return RankInfo(rank=0, size=1, launcher="alone")


@functools.cache
def _found() -> RankInfo:
    return find_rank_info()


def own_rank_info() -> RankInfo:
    """This process's rank info, found once; the number of servers among the processes is read every time."""
    rank_info = _found()
    if not os.environ.get(SERVERS) or rank_info.launcher == "alone":
        return rank_info
    return replace(rank_info, servers=whole_number(os.environ, SERVERS))
