"""The servers as a strategy sees them: a worker's connection with them, and the comm of the workers."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from manyhands.comm.comm import Comm, ServerAccess
from manyhands.replica.portions import pool
from manyhands.replica.share import Share
from manyhands.servers.worker.client import Servers


class Fleet:
    """The servers, for a worker that may speak with them through another worker of its host."""

    def __init__(self, servers: ServerAccess, comm: Comm) -> None:
        self.comm = comm
        self._servers = servers
        # What every step calls goes straight to the connection.
        self.wait, self.begin = servers.wait, servers.begin
        self.push, self.finish = servers.push, servers.finish
        self.settle = servers.settle

    def pull(self, *, whole: bool = True) -> None:
        """All parameters as the servers have them now; if not `whole`, of tables only the rows that have changed."""
        self._servers.pull(whole=whole)

    def leave(self, take_part: Callable[[Share], object]) -> None:
        """No worker waits for this one until all have paused; it takes part in the steps of its host meanwhile."""
        self._servers.leave(take_part)

    def agree(self) -> None:
        """Return when the servers have applied what all workers have pushed, and their parameters are here."""
        self._servers.flush()
        self._servers.settle()
        self.comm.sum_of(0.0)  # all workers' gradients are applied
        self._servers.pull()


class DirectFleet(Fleet):
    """The servers, for a worker that speaks with them for itself alone."""

    def __init__(self, servers: Servers, comm: Comm) -> None:
        super().__init__(servers, comm)
        self._direct = servers
        evaluation = servers.evaluation
        self.begin_evaluation = evaluation.begin
        self.next_portion, self.add_gradient = evaluation.next_portion, evaluation.add_gradient

    def agree(self) -> None:
        if self._direct.server_groups > 1:
            self.settle()
            for _ in range(2):  # first all that is known comes together, then all server groups know it
                self.comm.sum_of(0.0)
                self._direct.meet()
            self.comm.sum_of(0.0)
        super().agree()

    def push_gradient(self, gradient: Tensor, used: Tensor) -> None:
        """A step without a backward pass: push a gradient of the strategy's own, with a flag for each parameter."""
        self._direct.push_gradient(gradient, used)

    def portions(self, share: Share, samples: int) -> list[tuple[Any, int]]:
        """What all workers have in this step, in portions of at most so many samples; the same list on all workers."""
        share.total()  # all workers have said what they bring
        return pool(share.parts, self.comm, samples)

    def minimize(self, gradient: Callable[[], float]) -> float:
        """One step of the user's L-BFGS; `gradient` has all workers evaluate the loss where the parameters are now."""
        return self._direct.evaluation.minimize(gradient)
