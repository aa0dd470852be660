"""Groups of workers: synchronous inside a group, asynchronous between groups.

Ooi et al. 2015, "SINGA: a distributed deep learning platform". With x the parameters, g_i the gradient of worker i on
its b_i samples, and U the user's optimizer, each group G does by itself

    x ← U(x, Σ b_i g_i(x') / Σ b_i)     i in G, once per step of the group; x' is what it read some updates ago.

Who owns the parameters, and how many groups there are, gives SINGA's four topologies:

    one group,             servers own    sandblaster: one big batch, updates on machines of their own
    one group,             workers own    all-reduce: each worker is the server of some spans
    groups of one worker,  servers own    downpour: every gradient is an update
    groups of one worker,  workers own    hogwild: the same in the memory of a host, without any waiting

Servers may form groups as well. Each has an x and a U of its own and some of the groups of workers, and server groups
tell each other now and then what they have added to x (`servers/exchange.py`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from manyhands.errors import UnknownName, UsageError
from manyhands.servers.protocol.consistency import SYNC, Consistency
from manyhands.strategies.all_reduce import AllReduce
from manyhands.strategies.hogwild import Hogwild
from manyhands.strategies.interface import Asked, Strategy
from manyhands.strategies.parameter_server import DEFAULT_BOUND, ParameterServer
from manyhands.strategies.refusals import at_least_one

if TYPE_CHECKING:
    from manyhands.comm.comm import Comm, ServedDirectly
    from manyhands.replica.replica import Replica, Share

OWNERS = ("servers", "workers")
BETWEEN = ("async", "stale")


@dataclass(frozen=True, kw_only=True)
class WorkerGroups(Strategy):
    """Groups of workers: one big batch inside a group, no waiting between groups (SINGA, Ooi et al. 2015)."""

    groups: int = 2  # of equal size
    between: str = "async"
    bound: int | None = None  # for stale: steps that a group may be ahead of the slowest
    owners: str = "servers"  # who has the parameters and makes the updates
    server_groups: int = 1  # of equal size, each with all parameters and with some of the groups of workers
    exchange_every: int = 4  # updates after which a server group tells the others, where there are several

    def __post_init__(self) -> None:
        at_least_one(groups=self.groups, server_groups=self.server_groups, exchange_every=self.exchange_every)
        if self.between not in BETWEEN:
            raise UnknownName("consistency between groups", self.between, BETWEEN)
        if self.owners not in OWNERS:
            raise UnknownName("owners", self.owners, OWNERS)
        if self.bound is not None and (self.between != "stale" or self.bound < 0):
            raise UsageError(f"bound={self.bound} must be 0 or more, and is for between=stale; leave it out")
        if self.between == "stale" and (self.owners == "workers" or self.groups == 1):
            raise UsageError(
                "between=stale needs groups that can wait: use groups=2 or more with owners=servers"
            )
        if self.server_groups > 1 and (self.owners == "workers" or self.between == "stale"):
            raise UsageError(
                f"server_groups={self.server_groups} needs owners=servers and between=async: server groups know "
                "nothing of each other's steps; leave it out otherwise"
            )

    @property
    def rule(self) -> Consistency | None:
        if self.owners == "workers":
            return None
        if self.groups == 1:
            return SYNC
        bound = DEFAULT_BOUND if self.bound is None and self.between == "stale" else self.bound
        return Consistency(
            gathers=True,
            teams=self.groups // self.server_groups,
            bound=bound,
            server_groups=self.server_groups,
            exchange_every=self.exchange_every,
        )

    @property
    def synchronous(self) -> bool:
        return self.groups == 1

    @property
    def lockstep(self) -> bool:
        return self.groups == 1

    @property
    def shares_replica(self) -> bool:
        return self.owners == "workers"

    def batches_per_update(self, workers: int, hosts: int = 1) -> int:
        return max(1, workers // self.groups)  # asked also of plans that `check` refuses

    def updates_late(self, workers: int, hosts: int = 1) -> int:
        beside = self.groups // self.server_groups - 1
        # Of `exchange_every` updates that are told together the first waits for all others, the last for none.
        return beside + (self.server_groups - 1) * (self.exchange_every - 1) // 2

    def check(self, asked: Asked) -> None:
        workers, groups = asked.workers, self.groups
        if workers % groups:
            raise UsageError(
                f"{workers} workers cannot form {groups} groups of equal size ({workers} ÷ {groups} leaves "
                f"{workers % groups}); use --workers {-(-workers // groups) * groups}, or other groups="
            )
        for count, what in ((groups, "groups of workers"), (asked.servers, "servers")):
            if self.owners == "servers" and count % self.server_groups:
                raise UsageError(
                    f"{count} {what} cannot be divided among {self.server_groups} server groups "
                    f"({count} ÷ {self.server_groups} leaves {count % self.server_groups}); use a multiple of "
                    f"{self.server_groups}, or other server_groups="
                )
        if self.owners == "workers" and groups not in (1, workers):
            raise UsageError(
                f"{groups} groups of {workers // groups} workers need servers to wait in: use owners=servers with "
                f"--servers 1, or, where workers own the parameters, groups=1 or groups={workers}"
            )
        if self.owners == "workers" and groups > 1 and (asked.hosts or 1) > 1:
            raise UsageError(
                f"{groups} groups whose workers own the parameters meet in the memory of one host, and there are "
                f"{asked.hosts}; use owners=servers with --servers 1"
            )
        self._way.check(asked)

    @property
    def _way(self) -> Strategy:
        """How a step comes to its owners; when they apply it is the rule's business."""
        if self.owners == "servers":
            return ParameterServer()
        return AllReduce() if self.groups == 1 else Hogwild()

    def step(self, replica: "Replica", comm: "Comm", share: "Share") -> float:
        return self._way.step(replica, comm, share)

    def leave(self, replica: "Replica", comm: "Comm") -> None:
        self._way.leave(replica, comm)

    def agree(self, replica: "Replica", comm: "Comm") -> None:
        if self.server_groups > 1:
            servers = cast("ServedDirectly", comm.servers)
            servers.settle()
            for _ in range(2):  # first all that is known comes together, then all know it
                comm.sum_of(0.0)
                servers.meet()
            comm.sum_of(0.0)
        self._way.agree(replica, comm)
