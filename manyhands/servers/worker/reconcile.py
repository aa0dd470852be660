"""A generation begins: one worker sees to it that all servers have made the same steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from manyhands.servers.protocol.messages import (
    AskBackup,
    AskContent,
    AskStatus,
    BackedUp,
    Begin,
    Content,
    Done,
    GiveContent,
    GoBack,
    Reconcile,
    Status,
    Used,
)
from manyhands.servers.protocol.ownership import SpanGroup
from manyhands.servers.worker.server_connections import ServerConnections


@dataclass(frozen=True, kw_only=True)
class Reconciled:
    """What elastic servers have at the beginning of a generation."""

    rounds: int
    """Steps that were gathered from all workers and are in every group."""
    lost: int = 0
    """Elements that no server has any more."""
    used: Mapping[int, Used] = field(default_factory=dict)
    """By worker of the generation `used_in`: how far it had come with its data in gradients that every group has."""
    used_in: int = 0


def reconcile(connections: ServerConnections) -> int:
    """Servers that stay: the step in flight counts on all of them, or on none. Returns how many steps count.

    If any server has applied a step, all have got all of it; and if all have got all, it may as well count.
    """
    statuses = connections.ask(lambda number: AskStatus(number=number), Status)
    rounds = max(one.rounds for one in statuses)
    behind = [one.rounds < rounds for one in statuses]
    counts = not any(behind) and all(one.is_complete for one in statuses)
    factor = min(one.factor for one in statuses if one.rounds == rounds)  # of one that had nothing: 1
    for server, is_behind in enumerate(behind):
        message = Reconcile(number=next(connections.numbers), counts=counts or is_behind, factor=factor)
        connections.send(server, message)
    for server in connections.servers:
        connections.answer_of(server, Done)
    return rounds + counts


class ElasticReconciliation:
    """Servers that come and go with their hosts: each gets what it is to have, from one that has it."""

    def __init__(self, connections: ServerConnections, groups: Sequence[SpanGroup]) -> None:
        self._connections = connections
        self._groups = groups

    def reconcile(self, *, gathers: bool) -> Reconciled:
        """Every server gets what it is to have, and all have made the same steps.

        Where gradients are gathered, no group is more than one step ahead of another, and one that is goes back: if any
        worker was told of a step, every group has it somewhere.
        """
        holds = self._holds()
        rounds = min(self._newest(holds)) if gathers else 0
        if rounds >= 0 and gathers:
            self._connections.ask(lambda number: GoBack(number=number, count=rounds), Done)
            holds = self._holds()
        newest = self._newest(holds)
        lost = sum(group.length for group, most in zip(self._groups, newest, strict=True) if most < 0)
        if lost:
            return Reconciled(rounds=0, lost=lost)
        used_in = max(one.used_in for one in holds)
        used: list[dict[int, Used]] = []
        for group in self._groups:
            counts = [one.counts.get(group.index, -1) for one in holds]
            source = counts.index(max(counts))
            is_newest = holds[source].used_in == used_in
            used.append(holds[source].used.get(group.index, {}) if is_newest else {})
            for target in {group.server, group.copy} - {None}:
                if target is not None and counts[target] < counts[source]:
                    self._transfer(group, source, target, holds[source])
        self._begin()
        workers = {worker for row in used for worker in row}
        least = {worker: min(row.get(worker, ()) for row in used) for worker in workers}
        return Reconciled(rounds=rounds, used=least, used_in=used_in)

    def copy(self) -> None:
        """The servers have been given other values: the copies get them from the owners."""
        holds = self._holds()
        for group in self._groups:
            if group.copy is not None:
                self._transfer(group, group.server, group.copy, holds[group.server])
        self._begin()

    def _begin(self) -> None:
        self._connections.ask(lambda number: Begin(number=number), Done)

    def _holds(self) -> list[BackedUp]:
        return self._connections.ask(lambda number: AskBackup(number=number), BackedUp)

    def _newest(self, holds: Sequence[BackedUp]) -> list[int]:
        """By group: the most updates that any server has of it; -1: none has it."""
        return [max(one.counts.get(group.index, -1) for one in holds) for group in self._groups]

    def _transfer(self, group: SpanGroup, source: int, target: int, held: BackedUp) -> None:
        connections = self._connections
        connections.send(source, AskContent(number=next(connections.numbers), group=group.index))
        content = connections.answer_of(source, Content).content
        message = GiveContent(
            number=next(connections.numbers),
            group=group.index,
            content=content,
            count=held.counts[group.index],
            used=held.used.get(group.index, {}),
            used_in=held.used_in,
        )
        connections.send(target, message)
        connections.answer_of(target, Done)
