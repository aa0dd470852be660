"""Double buffering: gradients one step late, so that their sum is hidden behind the next step's computation.

ChainerMN (Akiba et al. 2017; its double-buffering optimizer). With g_t the mean gradient of all workers in step t,

    x_{t+1} = x_t − lr · g_{t−1},    g_t taken at x_t,

and the sum of g_t over the workers runs while g_{t+1} is computed. With `predict`, g_t is taken at 2 x_t − x_{t−1}:
where the parameters will be when it is applied, if they go on as they went (SpecTrain, Chen et al. 2018). Momentum
makes late gradients overshoot, and this takes most of it back. A pause waits for the last sum and applies it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from manyhands.strategies.settings import one_gradient_per_step
from manyhands.strategies.strategy import Asked, Strategy

if TYPE_CHECKING:
    from torch import Tensor

    from manyhands.comm.comm import Comm
    from manyhands.replica.replica import Replica, Share

BUFFERS = ("even", "odd")
LAST = "last"


@dataclass(frozen=True, kw_only=True)
class DoubleBuffer(Strategy):
    """Gradients one step late, summed while the next step computes (ChainerMN, Akiba et al. 2017)."""

    predict: bool = True
    pooled: ClassVar[bool] = True
    survives: ClassVar[bool] = False  # a sum under way holds gradients that only the dead worker has

    def check(self, asked: Asked) -> None:
        one_gradient_per_step(asked)

    def updates_late(self, workers: int, hosts: int = 1) -> int:
        return 1

    def step(self, replica: "Replica", comm: "Comm", share: "Share") -> float:
        late = self._buffer(replica, replica.steps)
        loss = self._predicted(replica, share) if self.predict else replica.backward(share)
        comm.finish_sum()
        fresh = self._buffer(replica, replica.steps)
        length = len(replica.params)
        fresh[:length].copy_(replica.grads)
        fresh[length:].copy_(replica.used)  # which parameters got a gradient travels with the gradients
        comm.start_sum(fresh)
        self._apply(replica, late)
        return loss

    def agree(self, replica: "Replica", comm: "Comm") -> None:
        comm.finish_sum()
        self._apply(replica, self._buffer(replica, replica.steps))
        for name in (*BUFFERS, LAST):  # nothing is late any more: the next step begins as the first one did
            replica.kept.pop(name, None)

    def _predicted(self, replica: "Replica", share: "Share") -> float:
        """Gradients where the parameters will be; the parameters themselves stay where they are."""
        here = replica.params.clone()
        last = replica.keep(LAST, here)
        replica.params.add_(here - last)
        last.copy_(here)
        loss = replica.backward(share)
        replica.params.copy_(here)
        return loss

    def _buffer(self, replica: "Replica", step: int) -> "Tensor":
        """The gradients of a step and one flag per parameter; zeros where there was no such step."""
        name = BUFFERS[step % 2]
        if name not in replica.kept:
            replica.keep(name, replica.params.new_zeros(len(replica.params) + len(replica.used)))
        return replica.keep(name)

    def _apply(self, replica: "Replica", late: "Tensor") -> None:
        length = len(replica.params)
        replica.grads.copy_(late[:length])
        replica.used = late[length:]
        replica.apply()
