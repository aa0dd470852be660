"""A collective as data: rounds of transfers of parts of a vector.

Rules that every schedule keeps, so that the executor can stay simple (`check.check` verifies them):

- in one round a rank sends at most one message and receives at most one;
- what it sends and what it receives in a round are different parts;
- in the end every rank holds every contribution to every part once, added in the same order everywhere.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest

from manyhands.errors import UsageError

Hosts = Sequence[Sequence[int]]
"""Which ranks share a host."""


@dataclass(frozen=True)
class Transfer:
    """`source` sends adjacent parts; `target` adds them to its own or overwrites its own with them."""

    source: int
    target: int
    parts: range
    reduce: bool


Round = tuple[Transfer, ...]
Turn = tuple[Transfer | None, Transfer | None]
"""What one rank sends and what it receives in one round."""


@dataclass(frozen=True)
class Schedule:
    """An all-reduce among `size` ranks of a vector cut into `parts` almost equal parts."""

    size: int
    parts: int
    rounds: tuple[Round, ...]

    def cut(self, parts: range, length: int) -> slice:
        """Where these parts lie in a vector of `length` elements; empty when the vector is short."""
        return slice(parts.start * length // self.parts, parts.stop * length // self.parts)

    @cached_property
    def turns(self) -> tuple[tuple[Turn, ...], ...]:
        """For each rank its turns, one for every round, also where it idles."""
        turns: list[list[Turn]] = [[] for _ in range(self.size)]
        for transfers in self.rounds:
            sends = {transfer.source: transfer for transfer in transfers}
            receives = {transfer.target: transfer for transfer in transfers}
            for rank in range(self.size):
                turns[rank].append((sends.get(rank), receives.get(rank)))
        return tuple(map(tuple, turns))


def reduce_and_return(size: int, parts: int, reduction: Sequence[Round]) -> Schedule:
    """Complete a reduction to an all-reduce: the finished sums travel the same paths backwards.

    Right whenever a rank sends each part at most once and receives nothing for that part afterwards.
    """
    back = (
        tuple(Transfer(step.target, step.source, step.parts, reduce=False) for step in transfers)
        for transfers in reversed(reduction)
    )
    return Schedule(size, parts, (*reduction, *back))


def side_by_side(plans: Iterable[Sequence[Round]]) -> list[Round]:
    """Several plans among disjoint ranks at the same time: their first rounds together, and so on."""
    return [tuple(chain.from_iterable(together)) for together in zip_longest(*plans, fillvalue=())]


def host_by_host(size: int, hosts: Hosts | None) -> Hosts:
    """The given hosts if they hold each rank exactly once; one host for all where none are given."""
    if hosts is None:
        return [range(size)]
    if not all(hosts) or sorted(chain.from_iterable(hosts)) != list(range(size)):
        raise UsageError(
            f"hosts {[list(host) for host in hosts]} do not hold the ranks 0 to {size - 1} exactly once; "
            "put every rank on one host and leave out empty hosts"
        )
    return hosts


def neighbours_first(size: int, hosts: Hosts | None) -> list[int]:
    """All ranks in an order in which those of one host follow each other."""
    return list(chain.from_iterable(host_by_host(size, hosts)))


def text(schedule: Schedule) -> str:
    """The schedule for people: `0→1 +2`: 1 adds part 2 of 0 to its own; `0→1 =0:2`: takes parts 0 and 1."""
    lines = [f"size {schedule.size}, parts {schedule.parts}, rounds {len(schedule.rounds)}"]
    for number, transfers in enumerate(schedule.rounds, start=1):
        lines.append("   ".join([f"{number:3}", *map(_transfer_text, transfers)]))
    return "\n".join(lines)


def _transfer_text(transfer: Transfer) -> str:
    start, stop = transfer.parts.start, transfer.parts.stop
    parts = f"{start}" if stop == start + 1 else f"{start}:{stop}"
    return f"{transfer.source}→{transfer.target} {'+' if transfer.reduce else '='}{parts}"
