"""State that differs between workers: a checkpoint holds it for each of them.

A checkpoint is a point of agreement, so parameters and buffers are the same everywhere. The state of the optimizer and
what the strategy keeps may differ where every worker has a replica of its own. What is the same as on worker 0 is
neither sent nor saved again.
"""

import zlib
from typing import Any

import msgspec
import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from manyhands.cluster.worker.world import World

Tensors = dict[str, Tensor]


def differing(own: Tensors, states: Any, world: World) -> tuple[Tensors, dict[str, Any]]:
    """Which of its tensors a worker has otherwise than worker 0, as `worker-3/…`; and by rank states that differ."""
    home = {name: value.detach().to("cpu").contiguous() for name, value in own.items()}
    mine = {name: zlib.crc32(value.view(-1).view(torch.uint8).numpy().data) for name, value in home.items()}
    everyone = [msgspec.json.decode(row) for row in world.gather(msgspec.json.encode([mine, states]))]
    first, first_states = everyone[0]
    apart = {
        f"worker-{world.rank}/{name}": home[name]
        for name, digest in mine.items()
        if first.get(name) != digest
    }
    return apart, {str(rank): theirs for rank, (_, theirs) in enumerate(everyone) if theirs != first_states}


def hand_out_apart(saved: Tensors, world: World) -> Tensors:
    """Where a checkpoint was read: from worker 0 to each of the others what was its own."""
    mine: Tensors = {}
    for rank in range(1, world.size):
        prefix = f"worker-{rank}/"
        named = {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}
        blob = world.gather(_packed(named))[0]
        if world.rank == rank:
            mine = _unpacked(blob)
    return mine


def _packed(tensors: Tensors) -> bytes:
    return tensors_to_bytes(tensors) if tensors else b""


def _unpacked(blob: bytes) -> Tensors:
    return tensors_from_bytes(blob) if blob else {}
