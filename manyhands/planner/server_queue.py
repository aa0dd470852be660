"""The servers as one worker meets them: a queue that pushes of all workers go through.

With M servers, one after the other on each host, S bytes, and on a host w workers, v workers elsewhere and m servers, a
step keeps the host's link busy for  d · (w · (M − m) ÷ M + v · m ÷ M) · S · β:  its workers' pushes and its servers'
answers leave by it, and as much comes in (1 ≤ d ≤ 2: how far the two directions disturb each other). A server's
processor makes W additions and one update for each team that gathers, or W updates. The slower of the two decides.
Under rules that gather, every worker pushes the same span at about the same time; otherwise workers come at their own
times, the queue is never empty for long, and a worker waits as in a closed network of W customers: mean value analysis,
R_k = D (1 + Q_{k−1}).

Servers that share cores with workers take time from them: the floor in `price.py`, and `simulation.py`.
"""

from manyhands.planner.amounts import Amount, later
from manyhands.planner.conditions import Conditions
from manyhands.servers.protocol.ownership import GROUP_BYTES
from manyhands.servers.protocol.service import Service


def mean_value(think_s: Amount, demand_s: Amount, customers: int) -> Amount:
    """How long a customer is at one server, waiting included, between two times of thinking."""
    queue, response = 0.0, demand_s
    for count in range(1, min(customers, 256) + 1):
        response = demand_s * (1 + queue)
        queue = count * response / (think_s + response)
    return response


class ServerQueue:
    """When pushes of a worker are applied."""

    def __init__(self, conditions: Conditions, service: Service, *, beside_server: bool = False) -> None:
        """As a worker `beside_server` meets them it pushes through memory, whatever others do."""
        self._conditions, rule = conditions, service.rule
        self._is_beside = beside_server
        role, way = conditions.role, conditions.way
        self.gathers, self.bound = rule.gathers, rule.bound
        self.fetches = rule.fetches
        self.workers = role.hosts if service.cached else role.workers
        self.servers = max(1, way.servers // way.mesh.members)
        teams = rule.teams * rule.server_groups
        self.team = max(1, role.workers // teams) if rule.gathers else 1
        self.confirms = service.elastic and role.hosts > 1
        here = self.workers / role.hosts
        self.remote = self.workers - here
        beside = -(-self.servers // role.hosts) / self.servers
        self._crossing = here * (1 - beside) + self.remote * beside if role.hosts > 1 else 0.0
        groups = max(1, rule.server_groups)
        self._per_server = groups / self.servers
        self._updates = teams if rule.gathers else self.workers
        self._free: Amount = 0.0
        self._before: Amount = 0.0
        self._tail: Amount = 0.0
        self._whole_step: Amount = 0.0

    @property
    def is_uneven(self) -> bool:
        """Whether workers beside a server go ahead of those on hosts without one."""
        hosts = self._conditions.role.hosts
        return not self.gathers and self.bound is None and self.servers < hosts

    @property
    def in_place(self) -> bool:
        """Whether workers compute on the very memory that an update changes: gathered ones then wait for the end."""
        return self.gathers and self._conditions.role.hosts == 1

    def cost_s(self, size_bytes: float) -> Amount:
        """What a push of every worker of so many bytes asks of the busiest server."""
        if self._is_beside:
            return self.cpu_s(size_bytes)
        link = self._crossing * size_bytes * self._conditions.link.busy_s_per_byte
        return later(link, self.cpu_s(size_bytes))

    def cpu_s(self, size_bytes: float) -> Amount:
        """Of the busiest server's processor."""
        conditions = self._conditions
        each = size_bytes * self._per_server
        if self._is_beside:  # the others push at their own, slower pace
            return (self.workers - self.remote) * each * self._update_s
        moving = self.remote * each * 2 * conditions.link.cpu_s_per_byte
        adding = self.workers * each * conditions.add_s if self.gathers else 0.0
        return moving + adding + self._updates * each * self._update_s

    @property
    def _update_s(self) -> Amount:
        return self._conditions.update_s

    def push(self, size_bytes: float, moment: Amount) -> None:
        """This worker pushes, and the others do as well, at about the same time or spread over the step."""
        cost = self.cost_s(size_bytes)
        self._whole_step = self._whole_step + cost
        if self.in_place:
            # Adding goes on during the pass, the update of all comes at its end.
            late = self._updates * size_bytes * self._per_server * self._update_s
            self._tail, cost = self._tail + late, cost - late
        self._free = later(self._free, moment) + cost

    def applied(self, moment: Amount) -> Amount:
        """When all that is pushed is applied, and the answer is here."""
        # There and back: over the link, or until the server and then the worker of the same host is awake.
        across = self.remote and not self._is_beside
        answer = 2 * (self._conditions.link.latency_s if across else self._conditions.meeting_s)
        # The last group comes with all others of its kind, is applied, and goes back.
        last = min(self._conditions.spans.bytes, GROUP_BYTES) * self._conditions.link.busy_s_per_byte
        end = later(self._free, moment) + self._tail
        if across:
            end = end + last * (later(self._crossing, 1.0) if self.gathers else 1.0)
        self._tail = 0.0 * end
        self._free = end
        return end + answer

    def settled(self, moment: Amount) -> Amount:
        """The same for workers that come at their own times: they find each other in the queue."""
        mine = self._whole_step / max(1, self.workers)
        self._whole_step = 0.0
        response = mean_value(self._conditions.passing.wall_s, mine, self.workers)
        self._free = moment
        return moment + response

    def writable(self, began: Amount, now: Amount) -> Amount:
        """Where workers wait for nothing else: a group's next gradient is written when its last one is applied."""
        before, self._before = self._before, self._free
        return now if self.gathers or self.fetches else later(now, before)

    def pull_s(self, size_bytes: float) -> Amount:
        """All parameters: through a worker's own link, or copied in memory."""
        conditions = self._conditions
        if conditions.role.hosts == 1 or self._is_beside:
            return 2 * size_bytes * conditions.touch_s
        share = 1.0 if self.servers < conditions.role.hosts else self.remote / self.workers
        across = 2 * conditions.link.latency_s + size_bytes * conditions.link.s_per_byte
        return share * across + (1 - share) * 2 * size_bytes * conditions.touch_s
