"""Processes that a worker has started, such as those of a `Pool`, have no place in the run, but look as if they had.

All have the worker's environment, and forks a copy of its sessions. So the worker says in the environment which process
it is, and what it starts is refused as soon as it wants to meet the other workers.
"""

import os

from manyhands.cluster.launchers.detect import own_rank_info
from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.errors import UsageError

_WORKER = "MANYHANDS_WORKER"
_is_worker = False  # whether this process is known to be one


def announce() -> None:
    """This process is the worker."""
    global _is_worker
    _is_worker = True
    info = own_rank_info()
    if info.launcher != "alone":
        os.environ[_WORKER] = f"{os.getpid()} {_run(info)}"


def refuse() -> None:
    """Refuse a process that a worker of this run has started."""
    if _is_worker or _WORKER not in os.environ:
        return
    pid, _, run = os.environ[_WORKER].partition(" ")
    info = own_rank_info()
    if int(pid) != os.getpid() and run == _run(info):  # else a launcher has started it anew
        raise UsageError(
            f"this process was started by {info.name}, as by a Pool or a DataLoader, and is no worker itself: put the "
            'script under `if __name__ == "__main__":`, and use the session in the worker alone'
        )


def _run(info: RankInfo) -> str:
    return f"{info.launcher} {info.store}"


def _forget() -> None:
    global _is_worker
    _is_worker = False


os.register_at_fork(after_in_child=_forget)
