"""The user's optimizer, run on spans of the flat vector.

The optimizer the user made stays the place for hyper-parameters (schedulers change it, we read it). The work is done by
a twin of it whose parameters are pieces of the flat vector. Element-wise optimizers do not notice where a tensor
is cut, so one piece may cover many small parameters or a part of a large one; others get whole tensors in their shapes.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.comm.transports.slots import Slots
from manyhands.errors import TornUpdate, UsageError
from manyhands.replica.layout import Layout, Span, slots
from manyhands.replica.optimizer.descent import Descent, is_simple
from manyhands.replica.optimizer.undo_log import UndoLog
from manyhands.replica.state import packing

ELEMENT_WISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
    torch.optim.SparseAdam,
)

# Those that PyTorch can also run in one pass over memory; the last bits of what comes out may differ.
_IN_ONE_PASS: tuple[type[Optimizer], ...] = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)

_REFUSED = (RuntimeError, TypeError, ValueError)  # what an optimizer raises that cannot take a gradient

_EMPTY, _FIRST, _SECOND, _ELSEWHERE = (
    0,
    1,
    2,
    -1,
)  # where a piece's state is, if it is not known what it is made of

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # where torch keeps them


def is_element_wise(optimizer: Optimizer) -> bool:
    """Exactly one of the known classes: a subclass may do anything."""
    return type(optimizer) in ELEMENT_WISE


def descends(optimizer: Optimizer) -> bool:
    """Whether all it does is done without it, in passes (`Descent`)."""
    return type(optimizer) is torch.optim.SGD and all(map(is_simple, optimizer.param_groups))


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` must be able to evaluate the loss again (L-BFGS)."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def twin(optimizer: Optimizer) -> Optimizer:
    """The same optimizer with no parameters, no state and none of the hooks hung on the original."""
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.__dict__.pop("step", None)  # a scheduler replaces it on the original, to see that it is called
    copy.__dict__.update(state=defaultdict(dict), param_groups=[])
    for name in _HOOKS:
        if name in copy.__dict__:
            copy.__dict__[name] = type(copy.__dict__[name])()
    return copy


def is_watched(optimizer: Optimizer) -> bool:
    """Whether someone wants to see `step` called on the original: hooks, or a scheduler that replaced the method."""
    state = vars(optimizer)
    return "step" in state or any(state.get(name) for name in _HOOKS)


def bare_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """PyTorch wraps `step` of its own optimizers for profiling, hooks and the compiler; per span that is too much."""
    kind = type(optimizer)
    return inspect.unwrap(kind.step) if is_element_wise(optimizer) else kind.step


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def vector_states(optimizer: Optimizer) -> list[str]:
    """Names of the states that have one element per parameter element, found by trying a step on a toy."""
    return sorted(
        {
            name
            for toy, state in _trials(optimizer)
            for name, value in state.items()
            if isinstance(value, Tensor) and value.shape == toy.shape and value.dtype == toy.dtype
        }
    )


def number_states(optimizer: Optimizer) -> dict[str, torch.dtype]:
    """Names of the states that are one number in a tensor, with its type."""
    return {
        name: value.dtype
        for _, state in _trials(optimizer)
        for name, value in sorted(state.items())
        if isinstance(value, Tensor) and value.ndim == 0
    }


def _trials(optimizer: Optimizer) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
    """For each parameter group a toy, and its state after one step."""
    dense = torch.full((2, 2), 0.5)
    for group in optimizer.param_groups:
        for gradient in (dense, dense.to_sparse(1)):  # of those that take one kind only
            trial, toy = twin(optimizer), torch.ones(2, 2)
            try:
                _try(trial, group, toy, gradient)
            except _REFUSED:
                continue  # wants another shape or a closure: its state stays with the owner
            yield toy, trial.state[toy]
            break


def keeps_to_rows(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether an update by the gradient of some rows leaves the others alone, as with momentum it does not: found by
    trying on a toy. Optimizers that take no such gradient are refused."""
    trial, toy = twin(optimizer), torch.ones(2, 1)
    group = {**group, "lr": 1.0} if "lr" in group else group  # a warm-up may begin with none
    try:
        _try(trial, group, toy, torch.tensor([[1.0], [0.0]]).to_sparse(1))
        before = toy[0].clone()
        _try(trial, group, toy, torch.tensor([[0.0], [1.0]]).to_sparse(1))
    except _REFUSED as error:
        raise UsageError(
            f"{type(optimizer).__name__} does not take the gradients that nn.Embedding(sparse=True) gives ({error}); "
            "use SGD or Adagrad without weight decay, SparseAdam, or sparse=False"
        ) from None
    return bool(before == toy[0])


