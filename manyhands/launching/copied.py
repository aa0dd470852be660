"""How a function travels from a program to the workers of `mh.run`, and how their values come back: as copies, pickled
by value, in anonymous memory of the calling process.

The workers open that memory by the calling process's id, which only processes of the same user on the same host can do.
Nothing of it crosses a network or lies on a disk, and it is gone with the calling process.
"""

import contextlib
import fcntl
import importlib
import linecache
import os
import pickle
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import cloudpickle

from manyhands.comm.transports import peer_user
from manyhands.errors import ManyhandsError, UsageError

_END = struct.Struct("q")  # at the beginning of the memory with values: where the last complete one ends
_VALUE = struct.Struct("qqq")  # before each value: rank, number of workers, bytes


class CopyPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles by value what no other process can import; of a tensor that shows part of a memory, that part alone."""

    has_model = False
    """Whether a model was among what was pickled."""

    def reducer_override(self, value: Any) -> Any:
        if issubclass(type(value), ModuleType) and type(value) is not ModuleType:
            # cloudpickle knows plain modules alone, and takes `digits.classes` for a use of `torch.classes`.
            name = next((name for name, module in [*sys.modules.items()] if module is value), None)
            if name not in (None, "__main__"):
                return importlib.import_module, (name,)
        if torch := sys.modules.get("torch"):
            if isinstance(value, torch.nn.Module):
                self.has_model = True
            if type(value) is torch.Tensor and _is_part(torch, value):
                return value.detach().clone().requires_grad_(value.requires_grad).__reduce_ex__(5)
        return super().reducer_override(value)


def _is_part(torch: Any, tensor: Any) -> bool:
    """Whether its memory has more than the tensor: the parameters of a session lie in the memory of all workers."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return False
    return bool(tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size())


@contextlib.contextmanager
def anonymous_file(name: str) -> Iterator[IO[bytes]]:
    """A file in memory, which other processes can open as long as this context lasts."""
    with os.fdopen(os.memfd_create(f"manyhands-{name}", os.MFD_CLOEXEC), "w+b") as file:
        yield file


def theirs(pid: int, fd: int) -> Path:
    """The path of another process's open file."""
    return Path(f"/proc/{pid}/fd/{fd}")


# The function


def write_call(file: IO[bytes], function: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
    """Write what a worker needs to make this call as if it were made here; says whether a model is in it."""
    pickle.dump(_surroundings(), file)
    pickler = CopyPickler(file, protocol=5)
    try:
        pickler.dump((function, arguments))
    except Exception as error:
        raise UsageError(
            f"the function cannot be copied to the workers ({_said(error)}): something that it uses exists in this "
            "process alone, such as an open file, a lock or a generator; make that inside the function"
        ) from None
    file.flush()
    return pickler.has_model


def read_call(path: Path) -> Callable[[], Any]:
    """In a worker: the call."""
    with open(peer_user.opened(path, os.O_RDONLY), "rb") as file:
        _surround(pickle.load(file))
        try:
            function, arguments = pickle.load(file)
        except Exception as error:
            raise UsageError(
                f"a worker cannot make the function from its copy ({_said(error)}); what the function imports must be "
                "found on sys.path"
            ) from None
    return lambda: function(*arguments)


def _surroundings() -> dict[str, Any]:
    """What a script would have around the call: where modules are, its words, PyTorch's defaults and random state; and
    the lines of cells, which are in no file, for tracebacks."""
    found: dict[str, Any] = {"path": [*sys.path], "argv": [*sys.argv]}
    found["lines"] = {
        name: "".join(entry[2])
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and not os.path.exists(name)
    }
    if (torch := sys.modules.get("torch")) and hasattr(torch, "get_rng_state"):
        found["torch"] = (torch.get_default_dtype(), torch.initial_seed(), torch.get_rng_state())
    return found


def _surround(found: dict[str, Any]) -> None:
    sys.path[:] = found["path"]
    sys.argv[:] = found["argv"]
    for name, text in found["lines"].items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    if "torch" in found:
        import torch

        dtype, seed, state = found["torch"]
        torch.set_default_dtype(dtype)
        torch.manual_seed(seed)
        torch.set_rng_state(state)


# The values


def put_value(path: Path, rank: int, workers: int, value: Any) -> None:
    """In a worker: add its value; one that dies meanwhile leaves those of the others whole."""
    with open(peer_user.opened(path, os.O_RDWR), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        begin = _end_of(file)
        file.truncate(begin)
        file.seek(begin + _VALUE.size)
        try:
            CopyPickler(file, protocol=5).dump(value)
        except Exception as error:
            raise UsageError(
                f"worker {rank} returned a {type(value).__name__} that cannot be copied to here ({_said(error)}); "
                "return tensors, arrays, state dicts and plain values"
            ) from None
        end = file.tell()
        file.seek(begin)
        file.write(_VALUE.pack(rank, workers, end - begin))
        file.flush()
        os.pwrite(file.fileno(), _END.pack(end), 0)


def take_values(file: IO[bytes]) -> tuple[dict[int, Any], int]:
    """The values by rank, and how many workers there were in the end."""
    values: dict[int, Any] = {}
    workers, place, end = 0, _END.size, _end_of(file)
    while place < end:
        file.seek(place)
        rank, workers, length = _VALUE.unpack(file.read(_VALUE.size))
        try:
            values[rank] = pickle.load(file)
        except Exception as error:
            raise ManyhandsError(
                f"what worker {rank} returned cannot be made here from its copy ({_said(error)})"
            ) from None
        place += length
    return values, workers


def _end_of(file: IO[bytes]) -> int:
    found = os.pread(file.fileno(), _END.size, 0)
    return _END.unpack(found)[0] if found else _END.size


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
