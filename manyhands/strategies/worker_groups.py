"""Groups of workers: synchronous inside a group, asynchronous between groups.

Ooi et al. 2015, "SINGA: a distributed deep learning platform". With x the parameters, g_i the gradient of worker i on
its b_i samples, and U the user's optimizer, each group G does by itself

    x ← U(x, Σ b_i g_i(x') / Σ b_i)     i in G, once per step of the group; x' is what it read some updates ago.

Who owns the parameters, and how many groups there are, gives SINGA's four topologies:

    one group,             servers own    sandblaster: one big batch, updates on machines of their own
    one group,             workers own    all-reduce: each worker is the server of some spans
    groups of one worker,  servers own    downpour: every gradient is an update
    groups of one worker,  workers own    hogwild: the same in the memory of a host, without any waiting

Server groups, each with its own x and U, tell each other what they have added to x (`servers/process/exchange.py`).
"""

from dataclasses import dataclass

from manyhands.servers.protocol.consistency import SYNC, Consistency
from manyhands.servers.protocol.service import Service
from manyhands.strategies import refusals
from manyhands.strategies.all_reduce import AllReduce
from manyhands.strategies.hogwild import Hogwild
from manyhands.strategies.interface import Asked, CommView, ReplicaView, Served, ServersView, Share, Strategy
from manyhands.strategies.parameter_server import DEFAULT_BOUND, ParameterServer
from manyhands.strategies.traits import Steps, Traits


@dataclass(frozen=True, kw_only=True)
class WorkerGroups(Served):
    """Groups of workers: one big batch inside a group, no waiting between groups (SINGA, Ooi et al. 2015)."""

    groups: int = 2  # of equal size
    between: str = "async"
    bound: int | None = None  # for stale: steps that a group may be ahead of the slowest
    owners: str = "servers"  # who has the parameters and makes the updates
    server_groups: int = 1  # of equal size, each with all parameters and with some of the groups of workers
    exchange_every: int = 4  # updates after which a server group tells the others, where there are several

    def __post_init__(self) -> None:
        refusals.group_settings(**vars(self))

    @property
    def traits(self) -> Traits:
        steps = Steps.SYNCHRONOUS if self.groups == 1 else Steps.ALONE
        if self.owners == "workers":
            return Traits(steps=steps, replica="shared")
        between = Consistency(
            gathers=True,
            teams=self.groups // self.server_groups,
            bound=DEFAULT_BOUND if self.bound is None and self.between == "stale" else self.bound,
            server_groups=self.server_groups,
            exchange_every=self.exchange_every,
        )
        return Traits(steps=steps, servers=Service(rule=SYNC if self.groups == 1 else between))

    def check(self, asked: Asked) -> None:
        refusals.equal_groups(asked, self.groups)
        if self.owners == "servers":
            refusals.equal_server_groups(asked, self.groups, self.server_groups)
        else:
            refusals.groups_without_servers(asked, self.groups)
        self._way.check(asked)

    @property
    def _way(self) -> Strategy:
        """How a step comes to its owners; when they apply it is the rule's business."""
        if self.owners == "servers":
            return ParameterServer()
        return AllReduce() if self.groups == 1 else Hogwild()

    def step(self, replica: ReplicaView, owners: CommView | ServersView, share: Share) -> float:
        return self._way.step(replica, owners, share)

    def agree(self, replica: ReplicaView, owners: CommView | ServersView) -> None:
        self._way.agree(replica, owners)

    def leave(self, replica: ReplicaView, servers: ServersView) -> None:
        ParameterServer().leave(replica, servers)
