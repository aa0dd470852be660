"""The part of a worker that computes a replica together with others: what it holds, and what they agree on."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.placement.standing import Standing
from manyhands.replica.part import Loss, Part
from manyhands.replica.parameters import trained
from manyhands.replica.piece import Piece


class Crew(Part):
    """Some of a model's tensors, whole or in pieces; the others are given up."""

    spread = True

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        standing: Standing,
        *,
        held: set[int],
        pieces: Mapping[int, Piece] | None = None,
    ) -> None:
        super().__init__(model, loss)
        self.standing = standing
        self._held = held  # the ids of the parameters and buffers that are here
        self._pieces = dict(pieces or {})  # of those that are cut
        self._shapes = {name: tuple(value.shape) for name, value in model.state_dict(keep_vars=True).items()}
        self._ids = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if id(tensor) not in held:
                    tensor.data = tensor.new_empty(0)
                elif id(tensor) in self._pieces:
                    tensor.data = self._pieces[id(tensor)].of(tensor.data).clone()

    def trained(self, optimizer: Optimizer) -> tuple[list[str], list[nn.Parameter]]:
        names, params = trained(self.model, optimizer)
        here = [(name, param) for name, param in zip(names, params, strict=True) if id(param) in self._held]
        return [name for name, _ in here], [param for _, param in here]

    def frozen(self, known: set[int]) -> list[nn.Parameter]:
        return [param for param in super().frozen(known) if id(param) in self._held]

    def buffers(self) -> list[Tensor]:
        return [buffer for buffer in super().buffers() if id(buffer) in self._held]

    def tensors(self) -> dict[str, Tensor]:
        values = self.model.state_dict(keep_vars=True)
        return {name: value.detach() for name, value in values.items() if id(value) in self._held}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        own = self.tensors()
        if missing := sorted(own.keys() - saved.keys()):
            raise RuntimeError(f"missing: {', '.join(missing)}")
        for name, value in own.items():
            if value.shape != saved[name].shape:
                raise RuntimeError(f"{name} has the shape {tuple(saved[name].shape)}, not {tuple(value.shape)}")
            value.copy_(saved[name])

    def become_whole(self, tensors: Mapping[str, Tensor]) -> None:
        for name, value in self.model.state_dict(keep_vars=True).items():
            value.data = tensors[name]

    def piece(self, name: str, value: Tensor) -> Piece:
        return self._pieces.get(self._ids[name], Piece(shape=self._shapes[name]))

    def counts(self, name: str) -> bool:
        """Of the ways of a stage, all have a slice of what is cut, and the first speaks for what is not."""
        return self.standing.position.way == 0 or self._ids[name] in self._pieces

    def whole_norm(self, norm: Tensor) -> Tensor:
        rows = self.standing.crew.exchange([float(norm) ** 2])
        return norm.new_tensor(sum(row[0] for row in rows) ** 0.5)
