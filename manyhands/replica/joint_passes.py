"""Passes in the middle of which workers meet: which of them compute it, and what they show each other.

Every worker says before a step how many batches it computes. The first of each are one pass, then the second ones, and
so on; a worker that has no more takes no part, and gets the running statistics later. At the end of a pass all that
computed it meet once more, so that layers which are not called equally often end in an error.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from manyhands.cluster.worker.world import World
from manyhands.comm.row_table import RowTable
from manyhands.errors import UsageError
from manyhands.replica.state.buffers import home, put
from manyhands.replica.sync_norm import BACKWARD, SyncedLayer, put_in, take_out

_END = 0
_LAYERS = 1 << 16  # more than those of a session
_NOTHING = torch.zeros(0, dtype=torch.float64)


class JointPasses:
    """Those of all sessions of a worker, whose models may have layers in common."""

    def __init__(self) -> None:
        self._layers: dict[int, list[weakref.ref[nn.SyncBatchNorm]]] = {}  # by session
        self._names: dict[int, str] = {}
        self._table: RowTable | None = None
        self._counts: list[int] = []  # by rank, the passes of the step under way
        self._ranks: list[int] = []  # who computes the pass under way
        self._before: list[tuple[Tensor, Tensor]] = []
        self._stepping = -1  # the session whose step has changed them
        self._warn: Callable[[], Callable[[str], None] | None] = lambda: None

    # The layers

    def enter(self, session: int, model: nn.Module, world: World, warn: Callable[[str], None]) -> None:
        """A session enters a generation; all workers must ask."""
        found = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.SyncBatchNorm)]
        if not found:
            return
        self._warn = weakref.WeakMethod(warn)  # a session that the script has dropped is to go
        if world.size > 1:
            for at, (name, layer) in enumerate(found):
                if not isinstance(layer, SyncedLayer):
                    self._names[session * _LAYERS + at] = name
                    put_in(layer, self, session * _LAYERS + at, name)
            self._layers[session] = [weakref.ref(layer) for _, layer in found]
        width = 1 + 2 * max(layer.num_features for _, layer in found)
        if self._table is None or self._table.host is not world.host or self._table.width < width:
            self._table = world.row_table(width) if world.size > 1 else None

    def leave(self, session: int) -> None:
        """A session is closed: what it alone has goes on as PyTorch's own."""
        own = self._layers.pop(session, [])
        others = {id(one()) for layers in self._layers.values() for one in layers}
        for reference in own:
            layer = reference()
            if layer is not None and id(layer) not in others:
                take_out(layer)
        if not self._layers:
            self._table, self._before = None, []  # they keep the host's memory open

    @property
    def has_layers(self) -> bool:
        """Whether some session has such layers; a worker that is alone by now has them, too."""
        return bool(self._layers)

    @property
    def is_on(self) -> bool:
        """Whether some session's layers need other workers."""
        return self._table is not None and bool(self._layers)

    def _buffers(self) -> list[Tensor]:
        layers = {id(layer): layer for some in self._layers.values() for one in some if (layer := one())}
        return [buffer for layer in layers.values() for buffer in layer.buffers()]

    # A step

    def begin(self, session: int, world: World, passes: int) -> None:
        """Every worker has come to a step, and says how many passes it computes; all have the same statistics then."""
        assert self._table is not None
        self._counts = [int(row[0]) for row in self._even_out(world, passes)]
        self._table.begin()
        self._before = [(buffer, buffer.clone()) for buffer in self._buffers()]
        self._stepping = session

    def even_out(self, world: World) -> None:
        """A worker that has computed fewer passes takes the running statistics of one that has computed all."""
        if self.is_on:
            self._even_out(world, 0)

    def _even_out(self, world: World, passes: int) -> list[list[float]]:
        buffers = [buffer for buffer in self._buffers() if buffer.numel()]
        tracked = sum(int(one) for one in buffers if one.dim() == 0)
        rows = world.exchange([float(passes), float(tracked)])
        most = max(row[1] for row in rows)
        if any(row[1] != most for row in rows):
            values = torch.cat([home(buffer).double() for buffer in buffers])
            world.comm.copy_(values, [row[1] for row in rows].index(most))
            for buffer, own in zip(buffers, values.split([one.numel() for one in buffers]), strict=True):
                put(own, buffer)
        return rows

    def keep(self) -> None:
        """The step counts, and so do its statistics."""
        self._before = []

    def undo(self, session: int) -> None:
        """The step that was under way is made again, if it is this session's: statistics are as before it."""
        if session == self._stepping:
            with torch.no_grad():
                for buffer, before in self._before:
                    buffer.copy_(before)
            self._before = []

    # A pass

    @contextmanager
    def passing(self, number: int) -> Iterator[None]:
        """While this worker computes its pass with this number, from its beginning to the end of its backward pass."""
        self._ranks = [rank for rank, count in enumerate(self._counts) if count > number]
        try:
            yield
            self._swap(_END, _NOTHING)
        finally:
            self._ranks = []

    @property
    def alone(self) -> bool:
        return len(self._ranks) <= 1

    def admit(self, name: str) -> bool:
        if self._ranks:
            return True
        where = (
            f"the layer {name!r} is a SyncBatchNorm, and the model was called in training mode outside of a step, "
            "where no other worker waits for it"
        )
        if torch.is_grad_enabled():
            raise UsageError(
                f"{where}; call session.step(batch) or session.backward(batch), which call the model themselves, put "
                "the model in evaluation mode, or use BatchNorm"
            )
        if warn := self._warn():
            warn(f"{where}: it went by the samples of this worker alone")
        return False

    def swap(self, layer: int, direction: int, row: Tensor) -> Tensor:
        return self._swap(1 + 2 * layer + direction, row)

    def _swap(self, about: int, row: Tensor) -> Tensor:
        assert self._table is not None
        if len(self._ranks) <= 1:
            return row.view(1, -1)
        said, rows = self._table.swap(self._ranks, about, row)
        for rank, other in zip(self._ranks, said, strict=True):
            if other != said[0]:
                raise UsageError(
                    f"workers disagree: worker {self._ranks[0]} was {self._where(said[0])} while worker {rank} was "
                    f"{self._where(other)}; a SyncBatchNorm needs all workers, so each must call the same of these "
                    "layers equally often and in one order"
                )
        return rows

    def _where(self, about: int) -> str:
        if about == _END:
            return "at the end of its batch"
        layer, direction = divmod(about - 1, 2)
        way = "backward" if direction == BACKWARD else "forward"
        return f"in the {way} pass of layer {self._names.get(layer, '?')!r}"
