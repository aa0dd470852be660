"""The one place in which a server's shard is chosen: plain, logged, exchanging, backed up."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from manyhands.errors import PeerLost
from manyhands.replica.optimizer.updates import Updates
from manyhands.servers.process.backed_up_shard import BackedUpShard
from manyhands.servers.process.backup import Backup
from manyhands.servers.process.dispatcher import Dispatcher
from manyhands.servers.process.exchange import make_exchange
from manyhands.servers.process.exchanging_shard import ExchangingShard
from manyhands.servers.process.group_update import GradientReader
from manyhands.servers.process.logged_shard import LoggedShard, LoggedVectors
from manyhands.servers.process.norm_gate import Gate, NormGate, OpenGate
from manyhands.servers.process.owned_groups import OwnedGroups
from manyhands.servers.process.server_position import ServerPosition
from manyhands.servers.process.shard import PlainShard, Shard
from manyhands.servers.process.update_counters import UpdateCounters
from manyhands.servers.process.vectors import Vectors
from manyhands.servers.process.write_ahead_log import WriteAheadLog
from manyhands.servers.protocol.consistency import Clocks


def serve_from_start(
    position: ServerPosition, optimizer: Optimizer, given: Mapping[str, Mapping[str, Any]], *, survives: bool
) -> Dispatcher:
    """For a server that stays; with `survives`, and where it can be, a new server goes on with it if this one dies.

    `given` is the state that the user's optimizer has when the run begins, by parameter.
    """
    group, scheme, memory = position.group, position.scheme, position.memory
    is_kept = survives and position.can_be_replaced
    if memory.had_a_server(position.index) and not is_kept:
        raise PeerLost(f"server {position.index} died, and its state died with it")
    updates = Updates(
        optimizer,
        scheme.layout,
        memory.params,
        allocate=memory.state,
        common=memory if is_kept else None,
        exact=len(position.workers) == 1,
    )
    log = _log(position, optimizer, updates) if is_kept else None
    parts = _Parts.of(position, optimizer, updates, memory.params, UpdateCounters())
    if log is None or not log.has_begun:
        updates.take_over(parts.groups.spans, given)
    shard: Shard = parts.plain
    vectors = Vectors(parts.groups.parts(memory.params))
    if log is not None:
        shard = LoggedShard(parts.plain, log, parts.reader, position.service.rule)
        vectors = LoggedVectors(parts.groups.parts(memory.params), parts.groups.parts(log.before), log)
    if group.count > 1:
        every = position.service.rule.exchange_every
        exchange = make_exchange(group, position.arena, scheme, every, memory, is_kept=is_kept)
        shard = ExchangingShard(shard, exchange, parts.groups)
    if log is not None and log.has_begun:
        shard.take_over(parts.clocks)
    elif log is not None:
        log.begin()
    return parts.dispatcher(position, shard, vectors)


def serve_a_generation(
    position: ServerPosition,
    optimizer: Optimizer,
    backup: Backup,
    counters: UpdateCounters,
    number_of: Callable[[int], int],
) -> Dispatcher:
    """For an elastic server, in one generation; what it has lies in `backup`."""
    params = backup.vectors["params"]
    parts = _Parts.of(position, optimizer, backup.updates, params, counters)
    copied = [group for group in position.scheme.groups if group.copy == position.index]
    shard = BackedUpShard(parts.plain, backup, copied, number_of)
    return parts.dispatcher(position, shard, Vectors(parts.groups.parts(params)))


@dataclass(frozen=True)
class _Parts:
    """What every kind of shard is made of."""

    groups: OwnedGroups
    plain: PlainShard
    clocks: Clocks
    reader: GradientReader
    counters: UpdateCounters

    @classmethod
    def of(
        cls,
        position: ServerPosition,
        optimizer: Optimizer,
        updates: Updates,
        params: Tensor,
        counters: UpdateCounters,
    ) -> "_Parts":
        scheme, rule, workers = position.scheme, position.service.rule, position.workers
        groups = OwnedGroups(
            [group for group in scheme.groups if group.server == position.index],
            {"params": params, **updates.vectors},
            position.memory.versions(len(scheme.groups)),
            copies=[rank for rank in workers if not position.group.computes_in_place(rank, rule)],
        )
        return cls(
            groups=groups,
            plain=PlainShard(groups, scheme.layout.places, optimizer, updates, counters),
            clocks=Clocks(rule, workers, in_place=bool(position.local_workers)),
            reader=GradientReader(groups.by_index, position.memory.grads),
            counters=counters,
        )

    def dispatcher(self, position: ServerPosition, shard: Shard, vectors: Vectors) -> Dispatcher:
        service = position.service
        gate: Gate = OpenGate()
        if service.clip_norm is not None and service.rule.gathers:
            gate = NormGate(position.index, self.plain.sum)
        return Dispatcher(
            shard,
            self.groups,
            self.clocks,
            gate=gate,
            reader=self.reader,
            vectors=vectors,
            counters=self.counters,
        )


def _log(position: ServerPosition, optimizer: Optimizer, updates: Updates) -> WriteAheadLog:
    return WriteAheadLog(
        position.memory,
        position.scheme.layout,
        [position.memory.params, *updates.vectors.values()],
        updates.numbers,
        optimizer,
        servers=position.group.rank_info.servers,
        server=position.index,
    )
