"""A dispatcher around a plain shard, for tests that send a server messages without a port."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.replica.layout import Layout
from manyhands.replica.optimizer.updates import Updates
from manyhands.servers.process.dispatcher import Dispatcher
from manyhands.servers.process.exchanging_shard import ExchangingShard
from manyhands.servers.process.group_update import GradientReader
from manyhands.servers.process.norm_gate import NormGate, OpenGate
from manyhands.servers.process.owned_groups import OwnedGroups
from manyhands.servers.process.shard import PlainShard, Shard
from manyhands.servers.process.update_counters import UpdateCounters
from manyhands.servers.process.vectors import Vectors
from manyhands.servers.protocol.consistency import Clocks
from manyhands.servers.protocol.ownership import SpanGroup


def make_dispatcher(
    groups: Sequence[SpanGroup],
    layout: Layout,
    optimizer: Optimizer,
    params: Tensor,
    clocks: Clocks,
    *,
    local_grads: Callable[[int], Tensor],
    copies: Collection[int] = (),
    clips: bool = False,
    exchange: Any = None,
) -> Dispatcher:
    """That of server 0; with `clips` the server defers gathered gradients until their norm is known."""
    updates = Updates(optimizer, layout, params, allocate=lambda name: torch.zeros_like(params))
    versions = torch.zeros(1 + max(group.index for group in groups), dtype=torch.int64)
    owned = OwnedGroups(groups, {"params": params, **updates.vectors}, versions, copies)
    counters = UpdateCounters()
    plain = PlainShard(owned, layout.places, optimizer, updates, counters)
    shard: Shard = ExchangingShard(plain, exchange, owned) if exchange else plain
    return Dispatcher(
        shard,
        owned,
        clocks,
        gate=NormGate(0, plain.sum) if clips else OpenGate(),
        reader=GradientReader(owned.by_index, local_grads),
        vectors=Vectors(owned.parts(params)),
        counters=counters,
    )
