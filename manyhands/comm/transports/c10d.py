"""Point-to-point over `torch.distributed` with Gloo: what connects hosts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from manyhands.comm.transports.transport import Handle
from manyhands.errors import PeerLost


class C10dTransport:
    """Messages among the ranks of a Gloo process group; `None` is the default group.

    Transports with different tags do not see each other's messages.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, tag: int = 0) -> None:
        self._group = group
        self._tag = tag
        self._workers: list[int] = dist.get_process_group_ranks(group)
        self.rank: int = dist.get_rank(group)
        self.size: int = len(self._workers)

    def send(self, peer: int, vector: Tensor) -> Handle:
        return self._start(dist.isend, peer, vector)

    def receive(self, peer: int, into: Tensor) -> Handle:
        return self._start(dist.irecv, peer, into)

    def _start(self, post: Callable[..., dist.Work | None], peer: int, vector: Tensor) -> Handle:
        worker = self._workers[peer]
        with _naming(worker):
            work = post(vector, worker, group=self._group, tag=self._tag)
        if work is None:
            raise ValueError(f"worker {dist.get_rank()} is not a member of the group {self._workers}")
        return _Work(work, worker)


class _Work:
    def __init__(self, work: dist.Work, worker: int) -> None:
        self._work = work
        self._worker = worker

    def wait(self) -> None:
        with _naming(self._worker):
            self._work.wait()


@contextmanager
def _naming(worker: int) -> Iterator[None]:
    """Gloo marks what went wrong on the wire only by the source file at the head of its message."""
    try:
        yield
    except RuntimeError as error:
        place, _, reason = str(error).partition("] ")
        if "gloo/transport" not in place:
            raise
        reason = reason.split(". ")[0]
        raise PeerLost(f"worker {worker} is lost: {reason}; see the output of that worker") from error
