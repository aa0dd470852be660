"""Double buffering: gradients one step late, so that their sum is hidden behind the next step's computation.

ChainerMN (Akiba et al. 2017; its double-buffering optimizer). With g_t the mean gradient of all workers in step t,

    x_{t+1} = x_t − lr · g_{t−1},    g_t taken at x_t,

and the sum of g_t over the workers runs while g_{t+1} is computed. With `predict`, g_t is taken at 2 x_t − x_{t−1}:
where the parameters will be when it is applied, if they go on as they went (SpecTrain, Chen et al. 2018). Momentum
makes late gradients overshoot, and this takes most of it back. A pause waits for the last sum and applies it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from manyhands.strategies.extras import BackgroundComm
from manyhands.strategies.interface import Asked, ReplicaView, Share, Steps, Strategy, Traits
from manyhands.strategies.refusals import one_gradient_per_step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class InFlight:
    """What a worker keeps of the last step; nothing where no sum is in flight."""

    own: "Tensor | None" = None  # its gradients, and a flag for each parameter that has one
    samples: tuple[float, float] = (0.0, 0.0)  # those of its replica, and of all
    last: "Tensor | None" = None  # the parameters before that step


@dataclass(frozen=True, kw_only=True)
class DoubleBuffer(Strategy):
    """Gradients one step late, summed while the next step computes (ChainerMN, Akiba et al. 2017)."""

    predict: bool = True
    traits: ClassVar[Traits] = Traits(steps=Steps.POOLED, late=True, one_piece=True)

    def check(self, asked: Asked) -> None:
        one_gradient_per_step(asked)

    def step(self, replica: ReplicaView, comm: BackgroundComm, share: Share) -> float:
        state, params = replica.keep(InFlight), replica.params
        if self.predict:  # gradients at x_{t−1} + 2 (x_t − x_{t−1}); the parameters themselves stay
            last = params.clone() if state.last is None else state.last
            ahead = last.lerp(params, 2.0)
            state.last = last.copy_(params)
            params.copy_(ahead)
        loss = replica.backward(share)
        if state.last is not None:
            params.copy_(state.last)
        late = comm.finish_sum()
        own = params.new_zeros(len(params) + len(replica.used)) if state.own is None else state.own
        own[: len(params)].copy_(replica.grads)
        own[len(params) :].copy_(replica.used)
        state.own, state.samples = own, (share.of_replica(), share.total())
        comm.start_sum(own.clone())
        self._apply(replica, late)
        return loss

    def agree(self, replica: ReplicaView, comm: BackgroundComm) -> None:
        self._apply(replica, comm.finish_sum())
        state = replica.keep(InFlight)  # the next step begins as the first one did
        state.own, state.samples, state.last = None, (0.0, 0.0), None

    def regroup(self, replica: ReplicaView, comm: BackgroundComm, *, is_new: bool) -> None:
        """The workers that are left sum again; what the others had used in that step counts as not used."""
        state = replica.keep(InFlight)
        if state.own is not None:
            mine, everyone = (0.0, 0.0) if is_new else state.samples
            left = comm.sum_of(mine)
            state.own = state.own * (everyone / left if mine else 0.0)
            state.samples = (mine, left)
            comm.start_sum(state.own.clone())

    def _apply(self, replica: ReplicaView, late: "Tensor | None") -> None:
        if late is not None:
            replica.grads.copy_(late[: len(replica.params)])
            replica.used = late[len(replica.params) :]
            replica.apply()
