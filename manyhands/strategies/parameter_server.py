"""Servers own the parameters; workers push gradients to them and pull parameters from them.

Li et al. 2014, "Scaling distributed machine learning with the parameter server". With x the parameters, g_i the
gradient of worker i on its b_i samples, and U the user's optimizer, which runs on the servers:

    sync    x ← U(x, Σ b_i g_i / Σ b_i)     once per step, when all workers have pushed: one big batch
    async   x ← U(x, g_i(x'))               at every push; x' is what worker i read some updates ago (Dean et al. 2012)
    stale   as async, but a worker waits while it is more than `bound` steps ahead of the slowest (Ho et al. 2013)
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from manyhands.errors import UnknownName, UsageError
from manyhands.servers.protocol.consistency import ASYNC, SYNC, Consistency, stale
from manyhands.strategies import layers
from manyhands.strategies.interface import Asked, Strategy

if TYPE_CHECKING:
    from manyhands.comm.comm import Comm
    from manyhands.replica.replica import Replica, Share

CONSISTENCIES = ("sync", "async", "stale")
DEFAULT_BOUND = 4


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Strategy):
    """Servers apply what workers push: sync, async or stale (Li et al. 2014; Dean et al. 2012; Ho et al. 2013)."""

    consistency: str = "sync"
    bound: int | None = None  # for stale: steps that a worker may be ahead of the slowest
    cache: bool = False  # one push and one pull per host and step: its workers add up first (Nexus)
    every: tuple[str, ...] = ()  # `classifier=4`: push the mean of this layer's gradients of 4 steps (Nexus)
    copies: int = 0  # of what each server has, on another host; with --hosts
    POSITIONAL: ClassVar[str] = "consistency"  # `parameter-server:async` will do

    def __post_init__(self) -> None:
        if self.consistency not in CONSISTENCIES:
            raise UnknownName("consistency", self.consistency, CONSISTENCIES)
        if self.bound is not None and self.consistency != "stale":
            raise UsageError(
                f"bound={self.bound} is for consistency stale, not {self.consistency}; leave it out"
            )
        if self.bound is not None and self.bound < 0:
            raise UsageError(f"bound={self.bound}: a worker may be 0 or more steps ahead of the slowest")
        if self.copies not in (0, 1):
            raise UsageError(f"copies={self.copies}: what a server has can be on 0 or 1 other hosts")
        layers.numbers("every", self.every)

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(layer for layer, _ in layers.numbers("every", self.every))

    def every_of(self, parameter: str) -> int:
        given = layers.numbers("every", self.every)
        return next((steps for layer, steps in given if layers.fits(layer, parameter)), 1)

    @property
    def synchronous(self) -> bool:
        return self.rule.gathers and not self.every

    @property
    def pooled(self) -> bool:
        return self.rule.gathers

    @property
    def rule(self) -> Consistency:
        if self.consistency == "stale":
            return stale(DEFAULT_BOUND if self.bound is None else self.bound)
        return SYNC if self.consistency == "sync" else ASYNC

    @property
    def serves_hosts(self) -> bool:
        return not self.cache and not self.every

    @property
    def lockstep(self) -> bool:
        return self.rule.gathers

    @property
    def cached(self) -> bool:
        return self.cache

    def check(self, asked: Asked) -> None:
        if asked.optimizer == "lbfgs":
            raise UsageError(
                "servers cannot run L-BFGS, which evaluates the loss several times in a step; use an optimizer "
                "that takes one gradient per step"
            )

    def batches_per_update(self, workers: int, hosts: int = 1) -> int:
        return workers if self.rule.gathers else workers // self._speakers(workers, hosts)

    def updates_late(self, workers: int, hosts: int = 1) -> int:
        return 0 if self.rule.gathers else self._speakers(workers, hosts) - 1

    def _speakers(self, workers: int, hosts: int) -> int:
        """How many push gradients."""
        return hosts if self.cache else workers

    def step(self, replica: "Replica", comm: "Comm", share: "Share") -> float:
        servers = comm.servers
        assert servers is not None
        servers.wait()
        loss = replica.backward(servers.held(share), on_ready=servers.push)
        servers.finish()
        return loss

    def holds_back(self, replica: "Replica", comm: "Comm") -> bool:
        assert comm.servers is not None
        return comm.servers.keeps_back

    def leave(self, replica: "Replica", comm: "Comm") -> None:
        assert comm.servers is not None

        def take_part(share: "Share") -> None:
            self.step(replica, comm, share)
            replica.settle()

        comm.servers.leave(take_part)

    def agree(self, replica: "Replica", comm: "Comm") -> None:
        assert comm.servers is not None
        comm.servers.flush()
        comm.servers.settle()
        comm.sum_of(0.0)  # everyone's gradients are applied
        comm.servers.pull()
