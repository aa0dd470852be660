"""Synchronous data parallelism: every replica applies the mean of all gradients, every step.

PyTorch DDP (Li et al. 2020) and Horovod (Sergeev & Del Balso 2018) do the same. With g_i the gradient of worker i
on its b_i samples, the step uses  g = Σ b_i g_i / Σ b_i,  the gradient of one process on all samples together.
"""

from dataclasses import dataclass

from manyhands.comm.collectives import TOPOLOGIES
from manyhands.strategies.extras import LineSearch, Numbers
from manyhands.strategies.interface import Share, Steps, Strategy, Traits
from manyhands.strategies.refusals import one_of


@dataclass(frozen=True, kw_only=True)
class AllReduce(Strategy):
    """The mean of all gradients in every step (PyTorch DDP, Li et al. 2020; Horovod, Sergeev & Del Balso 2018)."""

    topology: str = "native"  # the fastest for the machine at hand, or a schedule: ring, tree, ...

    def __post_init__(self) -> None:
        one_of(["native", *TOPOLOGIES], "topology", self.topology)

    @property
    def traits(self) -> Traits:
        """A named topology is between workers, so each has its own replica."""
        is_native = self.topology == "native"
        return Traits(
            steps=Steps.SYNCHRONOUS, replica="shared" if is_native else "own", topology=self.topology
        )

    def step(self, replica: LineSearch, comm: Numbers, share: Share) -> float:
        if replica.needs_closure:
            return replica.minimize(lambda: self._gradients(replica, comm, share))
        sums = comm.sums(replica)
        loss = replica.backward(share, on_ready=sums.start)
        for span in sums:
            replica.apply(span)
        return loss

    def _gradients(self, replica: LineSearch, comm: Numbers, share: Share) -> float:
        """The global gradient, and the global loss: a line search must decide alike everywhere."""
        loss = replica.backward(share)
        replica.used = comm.any_(replica.used)
        comm.sum_(replica.grads)
        return comm.sum_of(loss * share.samples / share.total() if share.samples else 0.0)
