"""Double buffering: gradients one step late, so that their sum is hidden behind the next step's computation.

ChainerMN (Akiba et al. 2017; its double-buffering optimizer). With g_t the mean gradient of all workers in step t,

    x_{t+1} = x_t − lr · g_{t−1},    g_t taken at x_t,

and the sum of g_t over the workers runs while g_{t+1} is computed. With `predict`, g_t is taken at 2 x_t − x_{t−1}:
where the parameters will be when it is applied, if they go on as they went (SpecTrain, Chen et al. 2018). Momentum
makes late gradients overshoot, and this takes most of it back. A pause waits for the last sum and applies it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from manyhands.strategies.interface import Asked, Strategy
from manyhands.strategies.refusals import one_gradient_per_step

if TYPE_CHECKING:
    from torch import Tensor

    from manyhands.comm.comm import Comm
    from manyhands.replica.replica import Replica, Share

OWN = "own"  # this worker's gradients of the last step, and a flag for each parameter
SAMPLES = "samples"  # in that step: this worker's, and those of all
LAST = "last"  # the parameters before the last step


@dataclass(frozen=True, kw_only=True)
class DoubleBuffer(Strategy):
    """Gradients one step late, summed while the next step computes (ChainerMN, Akiba et al. 2017)."""

    predict: bool = True
    pooled: ClassVar[bool] = True
    late: ClassVar[bool] = True

    def check(self, asked: Asked) -> None:
        one_gradient_per_step(asked)

    def updates_late(self, workers: int, hosts: int = 1) -> int:
        return 1

    def step(self, replica: "Replica", comm: "Comm", share: "Share") -> float:
        loss = self._predicted(replica, share) if self.predict else replica.backward(share)
        late = comm.finish_sum()
        self._start(replica, comm, share)
        self._apply(replica, late)
        return loss

    def agree(self, replica: "Replica", comm: "Comm") -> None:
        self._apply(replica, comm.finish_sum())
        # Nothing is late any more: the next step begins as the first one did.
        for name in (OWN, SAMPLES, LAST):
            replica.kept.pop(name, None)

    def regroup(self, replica: "Replica", comm: "Comm", *, is_new: bool) -> None:
        """Those who are left sum again what each of them has: the mean over their samples. What the others had used in
        that step counts as not used."""
        if OWN in replica.kept:
            mine, everyone = replica.kept[SAMPLES].tolist()
            mine = 0.0 if is_new else mine
            left = comm.sum_of(mine)
            replica.kept[OWN] = replica.kept[OWN] * (everyone / left if mine else 0.0)
            replica.kept[SAMPLES] = replica.kept[SAMPLES].new_tensor([mine, left])
            comm.start_sum(replica.kept[OWN].clone())

    def _predicted(self, replica: "Replica", share: "Share") -> float:
        """Gradients where the parameters will be; the parameters themselves stay where they are."""
        last = replica.keep(LAST, replica.params)
        ahead = last.lerp(replica.params, 2.0)  # x_{t−1} + 2 (x_t − x_{t−1})
        last.copy_(replica.params)
        replica.params.copy_(ahead)
        loss = replica.backward(share)
        replica.params.copy_(last)
        return loss

    def _start(self, replica: "Replica", comm: "Comm", share: "Share") -> None:
        """Begin the sum of this step's gradients; which parameters got one travels with them."""
        length = len(replica.params)
        own = replica.keep(OWN, replica.params.new_zeros(length + len(replica.used)))
        own[:length].copy_(replica.grads)
        own[length:].copy_(replica.used)
        samples = replica.keep(SAMPLES, own.new_zeros(2).double())
        samples[0], samples[1] = share.samples, share.total()
        comm.start_sum(own.clone())

    def _apply(self, replica: "Replica", late: "Tensor | None") -> None:
        if late is not None:
            length = len(replica.params)
            replica.grads.copy_(late[:length])
            replica.used = late[length:]
            replica.apply()
