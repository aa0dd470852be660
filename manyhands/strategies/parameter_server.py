"""Servers own the parameters; workers push gradients to them and pull parameters from them.

Li et al. 2014, "Scaling distributed machine learning with the parameter server". With x the parameters, g_i the
gradient of worker i on its b_i samples, and U the user's optimizer, which runs on the servers:

    sync    x ← U(x, Σ b_i g_i / Σ b_i)     once per step, when all workers have pushed: one big batch
    async   x ← U(x, g_i(x'))               at every push; x' is what worker i read some updates ago (Dean et al. 2012)
    stale   as async, but a worker waits while it is more than `bound` steps ahead of the slowest (Ho et al. 2013)
"""

from dataclasses import dataclass
from typing import ClassVar

from manyhands.errors import UsageError
from manyhands.servers.protocol.consistency import ASYNC, SYNC, stale
from manyhands.servers.protocol.service import Service
from manyhands.strategies import layers
from manyhands.strategies.interface import Asked, ReplicaView, Served, ServersView, Share, Steps, Traits
from manyhands.strategies.refusals import one_gradient_per_push, one_of

CONSISTENCIES = ("sync", "async", "stale")
DEFAULT_BOUND = 4


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Served):
    """Servers apply what workers push: sync, async or stale (Li et al. 2014; Dean et al. 2012; Ho et al. 2013)."""

    consistency: str = "sync"
    bound: int | None = None  # for stale: steps that a worker may be ahead of the slowest
    cache: bool = False  # one push and one pull per host and step: its workers add up first (Nexus)
    every: tuple[str, ...] = ()  # `classifier=4`: push the mean of this layer's gradients of 4 steps (Nexus)
    copies: int = 0  # of what each server has, on another host; with --hosts
    POSITIONAL: ClassVar[str] = "consistency"  # `parameter-server:async` will do

    def __post_init__(self) -> None:
        one_of(CONSISTENCIES, "consistency", self.consistency)
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
    def traits(self) -> Traits:
        bound = DEFAULT_BOUND if self.bound is None else self.bound
        service = Service(
            rule={"sync": SYNC, "async": ASYNC, "stale": stale(bound)}[self.consistency],
            every=layers.numbers("every", self.every),
            cached=self.cache,
            copies=self.copies,
            elastic=not self.cache and not self.every,
        )
        together = Steps.POOLED if self.every else Steps.SYNCHRONOUS
        return Traits(steps=together if service.rule.gathers else Steps.ALONE, servers=service)

    def check(self, asked: Asked) -> None:
        one_gradient_per_push(asked)

    def step(self, replica: ReplicaView, servers: ServersView, share: Share) -> float:
        servers.wait()
        loss = replica.backward(servers.begin(share), on_ready=servers.push)
        servers.finish()
        return loss
