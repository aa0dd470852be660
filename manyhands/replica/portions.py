"""The samples that all workers have in a step, cut into portions which any of them can compute."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from safetensors.torch import load, save
from torch import Tensor

from manyhands.comm.comm import Comm
from manyhands.errors import UsageError

Part = tuple[Any, int]  # a batch, and how many samples are in it


def pool(parts: Iterable[Part], comm: Comm, samples: int) -> list[Part]:
    """Everyone's batches, in portions of at most so many samples, in the same order on all workers."""
    everyone = [part for blob in comm.gather(_packed(parts)) for part in _unpacked(blob)]
    return [portion for batch, count in everyone for portion in _cut(batch, count, samples)]


def _cut(batch: Any, count: int, samples: int) -> Iterator[Part]:
    for start in range(0, count, samples):
        stop = min(start + samples, count)

        def some(field: Tensor, start: int = start, stop: int = stop) -> Tensor:
            return field[start:stop] if field.dim() and len(field) == count else field

        yield _mapped(batch, some), stop - start


def _packed(parts: Iterable[Part]) -> bytes:
    """Structure and tensors apart, without pickle."""
    tensors: dict[str, Tensor] = {}

    def put(field: Tensor) -> str:
        name = str(len(tensors))
        tensors[name] = field.detach().clone().contiguous()
        return name

    trees = [[_tree(batch, put), count] for batch, count in parts]
    return msgspec.msgpack.encode([trees, save(tensors) if tensors else b""])


def _unpacked(blob: bytes) -> list[Part]:
    trees, content = msgspec.msgpack.decode(blob, type=tuple[list[tuple[Any, int]], bytes])
    tensors = load(content) if content else {}
    return [(_batch(tree, tensors), count) for tree, count in trees]


def _tree(batch: Any, put: Callable[[Tensor], str]) -> list[Any]:
    if isinstance(batch, Tensor):
        return ["tensor", put(batch)]
    if isinstance(batch, (tuple, list)):
        return ["tuple" if isinstance(batch, tuple) else "list", [_tree(field, put) for field in batch]]
    if isinstance(batch, dict) and all(isinstance(key, str) for key in batch):
        return ["dict", {key: _tree(field, put) for key, field in batch.items()}]
    if batch is None or isinstance(batch, (bool, int, float)):
        return ["value", batch]
    raise UsageError(
        f"a batch with a {type(batch).__name__} cannot be divided among workers; use tensors, and tuples, lists and "
        "dictionaries of them, or another strategy"
    )


def _batch(tree: list[Any], tensors: dict[str, Tensor]) -> Any:
    kind, content = tree
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _batch(field, tensors) for key, field in content.items()}
    if kind == "value":
        return content
    fields = [_batch(field, tensors) for field in content]
    return tuple(fields) if kind == "tuple" else fields


def _mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: _mapped(field, change) for key, field in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(_mapped(field, change) for field in batch)
    return batch
