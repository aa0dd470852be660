"""How a server makes updates of the groups that it owns.

Every shard has one interface. The plain one runs the optimizer. Others wrap it: `LoggedShard` writes down what it is
about to do, `BackedUpShard` has every update made by a second server too, `ExchangingShard` tells other server groups.
No sockets here: messages go in, answers come out, each with the vector that belongs to it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from manyhands import telemetry
from manyhands.replica.layout import Place, Span
from manyhands.replica.optimizer.hyper_parameters import NamedNumbers, set_named_numbers
from manyhands.replica.optimizer.updates import Updates
from manyhands.replica.state import packing
from manyhands.servers.process.group_update import GradientSum, GroupUpdate
from manyhands.servers.process.handlers import Handler, Handlers, Reply, Sender
from manyhands.servers.process.owned_groups import OwnedGroups
from manyhands.servers.process.update_counters import UpdateCounters
from manyhands.servers.protocol.consistency import Clocks, OutOfTurn
from manyhands.servers.protocol.messages import (
    AskState,
    Done,
    GiveState,
    OptimizerState,
    Pull,
    Put,
    states,
)

Write = Callable[[Span, Tensor, frozenset[int]], None]


class Shard(Protocol):
    """Makes updates of a server's groups; what a plain shard has no use for, it answers with nothing."""

    handlers: Handlers
    """Messages about values and optimizer state, and those of this kind of shard."""

    @property
    def factor(self) -> float:
        """By what the shard multiplied the gradients of its last updates."""

    def make(self, updates: Sequence[GroupUpdate], factor: float, rounds: int) -> None:
        """Make all updates of a round, or that of one push; there may be none in a round."""

    def set_optimizer(self, settings: NamedNumbers) -> None:
        """The first worker's optimizer has other settings now."""

    def forwards(self) -> Iterator[Reply]:
        """Updates for the servers that back this shard up."""

    def peer_messages(self) -> Iterator[Reply]:
        """Messages for the peers in other server groups."""

    def sent(self, group: int) -> int:
        """How many updates of a group the shard has sent to a backup."""

    def is_backed_up(self, group: int, sent: int) -> bool:
        """Whether the backup has made so many updates of a group."""

    def confirm(self, group: int) -> None:
        """The backup has made one more update of a group."""

    def noted(self, rounds: int, clocks: Clocks) -> list[GroupUpdate]:
        """Updates of a round that gone workers noted, and whose messages this server never got."""

    def take_over(self, clocks: Clocks) -> Sequence[GroupUpdate]:
        """Go on where a dead server stopped; returns the updates that this had to make."""

    def regroup(self, generation: int) -> None:
        """Workers of a new generation come."""

    def reunite(self, peer: int) -> Iterator[Reply]:
        """A server of another server group is there, perhaps again: the messages that it may have missed."""


