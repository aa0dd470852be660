"""The buffers of a model, in whatever memory they lie: views, expanded ones, sparse ones.

A buffer may see one value at many places, or keep its values in several tensors. Each value is sent, averaged and put
back once.
"""

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from manyhands.cluster.worker.world import World
from manyhands.errors import UsageError

_SPARSE: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),  # the tensors themselves; those without underscore are copies
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def parts_of(tensor: Tensor) -> dict[str, Tensor]:
    """The dense tensors in which the values are, each of them once; what is written into them is in the tensor."""
    tensor = tensor.detach()
    if tensor.layout in _SPARSE:
        return {name.lstrip("_"): getattr(tensor, name)() for name in _SPARSE[tensor.layout]}
    if tensor.layout != torch.strided or tensor.is_quantized:
        return {}
    return {"": _once(tensor, tensor)}


def _once(values: Tensor, like: Tensor) -> Tensor:
    """Of values in the shape of a tensor that may be expanded, which has one value at many places, each one once."""
    for dim, stride in enumerate(like.stride()):
        if stride == 0 and like.shape[dim] > 1:
            values = values.narrow(dim, 0, 1)
    return values


def dense(buffers: Iterable[Tensor]) -> list[Tensor]:
    """The parts of several buffers, without those that are empty."""
    return [part for buffer in buffers for part in parts_of(buffer).values() if part.numel()]


def home(part: Tensor) -> Tensor:
    """Its values as a vector in host memory, which is nothing else's."""
    return part.to("cpu", copy=True).reshape(-1)


def put(values: Tensor, part: Tensor) -> None:
    """The inverse."""
    with torch.no_grad():
        part.copy_(values.view(part.shape))


def write(values: Tensor, tensor: Tensor) -> None:
    """Values in the shape of a dense tensor into it, which may be expanded."""
    with torch.no_grad():
        _once(tensor.detach(), tensor).copy_(_once(values, tensor))


# All workers together


def from_first(buffers: Sequence[Tensor], world: World) -> None:
    """Worker 0's become everyone's."""
    if world.size == 1:
        return
    parts = dense(buffers)
    shapes = [tuple(part.shape) for part in parts]
    said = world.exchange([float(zlib.crc32(repr(shapes).encode()))])
    for rank, row in enumerate(said):
        if row != said[0]:
            raise UsageError(
                f"the model's buffers have other shapes on worker {rank} than on worker 0; build the same model on "
                "all workers"
            )
    for part in parts:
        values = home(part)
        world.comm.copy_(values)
        put(values, part)


def average(buffers: Sequence[Tensor], world: World) -> list[Tensor]:
    """The rule for buffers: between pauses each worker keeps its own; at a pause those that differ become the mean over
    all workers if they are floating-point, and worker 0's otherwise (counters). Those that have not the same length
    everywhere, as a memory that grows with what a worker sees, stay what they are. Returns those that differed."""
    parts = [(buffer, part) for buffer in buffers for part in dense([buffer])]
    if world.size == 1 or not parts:
        return []
    homes = [home(part) for _, part in parts]
    digests = [
        number
        for values in homes
        for number in (values.numel(), zlib.crc32(values.view(torch.uint8).numpy().tobytes()))
    ]
    form = f"{len(digests)}Q"
    everyone = [struct.unpack(form, row) for row in world.gather(struct.pack(form, *digests))]
    differed: dict[int, Tensor] = {}
    for index, ((buffer, part), values) in enumerate(zip(parts, homes, strict=True)):
        lengths, sums = ({row[2 * index + which] for row in everyone} for which in range(2))
        if len(sums) > 1:
            differed[id(buffer)] = buffer
        if len(lengths) > 1 or len(sums) == 1:
            continue  # constants stay what they are, to the bit
        if part.is_floating_point():
            world.comm.mean_(values)
        else:
            world.comm.copy_(values)
        put(values, part)
    return list(differed.values())


# In a checkpoint


def to_saved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As a file can hold them: a sparse tensor as those that it is made of."""
    return {
        f"{name}:{kind}" if kind else name: part if kind else tensors[name]
        for name, tensor in tensors.items()
        for kind, part in (parts_of(tensor) or {"": tensor}).items()
    }


def from_saved(saved: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse, given the tensors that are to take the values over. PyTorch writes into no expanded tensor: that is
    done here, and the tensor stands for its values."""
    found = dict(saved)
    for name, tensor in like.items():
        kinds = [kind for kind in parts_of(tensor) if kind]
        if kinds and all(f"{name}:{kind}" in found for kind in kinds):
            found[name] = _sparse(tensor, [found.pop(f"{name}:{kind}") for kind in kinds])
        elif name in found and is_expanded(tensor) and found[name].shape == tensor.shape:
            write(found[name], tensor)
            found[name] = tensor
    return found


def is_expanded(tensor: Tensor) -> bool:
    """Whether it has one value at several places."""
    return tensor.layout == torch.strided and _once(tensor, tensor).numel() < tensor.numel()


def _sparse(like: Tensor, parts: Sequence[Tensor]) -> Tensor:
    if like.layout == torch.sparse_coo:
        made = torch.sparse_coo_tensor(parts[0], parts[1], like.shape, check_invariants=False)
        return made._coalesced_(like.is_coalesced())
    places, numbers, values = parts
    return torch.sparse_compressed_tensor(
        places, numbers, values, like.shape, layout=like.layout, check_invariants=False
    )