def _try(trial: Optimizer, group: Mapping[str, Any], toy: Tensor, gradient: Tensor) -> None:
    """A step of a twin on one small tensor."""
    toy.grad = gradient
    trial.param_groups = [{**settings_of(group), "params": [toy]}]
    # Not checked by default either; torch warns where nobody has said so.
    with torch.no_grad(), torch.sparse.check_sparse_tensor_invariants(False):
        bare_step(trial)(trial)


class Common(Protocol):
    """Memory that others see."""

    def allocate(self, length: int, dtype: torch.dtype) -> Tensor: ...

    def drawers(self, count: int) -> Slots: ...


class Updates:
    """Applies the optimizer span by span; holds the optimizer's state of the spans it was asked to update."""

    def __init__(
        self,
        optimizer: Optimizer,
        layout: Layout,
        params: Tensor,
        allocate: Callable[[str], Tensor] | None,
        common: Common | None = None,
        exact: bool = True,
    ) -> None:
        self._optimizer = optimizer
        self._twin = twin(optimizer)
        self._step = bare_step(optimizer)
        self._layout = layout
        self._params = params
        self._exact = exact  # the very bits of the user's optimizer; else what is faster
        # One copy per host, visible to all its workers: whoever owns a span writes its part of these.
        names = vector_states(optimizer) if allocate else []
        self.vectors: dict[str, Tensor] = {name: allocate(name) for name in names if allocate}
        self._pieces: dict[int, list[_SpanPiece]] = {}
        # What the state has beside vectors, by place of a span, for whoever has to go on with another's spans: whether
        # there is any, and the numbers; or, where it may be anything, which of two drawers has it.
        self._slots = slots(layout)
        self._number_names: dict[str, torch.dtype] = {}
        self._drawers: Slots | None = None
        self.numbers: Tensor | None = None
        if common:
            rows = self._slots[-1].stop
            if is_element_wise(optimizer):
                self._number_names = number_states(optimizer)
            else:
                self._drawers = common.drawers(2 * rows)
            columns = 1 + len(self._number_names)
            self.numbers = common.allocate(rows * columns, torch.float64).view(rows, columns)
        self._kept_to_rows: dict[str, bool] = {}  # by settings
        if not needs_closure(optimizer):  # else it gets whole vectors
            for place in layout.places:
                if place.rows:
                    self.keeps_to_rows(place.group)

    def keeps_to_rows(self, group: int) -> bool:
        """Whether an update by the gradient of some rows leaves the others alone, with the settings as they are now."""
        found = self._optimizer.param_groups[group]
        key = repr([(name, value) for name, value in settings_of(found).items() if name != "lr"])
        if key not in self._kept_to_rows:
            self._kept_to_rows[key] = keeps_to_rows(self._optimizer, found)
        return self._kept_to_rows[key]

    def make(
        self,
        span: Span,
        gradient: Tensor,
        skipped: frozenset[int] = frozenset(),
        journal: UndoLog | None = None,
        step: int = 0,
    ) -> None:
        """`apply`, with a note of it in the journal for whoever has to finish it."""
        if journal is None:
            self.apply(span, gradient, skipped)
            return
        descent = None if gradient.is_sparse else self._whole_descent(span, skipped)
        if descent:
            journal.descend(span, descent, gradient)
        else:
            journal.begin(span)
            self.apply(span, gradient, skipped)
        journal.end(span, step)

    def apply(self, span: Span, gradient: Tensor, skipped: frozenset[int] = frozenset()) -> None:
        """One step of the optimizer on one span; parameters in `skipped` had no gradient from anyone.

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
        self._twin.param_groups = [
            {**self._settings(group, tensors), "params": tensors} for (group, _), tensors in groups.items()
        ]
        with torch.no_grad():
            self._step(self._twin)
        for piece in left:
            piece.tensor.grad = None  # the gradient's memory is not ours
            is_new = not piece.adopted
            if is_new:
                self._adopt(piece)
            if self.numbers is not None and (is_new or self._number_names or self._drawers):
                self._note(span, piece)

    def _pieces_of(self, span: Span) -> list["_SpanPiece"]:
        pieces = self._pieces.get(span.index)
        if pieces is None:
            pieces = self._pieces[span.index] = self._cut(span)
        return pieces

    def _settings(self, group: int, tensors: Sequence[Tensor]) -> dict[str, Any]:
        settings = settings_of(self._optimizer.param_groups[group])
        chosen = [settings.get(name) for name in ("fused", "foreach", "differentiable", "capturable")]
        is_dense = not any(tensor.grad.is_sparse for tensor in tensors if tensor.grad is not None)
        may_be_fused = not self._exact and type(self._optimizer) in _IN_ONE_PASS
        if may_be_fused and is_dense and not any(chosen) and not isinstance(settings["lr"], Tensor):
            settings["fused"] = True
        return settings

    def _whole_descent(self, span: Span, skipped: frozenset[int]) -> Descent | None:
        """Of a span that is one piece."""
        first, *others = self._pieces_of(span)
        is_all = not others and first.slice.start == span.start and skipped.isdisjoint(span.places)
        return self._descent(first) if is_all and not self._exact else None

    def descent_of_another(self, span: Span) -> Descent:
        """The one that another had begun, for whoever finishes it, and were that one to be `exact` by itself."""
        (piece,) = self._cut(span)
        piece.adopted = True
        found = self._descent(piece)
        assert found
        return found

    def _descent(self, piece: "_SpanPiece") -> Descent | None:
        """What the optimizer would do with a piece, if it is simple enough to be done without it."""
        if type(self._optimizer) is not torch.optim.SGD or piece.rows:
            return None
        settings = self._optimizer.param_groups[piece.group]
        keeps = settings["momentum"] != 0
        if not is_simple(settings) or (keeps and not piece.adopted):
            return None
        return Descent(
            params=piece.tensor,
            momentum=self.vectors["momentum_buffer"][piece.slice] if keeps else None,
            rate=settings["lr"],
            keep=settings["momentum"],
            decay=settings["weight_decay"],
        )

    def _note(self, span: Span, piece: "_SpanPiece") -> None:
        """Write down the numbers of a piece's state where the others see them."""
        assert self.numbers is not None
        state = self._twin.state.get(piece.tensor, {})
        first = self._slots[span.index].start + span.places.index(piece.places[0])
        if self._drawers:
            self.numbers[first] = self._put_away(first, piece)
            return
        row = [float(bool(state)), *(float(state.get(name, 0.0)) for name in self._number_names)]
        self.numbers[first : first + len(piece.places)] = torch.tensor(row, dtype=self.numbers.dtype)

    def _put_away(self, row: int, piece: "_SpanPiece") -> int:
        """Write down a piece's state in that of its two drawers which nobody needs; returns which that is."""
        assert self.numbers is not None
        assert self._drawers is not None
        drawer = _SECOND if self.numbers[row, 0] == _FIRST else _FIRST
        known = {self._layout.places[piece.places[0]].name: dict(self._told(piece))}
        try:
            fits = self._drawers.put(2 * row + drawer - 1, packing.pack(known))
        except packing.NotStates:
            return _ELSEWHERE
        return drawer if fits else _ELSEWHERE

    def take_from_others(self, spans: Iterable[Span]) -> None:
        """Go on with spans that others have updated until now: all their state is where everyone sees it."""
        find = self._found_in_drawers if self._drawers else self._found_in_numbers
        for span in spans:
            self._restore(span, find(span))

    def _found_in_numbers(self, span: Span) -> dict[str, dict[str, Any]]:
        assert self.numbers is not None
        rows = self.numbers[self._slots[span.index]].tolist()
        return {
            self._layout.places[index].name: {
                **dict.fromkeys(self.vectors),
                **{
                    name: torch.tensor(value, dtype=dtype)
                    for (name, dtype), value in zip(self._number_names.items(), values, strict=True)
                },
            }
            for index, (has_state, *values) in zip(span.places, rows, strict=True)
            if has_state
        }

    def _found_in_drawers(self, span: Span) -> dict[str, dict[str, Any]]:
        assert self.numbers is not None
        assert self._drawers is not None
        known: dict[str, dict[str, Any]] = {}
        first = self._slots[span.index].start
        for row, index in enumerate(span.places, first):
            drawer = int(self.numbers[row, 0])
            if drawer == _ELSEWHERE:
                raise TornUpdate(
                    f"the state that {type(self._optimizer).__name__} has for {self._layout.places[index].name} is not "
                    "made of numbers and tensors, or is too large, so nobody can go on with it; go on from the last "
                    "checkpoint"
                )
            if drawer != _EMPTY:
                known |= packing.unpack(self._drawers.get(2 * row + drawer - 1))
        return known

    def _cut(self, span: Span) -> list["_SpanPiece"]:
        """The fewest pieces: neighbours of one parameter group become one, unless they must stay whole."""
        pieces: list[_SpanPiece] = []
        for index in span.places:
            place = self._layout.places[index]
            start, stop = max(place.start, span.start), min(place.stop, span.stop)
            last = pieces[-1] if pieces else None
            if last and not place.whole and not last.whole and last.group == place.group:
                pieces[-1] = self._piece((*last.places, index), last.slice.start, stop)
            else:
                pieces.append(self._piece((index,), start, stop))
        return pieces

    def _piece(self, places: tuple[int, ...], start: int, stop: int) -> "_SpanPiece":
        place = self._layout.places[places[0]]
        tensor = self._params[start:stop]
        if place.whole or place.rows:
            tensor = tensor.view(place.shape if place.whole else (-1, *place.shape[1:]))
        return _SpanPiece(places, slice(start, stop), tensor, place.group, place.whole, place.rows)

    def _split(self, piece: "_SpanPiece") -> list["_SpanPiece"]:
        """One piece per parameter, each with its part of the state: needed once they are not all updated alike."""
        if len(piece.places) == 1:
            return [piece]
        state = self._twin.state.pop(piece.tensor, {})
        parts = []
        for index in piece.places:
            place = self._layout.places[index]
            start, stop = max(place.start, piece.slice.start), min(place.stop, piece.slice.stop)
            part = self._piece((index,), start, stop)
            inside = slice(start - piece.slice.start, stop - piece.slice.start)
            for name, value in state.items():
                if isinstance(value, Tensor):
                    value = value[inside] if value.shape == piece.tensor.shape else value.clone()
                self._twin.state[part.tensor][name] = value
            part.adopted = piece.adopted
            parts.append(part)
        return parts

    def _adopt(self, piece: "_SpanPiece") -> None:
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

    def export(self, spans: Iterable[Span] | None = None) -> dict[str, dict[str, Any]]:
        """What this worker alone knows, of all it has updated or of some spans, by parameter name: numbers and
        odd-shaped tensors; not the vectors."""
        known: dict[str, dict[str, Any]] = {}
        wanted = self._pieces if spans is None else [span.index for span in spans]
        for index in wanted:
            for piece in self._pieces.get(index, ()):
                for name, value in self._told(piece):
                    for place in piece.places:
                        known.setdefault(self._layout.places[place].name, {})[name] = value
        return known

    def _told(self, piece: "_SpanPiece") -> Iterator[tuple[str, Any]]:
        """A piece's state; None for what is in a vector: named so that a restore knows it existed."""
        for name, value in self._twin.state.get(piece.tensor, {}).items():
            is_there = name in self.vectors and _same_memory(value, self.vectors[name][piece.slice])
            yield name, None if is_there else value

    def take_over(self, spans: Sequence[Span], given: Mapping[str, Mapping[str, Any]]) -> None:
        """Begin with the state that the user's optimizer already has, if it has any; `given` by parameter name."""
        states: dict[str, dict[str, Any]] = {}
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
            if self.numbers is not None:
                for piece in self._pieces[span.index]:
                    self._note(span, piece)

    def _restore(self, span: Span, states: Mapping[str, Mapping[str, Any]]) -> None:
        pieces = self._cut(span)
        uneven = any(
            states.get(self._layout.places[i].name) != states.get(self._layout.places[piece.places[0]].name)
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
            known = states.get(self._layout.places[piece.places[0]].name, {})
            for name, value in known.items():
                if value is None and name in self.vectors:
                    value = self.vectors[name][piece.slice].view(piece.tensor.shape)
                elif isinstance(value, Tensor):
                    value = value.clone()
                self._twin.state[piece.tensor][name] = value
            piece.adopted = bool(known)


def _same_memory(value: Any, home: Tensor) -> bool:
    return isinstance(value, Tensor) and value.data_ptr() == home.data_ptr() and value.numel() == home.numel()


def _gradient_of(piece: "_SpanPiece", span: Span, gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        return gradient  # a block of a table is all that is in its span
    found = gradient[piece.slice.start - span.start : piece.slice.stop - span.start].view(piece.tensor.shape)
    return found.to_sparse(1) if piece.rows else found


class _SpanPiece:
    """A part of a span that the optimizer treats as one tensor."""

    def __init__(
        self, places: tuple[int, ...], where: slice, tensor: Tensor, group: int, whole: bool, rows: bool
    ) -> None:
        self.places = places
        self.slice = where
        self.tensor = tensor
        self.group = group
        self.whole = whole
        self.rows = rows
        self.adopted = False


def hyper_parameters(optimizer: Optimizer) -> list[float]:
    """All numbers that a scheduler could have changed, in a fixed order."""
    return [number for group in named_numbers(optimizer) for values in group.values() for number in values]


def set_hyper_parameters(optimizer: Optimizer, values: Sequence[float]) -> None:
    """The inverse of `hyper_parameters`: a worker without data follows those that have some."""
    rest = iter(values)
    for group in optimizer.param_groups:
        for key in settings_of(group):
            group[key] = _with_numbers(group[key], rest)


def named_numbers(optimizer: Optimizer) -> list[dict[str, list[float]]]:
    """The same numbers by group and name."""
    found: list[dict[str, list[float]]] = []
    for group in optimizer.param_groups:
        found.append({})
        for key, value in settings_of(group).items():
            if numbers := list(_numbers_in(value)):
                found[-1][key] = numbers
    return found


def set_named_numbers(optimizer: Optimizer, groups: Sequence[Mapping[str, Sequence[float]]]) -> None:
    """Take over the numbers of another process's optimizer; what only that one has (a scheduler's notes) is not."""
    known = named_numbers(optimizer)
    for group, mine, theirs in zip(optimizer.param_groups, known, groups, strict=False):
        for key in mine.keys() & theirs.keys():
            if len(mine[key]) == len(theirs[key]):
                group[key] = _with_numbers(group[key], iter(theirs[key]))


def _numbers_in(setting: Any) -> Iterator[float]:
    if isinstance(setting, (tuple, list)):
        for item in setting:
            yield from _numbers_in(item)
    elif (isinstance(setting, (int, float)) and not isinstance(setting, bool)) or (
        isinstance(setting, Tensor) and setting.numel() == 1
    ):
        yield float(setting)


def _with_numbers(setting: Any, numbers: Iterator[float]) -> Any:
    """The setting with other numbers in it, in the order in which `_numbers_in` finds them."""
    if isinstance(setting, (tuple, list)):
        return type(setting)(_with_numbers(item, numbers) for item in setting)
    if isinstance(setting, (int, float)) and not isinstance(setting, bool):
        return type(setting)(next(numbers))
    if isinstance(setting, Tensor) and setting.numel() == 1 and (new := next(numbers)) != float(setting):
        setting.fill_(new)
    return setting
