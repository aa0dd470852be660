"""The state of an optimizer that evaluates the loss several times in a step, as a checkpoint holds it.

Such an optimizer (L-BFGS) runs as it is, on the user's own parameters, and keeps what it likes: lists of vectors,
numbers, nothing. All workers have the same.
"""

from collections.abc import Mapping
from typing import Any

from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor
from torch.optim import Optimizer

from manyhands.cluster.worker.world import World

PREFIX = "history/"


def collect(optimizer: Optimizer) -> tuple[dict[str, Tensor], Any]:
    """The tensors by name, and a form of the state in which their names take their places."""
    tensors: dict[str, Tensor] = {}
    return tensors, _packed(optimizer.state_dict()["state"], tensors)


def distribute(optimizer: Optimizer, form: Any, tensors: Mapping[str, Tensor], world: World) -> None:
    """Worker 0 has the tensors; all take over the state."""
    own = {name: value.contiguous() for name, value in tensors.items() if name.startswith(PREFIX)}
    blob = world.gather(tensors_to_bytes(own) if own else b"")[0]
    state = _unpacked(form, tensors_from_bytes(blob) if blob else {})
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _packed(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = f"{PREFIX}{len(tensors)}"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"dict": [[_packed(key, tensors), _packed(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_packed(item, tensors) for item in value]}
    return value


def _unpacked(form: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(form, Mapping):
        return form
    ((kind, content),) = form.items()
    if kind == "tensor":
        return tensors[content].clone()
    if kind == "dict":
        return {_unpacked(key, tensors): _unpacked(item, tensors) for key, item in content}
    items = [_unpacked(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
