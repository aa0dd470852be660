"""Inside each host first, then between hosts (ChainerMN, Akiba et al. 2017; Horovod 2018)."""

from manyhands.comm.collectives.ring import reduce_scatter
from manyhands.comm.collectives.schedule import Hosts, Schedule, host_by_host, reduce_and_return, side_by_side
from manyhands.comm.collectives.tree import fold


def hierarchical(size: int, hosts: Hosts | None = None) -> Schedule:
    """Reduce inside each host, ring between hosts, broadcast inside (ChainerMN, Akiba 2017; Horovod 2018).

    The vector is cut into lanes, as many as the smallest host has ranks. In each host a lane has a leader,
    which collects it inside the host and exchanges it with its leaders on other hosts, all lanes at once.
    Larger hosts first fold their other ranks into the leaders. A host sends 2(H−1)/H of the vector to other
    hosts, however many ranks it has.
    """
    hosts = host_by_host(size, hosts)
    lanes = min(map(len, hosts))
    parts = range(lanes * len(hosts))
    lane_parts = [parts[lane * len(hosts) : (lane + 1) * len(hosts)] for lane in range(lanes)]

    inside, leaders = [], []
    for host in hosts:
        folding, leading = fold(host, keep=lanes, parts=parts)
        inside.append(folding + reduce_scatter(leading, lane_parts))
        leaders.append(leading)
    between = [
        reduce_scatter(
            [leading[lane] for leading in leaders], [range(part, part + 1) for part in lane_parts[lane]]
        )
        for lane in range(lanes)
    ]
    return reduce_and_return(size, len(parts), side_by_side(inside) + side_by_side(between))
