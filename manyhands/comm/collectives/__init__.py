"""All-reduce as data: pure functions make schedules, `executor.all_reduce` runs them over any transport."""

from collections.abc import Callable

from manyhands.comm.collectives.halving_doubling import halving_doubling
from manyhands.comm.collectives.hierarchical import hierarchical
from manyhands.comm.collectives.ring import ring
from manyhands.comm.collectives.schedule import Hosts, Schedule
from manyhands.comm.collectives.tree import tree

Topology = Callable[[int, Hosts | None], Schedule]

TOPOLOGIES: dict[str, Topology] = {
    "ring": ring,
    "tree": tree,
    "halving-doubling": halving_doubling,
    "hierarchical": hierarchical,
}
"""Each takes the number of ranks and which of them share a host; its first docstring line names the paper."""
