"""What workers and servers must mean alike: where parameters lie, who owns what, which states there are."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.comm.transports.arena import Arena
from manyhands.errors import UsageError
from manyhands.replica.layout import SPAN_BYTES, Layout, Span
from manyhands.replica.optimizer.abilities import vector_states
from manyhands.replica.parameters import common_type, lay_out_params, sparse_ids, trained
from manyhands.replica.state.slice_of import TensorSlice
from manyhands.servers.protocol.ownership import GROUP_BYTES, LOTS, SpanGroup, assign, share_out
from manyhands.servers.protocol.parts import Held
from manyhands.servers.protocol.server_group import ServerGroup
from manyhands.servers.transport.host_memory import HostMemory, Sizes


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The same in every process that builds the same model and the same optimizer."""

    layout: Layout
    groups: tuple[SpanGroup, ...]
    dtype: torch.dtype
    states: tuple[str, ...]
    digest: int
    pieces: Mapping[str, TensorSlice] = field(default_factory=dict)
    """Where replicas are in parts: what of each parameter this part has."""

    def assigned(self, group: ServerGroup, copies: int) -> "Scheme":
        """The same with the servers of a generation as owners, where servers come and go."""
        rank_info = group.rank_info
        return replace(self, groups=assign(self.groups, rank_info.hosts[rank_info.workers :], copies))

    @property
    def spans(self) -> Sequence[Span]:
        return self.layout.spans

    def memory(self, arena: Arena, group: ServerGroup, number: int | None = None) -> HostMemory:
        """What the processes of one host have in common, of this server group or of another."""
        rows = group.rank_info.workers if group.rank_info.address else group.rank_info.rows
        sizes = Sizes(
            length=self.layout.length,
            dtype=self.dtype,
            groups=len(self.groups),
            places=len(self.layout.places),
            states=self.states,
            workers=rows + group.rank_info.servers + group.count,  # and peer servers
        )
        return HostMemory(
            arena,
            sizes,
            server_group=group.number if number is None else number,
            generation=group.rank_info.generation if group.rank_info.address else 0,
            session=group.session,
        )


def describe(
    model: nn.Module,
    optimizer: Optimizer,
    servers: int,
    group_bytes: int = GROUP_BYTES,
    every: Callable[[str], int] = lambda name: 1,
    held: Sequence[Held] | None = None,
) -> Scheme:
    """Pure: without a message, from shapes and settings alone; `held` is a part of the model, else it is all of it."""
    names, originals = trained(model, optimizer)
    _, dtype = common_type(originals)
    params: Sequence[Tensor] = originals
    sparse = sparse_ids(model)
    pieces: dict[str, TensorSlice] = {}
    if held is not None:
        known = dict(zip(names, originals, strict=True))
        names, pieces = [one.name for one in held], {one.name: one.piece for one in held}
        originals = [known[name] for name in names]
        params = [torch.empty(one.piece.own_shape, dtype=dtype, device="meta") for one in held]
        sparse = {id(p) for p, original in zip(params, originals, strict=True) if id(original) in sparse}
    layout = lay_out_params(
        names,
        params,
        optimizer,
        originals=originals,
        sparse=sparse,
        span_bytes=min(SPAN_BYTES, group_bytes),
        lanes=servers,
        every=every,
    )
    groups = share_out(layout, servers, dtype.itemsize, group_bytes)
    states = tuple(vector_states(optimizer))
    facts = (layout, [group.server for group in groups], str(dtype), states, type(optimizer).__name__)
    return Scheme(
        layout=layout,
        groups=groups,
        dtype=dtype,
        states=states,
        digest=zlib.crc32(repr(facts).encode()),
        pieces=pieces,
    )


def elastic_scheme(model: nn.Module, optimizer: Optimizer) -> Scheme:
    """The scheme where servers come and go with their hosts: the same however many there are."""
    scheme = describe(model, optimizer, LOTS)
    if any(place.rows for place in scheme.layout.places):
        raise UsageError(
            "servers on hosts that come and go cannot keep tables of which only some rows travel; use sparse=False, "
            "or torchrun, mpirun or Slurm instead of --hosts"
        )
    return scheme