class PlainShard(Shard):
    """Runs the optimizer on the groups of one server."""

    def __init__(
        self,
        groups: OwnedGroups,
        places: Sequence[Place],
        optimizer: Optimizer,
        updates: Updates,
        counters: UpdateCounters,
    ) -> None:
        self.groups = groups
        self.optimizer = optimizer
        self.updates = updates
        self.sum = GradientSum(groups.by_index, places, groups.dtype)
        self._places = places
        self._counters = counters
        self._factor = 1.0
        self.handlers = {
            Pull: groups.pull,
            Put: Handler(self._put, self._put_bytes, Sender.FIRST_WORKER),
            AskState: Handler(self._state),
            GiveState: Handler(self._restore, sender=Sender.FIRST_WORKER),
        }

    @property
    def factor(self) -> float:
        return self._factor

    def set_factor(self, factor: float) -> None:
        self._factor = factor

    def make(self, updates: Sequence[GroupUpdate], factor: float, rounds: int) -> None:
        self._factor = factor
        for update in updates:
            if update.given:
                self.write(update, update.group.spans, factor, self.updates.apply)

    def write(self, update: GroupUpdate, spans: Iterable[Span], factor: float, write: Write) -> None:
        """Make an update of some spans of its group by `write`, and count it."""
        index = update.group.index
        with telemetry.timed("update"):
            for span in spans:
                total = self.sum.of(update, span, factor)
                write(span, total, update.skipped)
                if total.is_sparse:
                    only = self.updates.keeps_to_rows(self._places[span.places[0]].group)
                    self.groups.note_rows(index, total.indices()[0] if only else None)
        self.count(update)

    def count(self, update: GroupUpdate) -> None:
        index = update.group.index
        version = self.groups.version(index)
        self._counters.note(update, version)
        self.groups.set_version(index, version + 1)

    def set_optimizer(self, settings: NamedNumbers) -> None:
        set_named_numbers(self.optimizer, settings)

    def forwards(self) -> Iterator[Reply]:
        return iter(())

    def peer_messages(self) -> Iterator[Reply]:
        return iter(())

    def sent(self, group: int) -> int:
        return 0

    def is_backed_up(self, group: int, sent: int) -> bool:
        return True

    def confirm(self, group: int) -> None:
        raise OutOfTurn(f"no server backs up group {group}")

    def noted(self, rounds: int, clocks: Clocks) -> list[GroupUpdate]:
        return []

    def take_over(self, clocks: Clocks) -> Sequence[GroupUpdate]:
        return ()

    def regroup(self, generation: int) -> None:
        pass

    def reunite(self, peer: int) -> Iterator[Reply]:
        return iter(())

    def _put(self, worker: int, message: Put, payload: Tensor | None) -> Iterator[Reply]:
        self.groups.put(message, payload)
        yield worker, Done(number=message.number), None

    def _put_bytes(self, message: Put) -> int | None:
        return self.groups.group_bytes(message.group, message.vector)

    def _state(self, worker: int, message: AskState, payload: Tensor | None) -> Iterator[Reply]:
        yield worker, OptimizerState(states=packing.pack(self.updates.export(self.groups.spans))), None

    def _restore(self, worker: int, message: GiveState, payload: Tensor | None) -> Iterator[Reply]:
        self.updates.restore(self.groups.spans, states(message.states))
        yield worker, Done(number=message.number), None


class WrappedShard(Shard):
    """Does what the shard inside does; its subclasses add to that."""

    def __init__(self, inner: Shard) -> None:
        self._inner = inner
        self.handlers = inner.handlers

    @property
    def factor(self) -> float:
        return self._inner.factor

    def make(self, updates: Sequence[GroupUpdate], factor: float, rounds: int) -> None:
        self._inner.make(updates, factor, rounds)

    def set_optimizer(self, settings: NamedNumbers) -> None:
        self._inner.set_optimizer(settings)

    def forwards(self) -> Iterator[Reply]:
        return self._inner.forwards()

    def peer_messages(self) -> Iterator[Reply]:
        return self._inner.peer_messages()

    def sent(self, group: int) -> int:
        return self._inner.sent(group)

    def is_backed_up(self, group: int, sent: int) -> bool:
        return self._inner.is_backed_up(group, sent)

    def confirm(self, group: int) -> None:
        self._inner.confirm(group)

    def noted(self, rounds: int, clocks: Clocks) -> list[GroupUpdate]:
        return self._inner.noted(rounds, clocks)

    def take_over(self, clocks: Clocks) -> Sequence[GroupUpdate]:
        return self._inner.take_over(clocks)

    def regroup(self, generation: int) -> None:
        self._inner.regroup(generation)

    def reunite(self, peer: int) -> Iterator[Reply]:
        return self._inner.reunite(peer)

    def _and_then_put(self, after: Callable[[Put], None]) -> Handlers:
        """The handlers of the shard inside, and of `Put` one that calls `after` with the message."""
        put = self._inner.handlers[Put]

        def reply(worker: int, message: Put, payload: Tensor | None) -> Iterator[Reply]:
            for answer in put.reply(worker, message, payload):
                after(message)
                yield answer

        return {**self._inner.handlers, Put: Handler(reply, put.vector_bytes, put.sender)}
