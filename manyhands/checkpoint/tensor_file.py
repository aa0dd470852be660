"""Named tensors as a stream of safetensors bytes, a few megabytes at a time.

The library's own writer refuses tensors that are not contiguous or that share memory, and some versions of
it hold a second copy of everything. Parameters here are views of one flat vector that may be half of the
machine's memory, so the bytes are produced piece by piece. Reading is the library's.

The format: 8 bytes with the header's length, a JSON header `{name: {dtype, shape, data_offsets}}`, the data.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from manyhands.errors import CheckpointError
from manyhands.foreign.regular import open_regular

PIECE_BYTES = 8 * 2**20
MOST_DIMENSIONS = 64

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}

Form = tuple[str, list[int]]  # of a tensor: the name of its type, and its shape


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """A file before it is written: its first bytes, and where each tensor begins."""

    head: bytes
    places: dict[str, int]
    size_bytes: int


def form(name: str, tensor: torch.Tensor) -> Form:
    """What the file says of a tensor; one that cannot be saved is refused."""
    _refuse_unsavable(name, tensor)
    return DTYPES[tensor.dtype], list(tensor.shape)


def lay_out(forms: Mapping[str, Form]) -> FileLayout:
    """The file that will hold tensors of these forms."""
    # Wide types first: then every tensor starts at a multiple of its element size and can be mapped in place.
    ordered = sorted(forms.items(), key=lambda item: (-DTYPE_OF[item[1][0]].itemsize, item[0]))
    header, starts = {}, {}
    end = 0
    for name, (dtype, shape) in ordered:
        starts[name], end = end, end + math.prod(shape) * DTYPE_OF[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [starts[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    places = {name: len(head) + start for name, start in starts.items()}
    return FileLayout(head=head, places=places, size_bytes=len(head) + end)


def octets(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, as the file has them; the tensor's own memory where that is possible."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # A single element may keep any stride and still call itself contiguous; a view as bytes needs stride 1.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data


def encode(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes]:
    """The file's bytes in order; what cannot be saved is refused at once, before the first byte."""
    layout = lay_out({name: form(name, tensor) for name, tensor in tensors.items()})
    return _stream(layout, tensors)


def decode(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, mapped: read when touched; changes never reach the file."""
    try:
        open_regular(path).close()
        found = dict(load_file(path))
        if wrong := [name for name, tensor in found.items() if tensor.ndim > MOST_DIMENSIONS]:
            raise ValueError(f"{wrong[0]!r} has {found[wrong[0]].ndim} dimensions")
        return found
    except OSError:
        raise
    except Exception as error:  # the library's own errors, and those of PyTorch where it makes the tensors
        raise CheckpointError(f"{path.name} is not a safetensors file ({error})") from error


def _refuse_unsavable(name: str, tensor: torch.Tensor) -> None:
    reason = None
    if name == "__metadata__":
        reason = "safetensors reserves this name"
    elif tensor.layout != torch.strided or tensor.is_meta:
        reason = f"it is {'on the meta device' if tensor.is_meta else tensor.layout}, not dense with values"
    elif tensor.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        reason = f"its type is {str(tensor.dtype).removeprefix('torch.')}; convert it to one of {known}"
    if reason:
        raise CheckpointError(f"tensor {name!r} cannot be saved: {reason}")


def _stream(layout: FileLayout, tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes]:
    yield layout.head
    for name in layout.places:
        content = octets(tensors[name])
        for start in range(0, len(content), PIECE_BYTES):
            # A copy, because other workers may be writing to shared parameters:
            # the bytes that are hashed must be the bytes that are written.
            yield content[start : start + PIECE_BYTES].tobytes()
