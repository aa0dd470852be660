"""A shard of one server group among several: it tells its peers in the others what its updates have added."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from manyhands.servers.process.exchange import Exchange
from manyhands.servers.process.group_update import GroupUpdate
from manyhands.servers.process.handlers import Handler, Reply, Sender
from manyhands.servers.process.owned_groups import OwnedGroups
from manyhands.servers.process.shard import Shard, WrappedShard
from manyhands.servers.protocol.consistency import Clocks
from manyhands.servers.protocol.messages import ExchangeNow, Gain, HomeValues, Put


class ExchangingShard(WrappedShard):
    """A plain or a logged shard, with an exchange between server groups."""

    def __init__(self, inner: Shard, exchange: Exchange, groups: OwnedGroups) -> None:
        super().__init__(inner)
        self._exchange = exchange
        self._groups = groups
        self.handlers = {
            **self._and_then_put(self._begin),
            Gain: Handler(self._gain, self._vector_bytes, Sender.PEER),
            HomeValues: Handler(self._level, self._vector_bytes, Sender.PEER),
            ExchangeNow: Handler(exchange.meet),
        }

    def make(self, updates: Sequence[GroupUpdate], factor: float, rounds: int) -> None:
        super().make(updates, factor, rounds)
        self._tell(updates)

    def _tell(self, updates: Sequence[GroupUpdate]) -> None:
        for update in updates:
            if update.given:
                self._exchange.note(update.group.index)

    def peer_messages(self) -> Iterator[Reply]:
        return self._exchange.messages()

    def take_over(self, clocks: Clocks) -> Sequence[GroupUpdate]:
        self._exchange.take_over()
        updates = super().take_over(clocks)
        self._tell(updates)
        return updates

    def regroup(self, generation: int) -> None:
        super().regroup(generation)
        self._exchange.regroup()

    def reunite(self, peer: int) -> Iterator[Reply]:
        return self._exchange.reunite(peer)

    def _begin(self, put: Put) -> None:
        if put.vector == "params":
            self._exchange.begin(put.group)

    def _vector_bytes(self, message: Gain | HomeValues) -> int | None:
        return self._groups.group_bytes(message.group)

    def _gain(self, peer: int, message: Gain, payload: Tensor | None) -> Iterator[Reply]:
        yield from self._exchange.gain(peer, message, payload)
        self._groups.note_rows(message.group, None)

    def _level(self, peer: int, message: HomeValues, payload: Tensor | None) -> Iterator[Reply]:
        yield from self._exchange.level(peer, message, payload)
        self._groups.note_rows(message.group, None)
