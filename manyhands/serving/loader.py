"""Brings a version into memory and out of it: estimates what it takes, loads, warms up, tries it on its sample."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from manyhands.checkpoint.publish import TENSORS, WEIGHTS
from manyhands.comm.transports.free_memory import available_bytes
from manyhands.errors import ManyhandsError
from manyhands.foreign.regular import open_regular
from manyhands.serving.description import Description
from manyhands.serving.servable import Servable
from manyhands.serving.stream import ModelVersion

_COPIES = 2  # while a version is loaded: the file's pages, and the model's own
_LONGEST_HEADER = 100 << 20  # the limit of safetensors itself


class LoadFailed(ManyhandsError):
    """A version could not be brought into memory; `for_good`: another attempt would end alike."""

    def __init__(self, reason: str, *, for_good: bool = False) -> None:
        super().__init__(reason)
        self.for_good = for_good


class LoadingPool(Protocol):
    """Where models compute."""

    count: int

    async def load(self, version: ModelVersion) -> tuple[int, Description, float | None, float]:
        """A handle for it, what it takes and gives, its accuracy, and the seconds that it took."""
        ...

    def unload(self, handle: int) -> None: ...


class VersionLoader:
    """Loads into all processes of a pool."""

    def __init__(self, pool: LoadingPool) -> None:
        self._pool = pool

    async def load(self, version: ModelVersion, least_accuracy: float) -> Servable:
        """The version, ready to answer; refused if there is no memory, or if it is worse than it may be."""
        needed, free = _COPIES * self._pool.count * estimated_bytes(version.place), available_bytes()
        if needed > free:
            raise LoadFailed(
                f"it needs about {needed / 1e6:,.0f} MB of memory in {self._pool.count} processes, and "
                f"{free / 1e6:,.0f} MB are free; use fewer --processes, or policy resource-preserving"
            )
        handle, form, accuracy, took_s = await self._pool.load(version)
        if accuracy is not None and accuracy < least_accuracy:
            self._pool.unload(handle)
            raise LoadFailed(
                f"accuracy {accuracy:.1%} on its sample is below {least_accuracy:.1%}, the least that may follow "
                "the version that is served",
                for_good=True,
            )
        return Servable(version=version, handle=handle, form=form, accuracy=accuracy, load_s=took_s)

    def unload(self, servable: Servable) -> None:
        self._pool.unload(servable.handle)


def estimated_bytes(place: Path) -> int:
    """Of a version's weights, from the head of their file; 0 where it cannot be read, which loading will say better."""
    try:
        name = WEIGHTS if (place / WEIGHTS).exists() else TENSORS
        with open_regular(place / name) as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, _LONGEST_HEADER)))
        sizes = [_size(entry["data_offsets"]) for entry in _of_model(header)]
    except (OSError, ValueError, LookupError, ArithmeticError, TypeError, AttributeError):
        return 0
    except (struct.error, RecursionError):
        return 0
    return sum(sizes)


def _of_model(header: dict) -> Sequence[dict]:
    """A checkpoint has the optimizer's state as well, which is not loaded."""
    own = [entry for name, entry in header.items() if name.startswith("model/")]
    return own or [entry for name, entry in header.items() if name != "__metadata__"]


def _size(offsets: Sequence[int]) -> int:
    return int(offsets[1]) - int(offsets[0])
