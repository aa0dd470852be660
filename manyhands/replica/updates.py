"""The user's optimizer, run on spans of the flat vector.

The optimizer the user made stays the place for hyper-parameters (schedulers change it, we read it). The work is done by
a twin of it whose parameters are pieces of the flat vector. Element-wise optimizers do not notice where a tensor
is cut, so one piece may cover many small parameters or a part of a large one; others get whole tensors in their shapes.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.replica.layout import Layout, Span

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
)

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # where torch keeps them


def is_element_wise(optimizer: Optimizer) -> bool:
    """Exactly one of the known classes: a subclass may do anything."""
    return type(optimizer) in ELEMENT_WISE


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
    trial, step = twin(optimizer), bare_step(optimizer)
    names: list[str] = []
    for group in optimizer.param_groups:
        toy = torch.ones(2, 2)
        toy.grad = torch.full_like(toy, 0.5)
        trial.param_groups = [{**settings_of(group), "params": [toy]}]
        try:
            with torch.no_grad():
                step(trial)
        except (RuntimeError, TypeError, ValueError):
            continue  # wants another shape or a closure: its state stays with the owner
        for name, value in trial.state[toy].items():
            if isinstance(value, Tensor) and value.shape == toy.shape and value.dtype == toy.dtype:
                names.append(name)
    return sorted(set(names))


class Updates:
    """Applies the optimizer span by span; holds the optimizer's state of the spans it was asked to update."""

    def __init__(
        self,
        optimizer: Optimizer,
        layout: Layout,
        params: Tensor,
        allocate: Callable[[str], Tensor] | None,
        sparse: Iterable[int] = (),
    ) -> None:
        self._optimizer = optimizer
        self._twin = twin(optimizer)
        self._step = bare_step(optimizer)
        self._layout = layout
        self._params = params
        self._sparse = frozenset(sparse)
        # One copy per host, visible to all its workers: whoever owns a span writes its part of these.
        names = vector_states(optimizer) if allocate else []
        self.vectors: dict[str, Tensor] = {name: allocate(name) for name in names if allocate}
        self._pieces: dict[int, list[_Piece]] = {}

    def apply(self, span: Span, gradient: Tensor, skipped: frozenset[int] = frozenset()) -> None:
        """One step of the optimizer on one span; parameters in `skipped` had no gradient from anyone."""
        pieces = self._pieces.get(span.index)
        if pieces is None:
            pieces = self._pieces[span.index] = self._cut(span)
        if not skipped.isdisjoint(span.places):
            pieces = self._pieces[span.index] = [part for piece in pieces for part in self._split(piece)]
        groups: dict[int, list[Tensor]] = {}
        for piece in pieces:
            if skipped and skipped.issuperset(piece.places):
                continue
            found = gradient[piece.slice.start - span.start : piece.slice.stop - span.start]
            found = found.view(piece.tensor.shape)
            piece.tensor.grad = found.to_sparse(1) if piece.sparse else found
            groups.setdefault(piece.group, []).append(piece.tensor)
        self._twin.param_groups = [
            {**settings_of(self._optimizer.param_groups[group]), "params": tensors}
            for group, tensors in groups.items()
        ]
        with torch.no_grad():
            self._step(self._twin)
        for piece in pieces:
            piece.tensor.grad = None  # the gradient's memory is not ours
            if not piece.adopted:
                self._adopt(piece)

    def _cut(self, span: Span) -> list["_Piece"]:
        """The fewest pieces: neighbours of one parameter group become one, unless they must stay whole."""
        pieces: list[_Piece] = []
        for index in span.places:
            place = self._layout.places[index]
            start, stop = max(place.start, span.start), min(place.stop, span.stop)
            last = pieces[-1] if pieces else None
            if last and not place.whole and not last.whole and last.group == place.group:
                pieces[-1] = self._piece((*last.places, index), last.slice.start, stop)
            else:
                pieces.append(self._piece((index,), start, stop))
        return pieces

    def _piece(self, places: tuple[int, ...], start: int, stop: int) -> "_Piece":
        place = self._layout.places[places[0]]
        tensor = self._params[start:stop]
        if place.whole:
            tensor = tensor.view(place.shape)
        return _Piece(places, slice(start, stop), tensor, place.group, place.whole, places[0] in self._sparse)

    def _split(self, piece: "_Piece") -> list["_Piece"]:
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

    def _adopt(self, piece: "_Piece") -> None:
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
                state[name] = home.copy_(value)
        piece.adopted = True

    def export(self) -> dict[str, dict[str, Any]]:
        """What this worker alone knows, by parameter name: numbers and odd-shaped tensors; not the vectors."""
        known: dict[str, dict[str, Any]] = {}
        for pieces in self._pieces.values():
            for piece in pieces:
                for name, value in self._twin.state.get(piece.tensor, {}).items():
                    if name in self.vectors and _same_memory(value, self.vectors[name][piece.slice]):
                        value = None  # in the vector; named here so that a restore knows it existed
                    for index in piece.places:
                        known.setdefault(self._layout.places[index].name, {})[name] = value
        return known

    def take_over(self, spans: Sequence[Span], given: Mapping[str, Mapping[str, Any]]) -> None:
        """Begin with the state that the user's optimizer already has, if it has any; `given` by parameter name."""
        states: dict[str, dict[str, Any]] = {}
        for place in self._layout.places:
            for name, value in given.get(place.name, {}).items():
                if name in self.vectors and isinstance(value, Tensor) and tuple(value.shape) == place.shape:
                    self.vectors[name][place.start : place.stop] = value.flatten()
                    value = None
                states.setdefault(place.name, {})[name] = value
        if states:
            self.restore(spans, states)

    def restore(self, spans: Sequence[Span], states: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over states as `export` gave them; the vectors are already filled."""
        self._pieces.clear()
        self._twin.state.clear()
        for span in spans:
            pieces = self._cut(span)
            uneven = any(
                states.get(self._layout.places[i].name)
                != states.get(self._layout.places[piece.places[0]].name)
                for piece in pieces
                for i in piece.places
                if not piece.whole
            )
            if uneven:
                pieces = [part for piece in pieces for part in self._split(piece)]
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


class _Piece:
    """A part of a span that the optimizer treats as one tensor."""

    def __init__(
        self, places: tuple[int, ...], where: slice, tensor: Tensor, group: int, whole: bool, sparse: bool
    ) -> None:
        self.places = places
        self.slice = where
        self.tensor = tensor
        self.group = group
        self.whole = whole
        self.sparse = sparse
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
