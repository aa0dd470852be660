"""When a server applies gathered gradients: at once, or when the workers know their norm over all servers."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Protocol

from manyhands.servers.process.group_update import GradientSum, GroupUpdate
from manyhands.servers.process.handlers import Reply
from manyhands.servers.protocol.consistency import Clocks
from manyhands.servers.protocol.messages import Norm


class Gate(Protocol):
    """Decides when complete updates are made."""

    defers: bool

    def admit(self, updates: Sequence[GroupUpdate]) -> Sequence[GroupUpdate] | None:
        """The updates to make now; None if the step is not made before its norm is known."""

    def norms(self, clocks: Clocks, worker: int) -> Iterator[Reply]:
        """The norm of a team's gradients, once the step of this worker's team has ended."""

    def release(self, team: int) -> list[GroupUpdate]:
        """The deferred updates of a team, whose norm is known now."""

    def withdraw(self) -> list[GroupUpdate]:
        """All deferred updates: their workers are gone."""


class OpenGate:
    """Makes every update at once."""

    defers = False

    def admit(self, updates: Sequence[GroupUpdate]) -> Sequence[GroupUpdate]:
        return updates

    def norms(self, clocks: Clocks, worker: int) -> Iterator[Reply]:
        yield from ()

    def release(self, team: int) -> list[GroupUpdate]:
        return []

    def withdraw(self) -> list[GroupUpdate]:
        return []


class NormGate:
    """Defers a team's updates until the team has put its norm over all servers together."""

    defers = True

    def __init__(self, server: int, gradient_sum: GradientSum) -> None:
        self._server = server
        self._sum = gradient_sum
        self._deferred: defaultdict[int, list[GroupUpdate]] = defaultdict(list)  # by team

    def admit(self, updates: Sequence[GroupUpdate]) -> Sequence[GroupUpdate] | None:
        for update in updates:
            self._deferred[update.team].append(update)
        return None if self._deferred else ()

    def norms(self, clocks: Clocks, worker: int) -> Iterator[Reply]:
        """For the first worker of those that pushed: it puts the norm over all servers together."""
        team = clocks.team(worker)
        deferred = self._deferred.get(team)
        if deferred and clocks.is_between_steps(team):
            square = sum(self._sum.square(update) for update in deferred)
            yield deferred[0].workers[0], Norm(server=self._server, square=square), None

    def release(self, team: int) -> list[GroupUpdate]:
        return self._deferred.pop(team, [])

    def withdraw(self) -> list[GroupUpdate]:
        deferred = [update for updates in self._deferred.values() for update in updates]
        self._deferred.clear()
        return deferred
