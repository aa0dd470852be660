"""The model's parameters as views of one flat vector."""

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.replica.layout import SPAN_BYTES, Layout, own_storage
from manyhands.replica.memory import Memory
from manyhands.replica.optimizer.abilities import vector_states
from manyhands.replica.parameters import common_type, lay_out_params, sparse_ids
from manyhands.replica.part import Part
from manyhands.replica.state.buffers import dense
from manyhands.replica.state.live import LiveState
from manyhands.replica.state.transcoding import Values


class FlatModel:
    """The parameters that are here, laid out in `params`, and as long a vector `total` for the sum of gradients.

    Parameters of several types are there bit by bit: such a vector may be copied, and only `total` has numbers.
    """

    def __init__(self, part: Part, optimizer: Optimizer, memory: Memory, layout: Layout) -> None:
        self.part = part
        self.model = part.model
        self.optimizer = optimizer
        self.memory = memory
        self.layout = layout
        _, self.parameters = part.trained(optimizer)
        self.parameters.reverse()  # flat order is last parameter first
        self.device, self.dtype = common_type(self.parameters)
        self.types = [param.dtype for param in self.parameters]
        length = layout.length
        memory.require(length * self.dtype.itemsize, 0 if memory.is_served else len(vector_states(optimizer)))
        self.params = memory.params(length, self.dtype)
        self.total = memory.gradients(length, self.dtype)
        self._frozen = part.frozen({id(param) for param in self.parameters})
        self._move_in()

    def _move_in(self) -> None:
        """The first worker's values become everyone's, and the model's parameters become views of them."""
        edges = list(itertools.accumulate((-(-p.nbytes // 64) * 64 for p in self._frozen), initial=0))
        self.constants = self.memory.common(
            edges[-1], torch.uint8
        )  # frozen parameters: one copy per host as well
        views = self._views()
        for param, start in zip(self._frozen, edges, strict=False):
            views.append(
                own_storage(self.constants[start : start + param.nbytes].view(param.dtype), param.shape)
            )
        skip = 0 if self.memory.fills else len(self.parameters)
        with torch.no_grad():
            for param, view in list(zip([*self.parameters, *self._frozen], views, strict=True))[skip:]:
                if self.memory.leads:
                    view.copy_(param)
            self.memory.barrier()
            for param, view in zip([*self.parameters, *self._frozen], views, strict=True):
                param.data = view

    def _views(self) -> list[Tensor]:
        """Each parameter in its own type, which may be shorter than that of the vector: then it begins its place, and
        does not fill it."""
        return [
            own_storage(
                self.params[place.start : place.stop].view(dtype)[: place.stop - place.start], place.shape
            )
            for dtype, place in zip(self.types, self.layout.places, strict=True)
        ]

    def values(self) -> Iterator[Tensor]:
        """The trained parameters as real numbers, in as few pieces as their types allow."""
        pieces = self._views() if any(dtype != self.dtype for dtype in self.types) else [self.params]
        for piece in pieces:
            if piece.numel():
                yield torch.view_as_real(piece) if piece.is_complex() else piece

    def take_back(self) -> None:
        """The model's parameters are here again, after another replica had them."""
        for param, view in zip(self.parameters, self._views(), strict=True):
            param.data = view

    def release(self) -> None:
        """Leave the model usable by itself: its parameters keep their values in ordinary memory."""
        with torch.no_grad():
            for param in [*self.parameters, *self.part.frozen({id(param) for param in self.parameters})]:
                param.data = param.data.clone()
        self.memory.release()

    def given_states(self, state: Mapping[Any, Mapping[str, Any]]) -> Values:
        """A state that the user's optimizer has, as far as it concerns this part."""
        states: dict[str, dict[str, Any]] = {}
        if isinstance(state, LiveState):  # what it shows is with the replica of the generation before
            return states
        originals = self.part.originals(self.parameters)
        for param, original, place in zip(self.parameters, originals, self.layout.places, strict=True):
            piece = self.part.piece(place.name, param)
            for name, value in state.get(original, {}).items():
                if isinstance(value, Tensor) and tuple(value.shape) == piece.shape:
                    value = piece.of(value)
                states.setdefault(place.name, {})[name] = value
        return states

    # With running statistics, as one vector

    def to_flat(self) -> Tensor:
        """The model as one vector, its running statistics included."""
        return torch.cat(
            [self.params, *(buffer.to(self.params).reshape(-1) for buffer in self._statistics())]
        )

    def load_flat(self, flat: Tensor) -> None:
        """Become the model that `to_flat` gave, here or on another worker."""
        buffers = self._statistics()
        parts = flat.split([len(self.params), *(buffer.numel() for buffer in buffers)])
        for target, part in zip([self.params, *buffers], parts, strict=True):
            target.copy_(part.view(target.shape))

    def _statistics(self) -> list[Tensor]:
        return [part for part in dense(self.part.buffers()) if part.is_floating_point()]


def lay_out_part(part: Part, optimizer: Optimizer, *, lanes: int, factored: Collection[int] = ()) -> Layout:
    """Where the parameters of a part lie; matrices whose ids are in `factored` may be cut between rows."""
    names, params = part.trained(optimizer)
    return lay_out_params(
        names,
        params,
        optimizer,
        originals=part.originals(params),
        sparse=sparse_ids(part.model),
        span_bytes=SPAN_BYTES,
        lanes=lanes,
        factored=factored,
    )
