"""A replica's state, whole on one worker and in parts on all: what checkpoints are made of, whatever the placement.

Names are those of a single worker (`model/…`, `optimizer/PARAMETER/STATE`, `kept/NAME`). The first worker of a
replica, its lead, puts the pieces of all together, and hands them out again: to another placement too.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from manyhands.placement.process_groups import ProcessGroups
from manyhands.replica.layout import Layout
from manyhands.replica.replica import Replica
from manyhands.replica.state.slice_of import TensorSlice
from manyhands.replica.state.transcoding import States

Tensors = dict[str, Tensor]


class _AssembledPart(msgspec.Struct, array_like=True):
    """One tensor that a worker has or wants: its name, its type, and where it lies in the whole one."""

    key: str
    dtype: str
    shape: list[int]
    cut: bool
    dim: int | None
    start: int
    stop: int
    padding: int
    blocks: int

    @property
    def piece(self) -> TensorSlice:
        return TensorSlice(
            shape=tuple(self.shape),
            cut=self.cut,
            dim=self.dim,
            start=self.start,
            stop=self.stop,
            padding=self.padding,
            blocks=self.blocks,
        )

    def empty(self, *, whole: bool) -> Tensor:
        shape = self.shape if whole else self.piece.own_shape
        return torch.empty(shape, dtype=getattr(torch, self.dtype))


def _part(key: str, piece: TensorSlice, dtype: torch.dtype) -> _AssembledPart:
    name = str(dtype).removeprefix("torch.")
    where = (piece.cut, piece.dim, piece.start, piece.stop, piece.padding, piece.blocks)
    return _AssembledPart(key, name, list(piece.shape), *where)


class Assembly:
    """Takes this replica's state apart and puts it together; `layout` is that of the whole model."""

    def __init__(self, groups: ProcessGroups, replica: Replica, layout: Layout) -> None:
        self._group = groups.model_parallel
        self._replica = replica
        self._layout = layout
        self._places = {place.name: place for place in layout.places}

    @property
    def leads(self) -> bool:
        return self._group.rank == 0

    def whole(self, own: Mapping[str, Tensor]) -> Tensors:
        """The pieces of all workers put together, on the lead; the others get nothing."""
        flat = {key for key in own if key.startswith("kept/")}
        pieces = {
            key: (value, self._piece(key, value))
            for key, value in own.items()
            if key not in flat and self._replica.part.counts(_parameter(key))
        }
        pieces |= {key: found for name in sorted(flat) for key, found in self._cut_kept(name, own[name])}
        offered = [_part(key, piece, value.dtype) for key, (value, piece) in pieces.items()]
        rows = self._group.gather(msgspec.json.encode(offered))
        transport = self._group.transport()
        if not self.leads:
            for value, _ in pieces.values():
                transport.send(0, _bytes(value.detach().contiguous())).wait()
            return {}
        found: Tensors = {}
        for rank, row in enumerate(rows):
            for part in msgspec.json.decode(row, type=list[_AssembledPart]):
                if rank == 0:
                    value = pieces[part.key][0].detach()
                else:
                    value = part.empty(whole=False)
                    transport.receive(rank, _bytes(value)).wait()
                if not part.cut:
                    found[part.key] = value
                else:
                    if part.key not in found:
                        found[part.key] = part.empty(whole=True)
                    part.piece.put(value, found[part.key])
        return self._join_kept(found)

    def own(self, whole: Mapping[str, Tensor]) -> Tensors:
        """The inverse: from the lead to each what is its part."""
        everything = self._spread_kept(whole) if self.leads else {}
        known = [_part(key, TensorSlice(shape=tuple(v.shape)), v.dtype) for key, v in everything.items()]
        told = msgspec.json.decode(
            self._group.gather(msgspec.json.encode(known))[0], type=list[_AssembledPart]
        )
        here = self._replica.part.tensors()
        wanted = []
        for part in told:
            name = _parameter(part.key)
            if part.key.startswith("kept/") and _kept_name(part.key) is None:
                wanted.append(part)
            elif name in here:
                piece = self._replica.part.piece(name, here[name])
                cut = piece if tuple(part.shape) == piece.shape else TensorSlice(shape=tuple(part.shape))
                wanted.append(_part(part.key, cut, getattr(torch, part.dtype)))
        rows = self._group.gather(msgspec.json.encode(wanted))
        transport = self._group.transport()
        own: Tensors = {}
        for rank, row in enumerate(rows):
            for part in msgspec.json.decode(row, type=list[_AssembledPart]):
                if self.leads:
                    value = part.piece.of(everything[part.key]).contiguous()
                    if rank:
                        transport.send(rank, _bytes(value)).wait()
                    else:
                        own[part.key] = value
                elif rank == self._group.rank:
                    own[part.key] = part.empty(whole=False)
                    transport.receive(0, _bytes(own[part.key])).wait()
        return self._gather_kept(own)

    def everywhere(self, whole: Mapping[str, Tensor]) -> Tensors:
        """What the lead has put together, on every worker of the replica."""
        known = [_part(key, TensorSlice(shape=tuple(v.shape)), v.dtype) for key, v in whole.items()]
        told = self._group.gather(msgspec.json.encode(known))[0]
        found: Tensors = {}
        for part in msgspec.json.decode(told, type=list[_AssembledPart]):
            value = whole[part.key].clone().contiguous() if self.leads else part.empty(whole=True)
            if value.numel():
                self._group.comm.copy_(value.view(-1))
            found[part.key] = value
        return found

    def states(self, own: States) -> States:
        """What every worker of the replica knows of the optimizer's state, by parameter name."""
        merged: States = {}
        for row in self._group.gather(msgspec.json.encode(own)):
            merged.update(msgspec.json.decode(row))
        return merged

    def _piece(self, key: str, value: Tensor) -> TensorSlice:
        """Where a tensor lies in the whole one; state of another shape than its parameter is never cut."""
        name = _parameter(key)
        piece = self._replica.part.piece(name, value)
        return piece if tuple(value.shape) == piece.own_shape else TensorSlice(shape=tuple(value.shape))

    # What a strategy keeps: flat vectors over all parameters, which each part has in its own order

    def _cut_kept(self, key: str, vector: Tensor) -> list[tuple[str, tuple[Tensor, TensorSlice]]]:
        layout, part = self._replica.layout, self._replica.part
        if vector.numel() != layout.length:
            return [(key, (vector, TensorSlice(shape=tuple(vector.shape))))] if self.leads else []
        found = []
        for place in layout.places:
            if part.counts(place.name):
                value = vector[place.start : place.stop].view(place.shape)
                found.append((f"{key}/{place.name}", (value, part.piece(place.name, value))))
        return found

    def _join_kept(self, found: Tensors) -> Tensors:
        """Flat vectors as a single worker would have them."""
        joined: Tensors = {}
        for key, value in found.items():
            name = _kept_name(key)
            if name is None:
                joined[key] = value
            else:
                vector = joined.setdefault(name, value.new_zeros(self._layout.length))
                place = self._places[_parameter(key)]
                vector[place.start : place.stop] = value.reshape(-1)
        return joined

    def _spread_kept(self, whole: Mapping[str, Tensor]) -> Tensors:
        spread: Tensors = {}
        for key, value in whole.items():
            if key.startswith("kept/") and value.numel() == self._layout.length:
                for place in self._layout.places:
                    spread[f"{key}/{place.name}"] = value[place.start : place.stop].view(place.shape)
            else:
                spread[key] = value
        return spread

    def _gather_kept(self, own: Tensors) -> Tensors:
        layout = self._replica.layout
        places = {place.name: place for place in layout.places}
        gathered: Tensors = {}
        for key, value in own.items():
            name = _kept_name(key)
            if name is None:
                gathered[key] = value
            elif _parameter(key) in places:
                vector = gathered.setdefault(name, value.new_zeros(layout.length))
                place = places[_parameter(key)]
                vector[place.start : place.stop] = value.reshape(-1)
        return gathered


def _parameter(key: str) -> str:
    """`model/NAME`, `optimizer/NAME/STATE`, `kept/VECTOR/NAME` → NAME."""
    words = key.split("/")
    return words[2] if words[0] == "kept" and len(words) > 2 else words[1]


def _kept_name(key: str) -> str | None:
    """`kept/VECTOR/NAME` → `kept/VECTOR`; None for everything else."""
    words = key.split("/")
    return "/".join(words[:2]) if words[0] == "kept" and len(words) > 2 else None


def _bytes(value: Tensor) -> Any:
    return value.view(-1).view(torch.uint8)
