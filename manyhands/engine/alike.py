"""Whether workers that compute the same were given the same: from others the parts of a layer make no sense."""

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from manyhands.engine.engine import Engine
from manyhands.errors import UsageError
from manyhands.replica.state.buffers import parts_of


def check_alike(engine: Engine, given: Any, advice: str) -> None:
    """All workers ask; those that have the parts of one model compare what they were given."""
    copies = engine.generation.copies
    if copies == 1:
        return
    digests = [row[0] for row in engine.world.exchange([float(digest(tree_leaves(given)))])]
    for rank, own in enumerate(digests):
        lead = rank // copies * copies
        if own != digests[lead]:
            raise UsageError(
                f"workers {lead} and {rank} have parts of one model and were given different samples, of which their "
                f"parts make no sense together; {advice}"
            )


def digest(values: Iterable[Any]) -> int:
    """Of tensors, numbers and texts; what else there may be says nothing of its contents."""
    found = 0
    for value in values:
        if isinstance(value, Tensor):
            for part in parts_of(value).values():
                plain = part.to("cpu").contiguous()
                found = zlib.crc32(plain.view(-1).view(torch.uint8).numpy().data, found)
        elif isinstance(value, (bool, int, float, str)):
            found = zlib.crc32(repr(value).encode(), found)
    return found
