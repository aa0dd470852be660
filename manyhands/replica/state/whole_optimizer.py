"""The state of an optimizer that runs whole, where plain PyTorch keeps it: in the user's optimizer itself.

Such an optimizer keeps what it likes: vectors, histories, numbers in its parameter groups or beside them, other
optimizers. `capture` and `restore` are how a checkpoint, a worker that joins and the undoing of a step get at it. All
workers have the same.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from manyhands.cluster.worker.world import World
from manyhands.errors import CheckpointError
from manyhands.replica.optimizer.twins import optimizers_in, settings_of

PREFIX = "whole/"

_PLAIN = (bool, int, float, str, type(None))
_NOT_STATE = ("state", "param_groups", "defaults", "step")


class Captured:
    """What an optimizer, and those in it, have beside the parameters, at one moment."""

    def __init__(self, optimizer: Any) -> None:
        """A copy, of which nothing is lost."""
        self._optimizer = optimizer
        memo: dict[int, Any] = {id(param): param for param in _params(optimizer)}
        self._parts = [
            (
                [copy.deepcopy(settings_of(group), memo) for group in one.param_groups],
                copy.deepcopy(dict(one.state), memo),
                copy.deepcopy(dict(_held(one)), memo),
            )
            for one in optimizers_in(optimizer)
        ]

    def restore(self) -> None:
        """The optimizer is again as it was."""
        for one, (groups, state, held) in zip(optimizers_in(self._optimizer), self._parts, strict=True):
            _put(one, groups, state, held)


def collect(optimizer: Any) -> tuple[dict[str, Tensor], list[Any]]:
    """The tensors by name, and a form of the rest, in which their names take their places."""
    tensors: dict[str, Tensor] = {}
    places = {id(param): number for number, param in enumerate(_params(optimizer))}

    def packed(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        return {name: _packed(value, tensors, places) for name, value in items if _is_plain(value)}

    form = []
    for one in optimizers_in(optimizer):
        if not _is_plain(one.state):
            raise CheckpointError(
                f"{type(one).__name__} keeps objects for its parameters, and a checkpoint holds numbers and tensors; "
                "train without save and save_every, or with another optimizer"
            )
        groups = [packed(settings_of(group).items()) for group in one.param_groups]
        form.append(
            {"groups": groups, "state": _packed(one.state, tensors, places), "held": packed(_held(one))}
        )
    return tensors, form


def distribute(
    optimizer: Any, form: Sequence[Any], tensors: Mapping[str, Tensor], world: World, source: int = 0
) -> None:
    """The worker `source` has the tensors, and all have the form; all take over the state."""
    own = {name: value.contiguous() for name, value in tensors.items() if name.startswith(PREFIX)}
    blob = world.gather(tensors_to_bytes(own) if own and world.rank == source else b"")[source]
    _take(optimizer, form, tensors_from_bytes(blob) if blob else {})


def hand_on(optimizer: Any, world: World, source: int, *, is_new: bool) -> None:
    """A worker that has joined takes the state over from another one; all workers call this."""
    payload = b""
    if world.rank == source:
        tensors, form = collect(optimizer)
        payload = msgspec.msgpack.encode([form, tensors_to_bytes(tensors) if tensors else b""])
    payload = world.gather(payload)[source]
    if is_new:
        form, blob = msgspec.msgpack.decode(payload)
        _take(optimizer, form, tensors_from_bytes(blob) if blob else {})


def _take(optimizer: Any, form: Sequence[Any], tensors: Mapping[str, Tensor]) -> None:
    params, every = list(_params(optimizer)), list(optimizers_in(optimizer))
    if [len(one.param_groups) for one in every] != [len(part["groups"]) for part in form]:
        raise CheckpointError(
            "the checkpoint has other optimizers and parameter groups; make them as they were"
        )

    def unpacked(items: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _unpacked(value, tensors, params) for name, value in items.items()}

    for one, part in zip(every, form, strict=True):
        state = _unpacked(part["state"], tensors, params)
        _put(one, [unpacked(group) for group in part["groups"]], state, unpacked(part["held"]))


def _put(one: Any, groups: Sequence[Any], state: Mapping[Any, Any], held: Mapping[str, Any]) -> None:
    """In place: others may hold the same groups and the same state."""
    for group, settings in zip(one.param_groups, groups, strict=True):
        group.update(settings)
    one.state.clear()
    one.state.update(state)
    vars(one).update(held)


def _params(optimizer: Any) -> list[Tensor]:
    """The parameters of an optimizer and of those in it, each once, in an order that the script decides."""
    every = [p for one in optimizers_in(optimizer) for group in one.param_groups for p in group["params"]]
    return list({id(param): param for param in every}.values())


def _held(one: Any) -> list[tuple[str, Any]]:
    """What it counts and keeps beside its groups and its state."""
    return [
        (name, value)
        for name, value in vars(one).items()
        if name not in _NOT_STATE and not name.startswith("_optimizer_") and _is_plain(value)
    ]


def _is_plain(value: Any) -> bool:
    """Whether it is made of numbers, texts and tensors alone."""
    if isinstance(value, Mapping):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (Tensor, *_PLAIN))


def _packed(value: Any, tensors: dict[str, Tensor], places: Mapping[int, int]) -> Any:
    if id(value) in places:
        return {"param": places[id(value)]}
    if isinstance(value, Tensor):
        name = f"{PREFIX}{len(tensors)}"
        tensors[name] = value.detach().clone().contiguous()
        return {"tensor": name}
    if isinstance(value, Mapping):
        pairs = [
            [_packed(key, tensors, places), _packed(item, tensors, places)] for key, item in value.items()
        ]
        return {"dict": pairs}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_packed(item, tensors, places) for item in value]}
    return value


def _unpacked(form: Any, tensors: Mapping[str, Tensor], params: Sequence[Tensor]) -> Any:
    if not isinstance(form, Mapping):
        return form
    ((kind, content),) = form.items()
    if kind == "param":
        return params[content]
    if kind == "tensor":
        return tensors[content].clone()
    if kind == "dict":
        return {_unpacked(key, tensors, params): _unpacked(item, tensors, params) for key, item in content}
    items = [_unpacked(item, tensors, params) for item in content]
    return items if kind == "list" else tuple(items)
