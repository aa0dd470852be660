"""The user's optimizer, run on spans of the flat vector, and the path of a step's updates.

The optimizer the user made stays the place for hyper-parameters (schedulers change it, we read it). The work is done by
a twin of it whose parameters are pieces of the flat vector (`Updates`). How a step's updates are made once its
gradients are summed is a path (`UpdatePath`): here at once, or by servers. `undo_log.py` has the path whose updates
survive the death of a worker, `clipped_path.py` the one that limits the gradient.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands import telemetry
from manyhands.errors import UsageError
from manyhands.replica.gradients.summing import Gradients
from manyhands.replica.layout import Layout, Span
from manyhands.replica.memory import Team
from manyhands.replica.optimizer.abilities import keeps_to_rows, runs_whole, vector_states
from manyhands.replica.optimizer.descent import Descent, descent_of
from manyhands.replica.optimizer.span_pieces import SpanPiece, SpanPieces, exported
from manyhands.replica.optimizer.state_table import CommonMemory, table_for
from manyhands.replica.optimizer.twins import bare_step, settings_of, twin
from manyhands.replica.state.transcoding import Values

# Those that PyTorch can also run in one pass over memory; the last bits of what comes out may differ.
_IN_ONE_PASS: tuple[type[Optimizer], ...] = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)

_CHOSEN = ("fused", "foreach", "differentiable", "capturable")  # how the user wants it to run


class Updates:
    """Applies the optimizer span by span; holds the optimizer's state of the spans it was asked to update."""

    def __init__(
        self,
        optimizer: Optimizer,
        layout: Layout,
        params: Tensor,
        allocate: Callable[[str], Tensor] | None,
        common: CommonMemory | None = None,
        exact: bool = True,
    ) -> None:
        """`allocate` gives a state's vector, one copy per host; without it the state is elsewhere, on servers.
        In `common`, if given, other processes find what they need to go on with this one's spans."""
        self._optimizer = optimizer
        self._twin = twin(optimizer)
        self._step = bare_step(optimizer)
        self._layout = layout
        self._cutter = SpanPieces(layout, params)
        self._exact = exact  # the very bits of the user's optimizer; else what is faster
        self.vectors: dict[str, Tensor] = (
            {name: allocate(name) for name in vector_states(optimizer)} if allocate else {}
        )
        self._table = table_for(optimizer, layout, self.vectors, common)
        self._pieces: dict[int, list[SpanPiece]] = {}
        self._kept_to_rows: dict[str, bool] = {}  # by settings
        if not runs_whole(optimizer):  # else it gets whole vectors
            for place in layout.places:
                if place.rows:
                    self.keeps_to_rows(place.group)

    @property
    def numbers(self) -> Tensor:
        """The table of what the state has besides vectors, which an undo log has to put back as well."""
        return self._table.numbers

    def keeps_to_rows(self, group: int) -> bool:
        """Whether an update by the gradient of some rows leaves the others alone, with the settings as they are now."""
        found = self._optimizer.param_groups[group]
        key = repr([(name, value) for name, value in settings_of(found).items() if name != "lr"])
        if key not in self._kept_to_rows:
            self._kept_to_rows[key] = keeps_to_rows(self._optimizer, found)
        return self._kept_to_rows[key]

    # Updating

    def apply(self, span: Span, gradient: Tensor, skipped: frozenset[int] = frozenset()) -> None:
        """One step of the optimizer on one span; parameters in `skipped` had no gradient on any worker.

        The gradient is a vector, or, of a block of a table, a sparse tensor of some rows.
        """
        pieces = self._pieces_of(span)
        if not skipped.isdisjoint(span.places):
            pieces = self._pieces[span.index] = [part for piece in pieces for part in self._split(piece)]
        groups: dict[tuple[int, bool], list[Tensor]] = {}
        left = []
        for piece in pieces:
            if skipped and skipped.issuperset(piece.places):
                continue
            found = _gradient_of(piece, span, gradient)
            if descent := None if self._exact or found.is_sparse else self._descent(piece):
                descent.make_in_place(found)
                continue
            left.append(piece)
            piece.tensor.grad = found
            # Kernels that update in one pass want momentum of all tensors or of none.
            has_state = bool(self._twin.state.get(piece.tensor))
            groups.setdefault((piece.group, has_state), []).append(piece.tensor)
        if not left:
            return
        self._twin.param_groups = [self._settings(group, tensors) for (group, _), tensors in groups.items()]
        with torch.no_grad():
            self._step(self._twin)
        for piece in left:
            piece.tensor.grad = None  # the gradient's memory is not ours
            is_new = not piece.adopted
            if is_new:
                self._adopt(piece)
            if is_new or self._table.changes:
                self._table.note(span, piece, self._twin.state.get(piece.tensor, {}))

    def _settings(self, group: int, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """The user's parameter group with other tensors in it, run in one pass where that is allowed."""
        settings = {**self._optimizer.param_groups[group], "params": tensors}
        chosen = [settings.get(name) for name in _CHOSEN]
        is_dense = not any(tensor.grad.is_sparse for tensor in tensors if tensor.grad is not None)
        may_be_fused = not self._exact and type(self._optimizer) in _IN_ONE_PASS
        # For 16 bits PyTorch's kernels round otherwise, and that of SGD leaves elements out when momentum begins.
        may_be_fused &= not any(tensor.is_complex() or tensor.itemsize < 4 for tensor in tensors)
        if may_be_fused and is_dense and not any(chosen) and not isinstance(settings["lr"], Tensor):
            settings["fused"] = True
        return settings

    def descent(self, span: Span, skipped: frozenset[int]) -> Descent | None:
        """The whole update of a span that is one piece, if it may be made in passes."""
        first, *others = self._pieces_of(span)
        is_all = not others and first.slice.start == span.start and skipped.isdisjoint(span.places)
        return self._descent(first) if is_all and not self._exact else None

    def begun_descent(self, span: Span) -> Descent:
        """The one that a dead process had begun on a span, for the process that finishes it."""
        (piece,) = self._cutter.cut(span)
        piece.adopted = True
        found = self._descent(piece)
        if found is None:
            raise ValueError(f"span {span.index} is not updated in passes")
        return found

    def _descent(self, piece: SpanPiece) -> Descent | None:
        """What the optimizer would do with a piece, if it is simple enough to be done without it."""
        if type(self._optimizer) is not torch.optim.SGD or piece.rows:
            return None
        settings = self._optimizer.param_groups[piece.group]
        keeps = settings["momentum"] != 0
        if keeps and not piece.adopted:
            return None
        momentum = self.vectors["momentum_buffer"][piece.slice] if keeps else None
        return descent_of(settings, piece.tensor, momentum)

    def _pieces_of(self, span: Span) -> list[SpanPiece]:
        pieces = self._pieces.get(span.index)
        if pieces is None:
            pieces = self._pieces[span.index] = self._cutter.cut(span)
        return pieces

    def _split(self, piece: SpanPiece) -> list[SpanPiece]:
        """One piece per parameter, each with its part of the state."""
        if len(piece.places) == 1:
            return [piece]
        state = self._twin.state.pop(piece.tensor, {})
        parts = self._cutter.split(piece)
        for part in parts:
            inside = slice(part.slice.start - piece.slice.start, part.slice.stop - piece.slice.start)
            for name, value in state.items():
                if isinstance(value, Tensor):
                    value = value[inside] if value.shape == piece.tensor.shape else value.clone()
                self._twin.state[part.tensor][name] = value
        return parts

    def _adopt(self, piece: SpanPiece) -> None:
        """Move freshly made state into the vectors that all workers of the host see."""
        state = self._twin.state.get(piece.tensor)
        if not state:
            return
        for name, vector in self.vectors.items():
            value = state.get(name)
            if (
                isinstance(value, Tensor)
                and value.shape == piece.tensor.shape
                and value.dtype == vector.dtype
            ):
                home = vector[piece.slice].view(value.shape)
                state[name] = home.copy_(value.to_dense() if value.is_sparse else value)
        piece.adopted = True

    # The state

    def export(self, spans: Iterable[Span] | None = None) -> Values:
        """What this worker alone knows, of all it has updated or of some spans, by parameter name: numbers and
        odd-shaped tensors; not the vectors."""
        known: Values = {}
        wanted = self._pieces if spans is None else [span.index for span in spans]
        for index in wanted:
            for piece in self._pieces.get(index, ()):
                for name, value in exported(piece, self._twin.state.get(piece.tensor, {}), self.vectors):
                    for place in piece.places:
                        known.setdefault(self._layout.places[place].name, {})[name] = value
        return known

    def others(self, spans: Iterable[Span]) -> Values:
        """The same of spans that other processes of the host update, from what they have written down."""
        known: Values = {}
        for span in spans:
            for name, state in self._table.find(span).items():
                known.setdefault(name, {}).update(state)
        return known

    def take_over(self, spans: Sequence[Span], given: Mapping[str, Mapping[str, Any]]) -> None:
        """Begin with the state that the user's optimizer already has, if it has any; `given` by parameter name."""
        states: Values = {}
        for place in self._layout.places:
            for name, value in given.get(place.name, {}).items():
                if name in self.vectors and isinstance(value, Tensor) and tuple(value.shape) == place.shape:
                    self.vectors[name][place.start : place.stop] = value.to_dense().flatten()
                    value = None
                states.setdefault(place.name, {})[name] = value
        if states:
            self.restore(spans, states)

    def restore(self, spans: Sequence[Span], states: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over states as `export` gave them; the vectors are already filled."""
        self._pieces.clear()
        self._twin.state.clear()
        self.take(spans, states)

    def take(self, spans: Iterable[Span], states: Mapping[str, Mapping[str, Any]]) -> None:
        """The same for some spans, while the others stay as they are."""
        for span in spans:
            self._restore(span, states)
            for piece in self._pieces[span.index]:
                self._table.note(span, piece, self._twin.state.get(piece.tensor, {}))

    def take_from_others(self, spans: Iterable[Span]) -> None:
        """Go on with spans that other processes have updated until now, from what they have written down."""
        for span in spans:
            self._restore(span, self._table.find(span))

    def _restore(self, span: Span, states: Mapping[str, Mapping[str, Any]]) -> None:
        places = self._layout.places
        pieces = self._cutter.cut(span)
        uneven = any(
            states.get(places[i].name) != states.get(places[piece.places[0]].name)
            for piece in pieces
            for i in piece.places
            if not piece.whole
        )
        if uneven:
            pieces = [part for piece in pieces for part in self._split(piece)]
        for old in self._pieces.get(span.index, ()):
            self._twin.state.pop(old.tensor, None)
        self._pieces[span.index] = pieces
        for piece in pieces:
            known = states.get(places[piece.places[0]].name, {})
            for name, value in known.items():
                if value is None and name in self.vectors:
                    value = self.vectors[name][piece.slice].view(piece.tensor.shape)
                elif isinstance(value, Tensor):
                    value = value.clone()
                self._twin.state[piece.tensor][name] = value
            piece.adopted = bool(known)


def _gradient_of(piece: SpanPiece, span: Span, gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        return gradient  # a block of a table is all that is in its span
    found = gradient[piece.slice.start - span.start : piece.slice.stop - span.start].view(piece.tensor.shape)
    return found.to_sparse(1) if piece.rows else found


Factor = Callable[[], Tensor | float]
Evaluate = Callable[[], float]


def unlimited() -> float:
    """The factor of a gradient whose norm is not limited."""
    return 1.0


class StepGate:
    """Where the workers of a team wait for each other in a step; the sum of their gradients is one such place.

    `gates.py` has those of replicas in parts and of several hosts.
    """

    gated = False
    """Whether no span is updated before the sums of all spans have come from the other hosts."""
    hears_from_hosts = False
    """Whether workers have heard from the other hosts, before they updated anything, which parameters are used."""

    def __init__(self, gradients: Gradients, team: Team) -> None:
        self._gradients = gradients
        self._team = team

    @property
    def begun(self) -> int:
        """How many steps all workers of the replica have brought to where updates begin."""
        return self._gradients.passed

    def open(self) -> None:
        """This worker's team has its sum: return when updates may begin."""

    def receive(self) -> None:
        """The sums of all hosts are here for the spans that this worker owns: return when every worker of this host
        has its own. Until then nothing has changed; from then on this host alone can finish the step."""

    def settle(self) -> None:
        """Return when every owner has updated its spans."""
        if self._team.size > 1:
            self._team.barrier()


class UpdatePath:
    """Updates each span when it is asked to; every other path has this interface."""

    is_logged = False
    """Whether survivors can finish an update in which a worker dies."""

    def __init__(self, updates: Updates, gradients: Gradients, gate: StepGate) -> None:
        self.updates = updates
        self.skipped: frozenset[int] = frozenset()  # parameters that got no gradient on any worker
        self.is_finite = True  # else the last step's gradient was not, and no update was made
        self.gate = gate
        self._gradients = gradients

    def open(self) -> None:
        """This worker's team has its sum: return when updates may begin."""
        self.gate.open()

    def apply(self, span: Span) -> None:
        """Update one owned span."""
        self.make(span, self._gradients.take(span))

    def apply_all(self, spans: Iterable[Span]) -> None:
        """Update all owned spans, also by gradients that are not those of the last backward pass."""
        for span in spans:
            self.apply(span)

    def make(self, span: Span, gradient: Tensor) -> None:
        """Run the optimizer on a span with a gradient."""
        with telemetry.timed("update"):
            self.updates.apply(span, gradient, self.skipped)

    def minimize(self, evaluate: Evaluate) -> float:
        """A step of an optimizer that has the loss evaluated; `evaluate` sums the gradients and returns the loss."""
        raise UsageError("an optimizer whose work is divided takes one gradient per step")

    def limit(self, grads: Tensor) -> None:
        """Limit the norm of gradients that an optimizer with a closure is about to see."""

    def settle(self) -> None:
        """Return when every owner has updated its spans."""
        self.gate.settle()

    def recover(self, dead: Collection[int], attempt: int, factor: Factor = unlimited) -> int:
        """Finish the updates of dead workers, by gradients times `factor`; only where they are logged."""
        raise UsageError("survivors cannot finish an update without an undo log")


class RemotePath(UpdatePath):
    """Servers make the updates."""

    def make(self, span: Span, gradient: Tensor) -> None:
        raise UsageError("servers update the parameters; push the gradients to them")


def skipped_in(used: Tensor) -> frozenset[int]:
    """The parameters whose flag is not set."""
    return frozenset(torch.nonzero(used == 0).flatten().tolist())
