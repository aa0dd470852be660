"""What workers and servers must mean alike: where parameters lie, who owns what, which states there are."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.comm.transports.arena import Arena
from manyhands.replica.layout import Layout, Span
from manyhands.replica.parameters import lay_out_model, one_type, trained
from manyhands.replica.replica import SPAN_BYTES
from manyhands.replica.updates import vector_states
from manyhands.servers.memory import Memory
from manyhands.servers.ownership import GROUP_BYTES, Group, share_out
from manyhands.servers.party import Party


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The same on everyone who builds the same model and the same optimizer."""

    layout: Layout
    groups: tuple[Group, ...]
    dtype: torch.dtype
    states: tuple[str, ...]
    digest: int

    @property
    def spans(self) -> Sequence[Span]:
        return self.layout.spans

    def memory(self, arena: Arena, party: Party, number: int | None = None) -> Memory:
        """What the processes of one host have in common, of this party or of another."""
        return Memory(
            arena,
            length=self.layout.length,
            dtype=self.dtype,
            groups=len(self.groups),
            workers=party.seat.rows + party.seat.servers + party.count,  # and guests
            states=self.states,
            places=len(self.layout.places),
            party=party.number if number is None else number,
        )


def describe(
    model: nn.Module,
    optimizer: Optimizer,
    servers: int,
    group_bytes: int = GROUP_BYTES,
    every: Callable[[str], int] = lambda name: 1,
) -> Scheme:
    """Pure: without a message, from shapes and settings alone."""
    _, params = trained(model, optimizer)
    _, dtype = one_type(params)
    layout = lay_out_model(
        model, optimizer, span_bytes=min(SPAN_BYTES, group_bytes), lanes=servers, every=every
    )
    groups = share_out(layout, servers, dtype.itemsize, group_bytes)
    states = tuple(vector_states(optimizer))
    facts = (layout, [group.server for group in groups], str(dtype), states, type(optimizer).__name__)
    return Scheme(
        layout=layout, groups=groups, dtype=dtype, states=states, digest=zlib.crc32(repr(facts).encode())
    )
