"""The processes that speak with one server."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from manyhands.servers.process.handlers import Sender


@dataclass(frozen=True, kw_only=True)
class Participants:
    """By their numbers: the workers and servers that a server hears in one generation."""

    workers: frozenset[int]
    local: frozenset[int]
    """Processes of this host: their vectors lie in its memory."""
    peers: frozenset[int] = frozenset()
    """Counterparts of this server in other server groups; the server waits for them before it begins and ends."""
    backups: frozenset[int] = frozenset()
    """Servers that back up groups of this one, and those whose groups this one backs up."""
    generation: int = 0

    @property
    def all(self) -> frozenset[int]:
        return self.workers | self.peers | self.backups

    def may_send(self, number: int, sender: Sender) -> bool:
        """Whether a process is one of those that send messages of this kind."""
        if number in self.peers:
            return sender is Sender.PEER
        if number in self.backups:
            return sender is Sender.BACKUP
        return sender in (Sender.WORKER, Sender.FIRST_WORKER)

    def regrouped(self, workers: Sequence[int], generation: int) -> "Participants":
        """The same with the workers of a new generation, all on this host."""
        return replace(
            self,
            workers=frozenset(workers),
            local=self.peers.union(workers),
            backups=frozenset(),
            generation=generation,
        )
