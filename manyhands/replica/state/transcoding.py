"""An optimizer's state by parameter and name, taken apart for a message or a checkpoint, and put together again.

`Updates.export` gives values: None for what a vector over all parameters holds, else a tensor or a number. Taken apart,
they are entries, which say of each value what it is and hold the numbers, and the tensors under "parameter/name".
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

# Where a value is: in a vector that covers all parameters, in a tensor of its own, or in the entry.
VECTOR, TENSOR, NUMBER = "vector", "tensor", "number"

States = dict[str, dict[str, list[Any]]]
Values = dict[str, dict[str, Any]]


def take_apart(values: Mapping[str, Mapping[str, Any]]) -> tuple[States, dict[str, Tensor]]:
    """The entries, and copies of the tensors: neighbours may share one."""
    states: States = {}
    tensors: dict[str, Tensor] = {}
    for param, known in values.items():
        for name, value in known.items():
            states.setdefault(param, {})[name] = entry(value)
            if isinstance(value, Tensor):
                tensors[f"{param}/{name}"] = value.clone().contiguous()
    return states, tensors


def put_together(states: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> Values:
    """The inverse; a tensor that is missing becomes None."""
    return {
        param: {name: value_of(found, tensors.get(f"{param}/{name}")) for name, found in entries.items()}
        for param, entries in states.items()
        if entries
    }


def entry(value: Any) -> list[Any]:
    """What a value is, and the value itself if it is a number."""
    kind = VECTOR if value is None else TENSOR if isinstance(value, Tensor) else NUMBER
    return [kind, value if kind == NUMBER else None]


def value_of(found: Sequence[Any], tensor: Tensor | None) -> Any:
    """The value that an entry stands for; `tensor` if it is one."""
    kind, number = found
    return {VECTOR: None, NUMBER: number}.get(kind, tensor)
