"""The model's parameters as views of one flat vector."""

import itertools
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.replica.layout import SPAN_BYTES, Layout
from manyhands.replica.memory import Memory
from manyhands.replica.optimizer.abilities import vector_states
from manyhands.replica.parameters import lay_out_params, one_type, sparse_ids
from manyhands.replica.part import Part
from manyhands.replica.state.transcoding import Values


class FlatModel:
    """The parameters that are here, laid out in `params`, and as long a vector `total` for the sum of gradients."""

    def __init__(self, part: Part, optimizer: Optimizer, memory: Memory, layout: Layout) -> None:
        self.part = part
        self.model = part.model
        self.optimizer = optimizer
        self.memory = memory
        self.layout = layout
        _, self.parameters = part.trained(optimizer)
        self.parameters.reverse()  # flat order is last parameter first
        self.device, self.dtype = one_type(self.parameters)
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
            views.append(self.constants[start : start + param.nbytes].view(param.dtype).view(param.shape))
        skip = 0 if self.memory.fills else len(self.parameters)
        with torch.no_grad():
            for param, view in list(zip([*self.parameters, *self._frozen], views, strict=True))[skip:]:
                if self.memory.leads:
                    view.copy_(param)
            self.memory.barrier()
            for param, view in zip([*self.parameters, *self._frozen], views, strict=True):
                param.data = view

    def _views(self) -> list[Tensor]:
        return [self.params[place.start : place.stop].view(place.shape) for place in self.layout.places]

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

    def given_states(self) -> Values:
        """The state that the user's optimizer already has, as far as it concerns this part."""
        states: dict[str, dict[str, Any]] = {}
        originals = self.part.originals(self.parameters)
        for param, original, place in zip(self.parameters, originals, self.layout.places, strict=True):
            piece = self.part.piece(place.name, param)
            for name, value in self.optimizer.state.get(original, {}).items():
                if isinstance(value, Tensor) and tuple(value.shape) == piece.shape:
                    value = piece.of(value)
                states.setdefault(place.name, {})[name] = value
        return states

    # With running statistics, as one vector

    def to_flat(self) -> Tensor:
        """The model as one vector, its running statistics included."""
        return torch.cat([self.params, *(buffer.to(self.params).view(-1) for buffer in self._statistics())])

    def load_flat(self, flat: Tensor) -> None:
        """Become the model that `to_flat` gave, here or on another worker."""
        buffers = self._statistics()
        parts = flat.split([len(self.params), *(buffer.numel() for buffer in buffers)])
        for target, part in zip([self.params, *buffers], parts, strict=True):
            target.copy_(part.view(target.shape))

    def _statistics(self) -> list[Tensor]:
        return [buffer for buffer in self.part.buffers() if buffer.is_floating_point()]


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
