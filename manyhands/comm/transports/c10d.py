"""Point-to-point over a group of `torch.distributed`: what connects hosts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from manyhands.comm.transports.gloo import waited
from manyhands.comm.transports.transport import Handle
from manyhands.errors import PeerLost


class C10dTransport:
    """Messages among the ranks of a Gloo group.

    Transports with different tags do not see each other's messages. `names` is what messages to people call the
    ranks, where they count a part of the world.
    """

    def __init__(self, group: Any, *, tag: int = 0, names: Sequence[int] | None = None) -> None:
        self._group = group
        self._tag = tag
        self.rank: int = group.rank()
        self.size: int = group.size()
        self._names = names or range(self.size)

    def send(self, peer: int, vector: Tensor) -> Handle:
        return self._start(self._group.send, peer, vector)

    def receive(self, peer: int, into: Tensor) -> Handle:
        return self._start(self._group.recv, peer, into)

    def _start(self, post: Callable[..., Any], peer: int, vector: Tensor) -> Handle:
        worker = self._names[peer]
        with _naming(worker):
            return _Work(post([vector], peer, self._tag), worker)


class _Work:
    def __init__(self, work: Any, worker: int) -> None:
        self._work = work
        self._worker = worker

    def wait(self) -> None:
        with _naming(self._worker):
            waited(self._work)


@contextmanager
def _naming(worker: int) -> Iterator[None]:
    """Gloo marks what went wrong on the network only by the source file at the head of its message."""
    try:
        yield
    except RuntimeError as error:
        place, _, reason = str(error).partition("] ")
        if "gloo/transport" not in place:
            raise
        reason = reason.split(". ")[0]
        raise PeerLost(f"worker {worker} is lost: {reason}; see the output of that worker") from error
