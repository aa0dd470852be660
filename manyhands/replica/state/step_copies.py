"""What a step changes or reads beside the flat vectors, after each of the last two steps, in memory of the host.

A pass changes buffers, as batch norm its statistics, before it is known whether its step counts. When a worker dies,
each worker that is left puts back the buffers of the last step that counts. A worker that takes over a part finds there
the buffers of the dead one, and the settings of the optimizer with which it has to finish that step.
"""

from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.replica.optimizer.hyper_parameters import NamedNumbers, named_numbers, set_named_numbers
from manyhands.replica.state.buffers import dense

Allocate = Callable[[int, torch.dtype], Tensor]

_ROOM_BYTES = 1 << 16  # for the settings of an optimizer


class StepCopies:
    """Those of the worker `mine` of a team, whose memory `allocate` gives to all of them in the same order.

    `buffers` says which tensors they are. Their copies are made as long as their sizes stay.
    """

    def __init__(
        self,
        buffers: Callable[[], Sequence[Tensor]],
        optimizer: Optimizer,
        allocate: Allocate,
        *,
        workers: int,
        mine: int,
    ) -> None:
        self._buffers, self._optimizer = buffers, optimizer
        self._sizes = [part.nbytes for part in dense(buffers())]
        # By worker and copy: of which step it is, plus 1; and how many bytes of settings there are.
        self._heads = allocate(4 * workers, torch.int64).view(workers, 2, 2)[mine]
        self._settings = allocate(2 * workers * _ROOM_BYTES, torch.uint8).view(workers, 2, -1)[mine].numpy()
        self._copies = [
            allocate(2 * workers * size, torch.uint8).view(workers, 2, size)[mine] for size in self._sizes
        ]
        self._written = [b"", b""]

    def make(self, step: int) -> None:
        """All passes of a step are made, and it may yet be undone: the copy of the step before stays."""
        slot, parts = step % 2, self._parts()
        if parts is None:
            return
        if self._heads[slot, 0] != step + 1:
            self._heads[slot, 0] = 0
        for copy, part in zip(self._copies, parts, strict=True):
            copy[slot].copy_(part.detach().reshape(-1).view(torch.uint8))
        settings = msgspec.json.encode(named_numbers(self._optimizer))
        if settings != self._written[slot] and len(settings) <= _ROOM_BYTES:
            self._settings[slot, : len(settings)] = memoryview(settings)
            self._heads[slot, 1] = len(settings)
            self._written[slot] = settings
        self._heads[slot, 0] = step + 1

    def put_back(self, step: int) -> None:
        """The buffers are again what they were after a step."""
        slot, parts = step % 2, self._parts()
        if parts is None or self._heads[slot, 0] != step + 1:
            return
        with torch.no_grad():
            for copy, part in zip(self._copies, parts, strict=True):
                part.copy_(copy[slot].clone().view(part.dtype).view(part.shape))

    def take_settings(self, step: int) -> None:
        """The optimizer has the numbers with which a step was made."""
        slot = step % 2
        if self._heads[slot, 0] == step + 1 and (length := int(self._heads[slot, 1])):
            found = msgspec.json.decode(self._settings[slot, :length].tobytes(), type=NamedNumbers)
            set_named_numbers(self._optimizer, found)

    def _parts(self) -> list[Tensor] | None:
        parts = dense(self._buffers())
        return parts if [part.nbytes for part in parts] == self._sizes else None
