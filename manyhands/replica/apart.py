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

from manyhands.cluster.world import World

Tensors = dict[str, Tensor]


def collect_apart(own: Tensors, states: Any, world: World) -> tuple[Tensors, dict[str, Any]]:
    """What the others have that worker 0 has not: tensors as `worker-3/…`, complete on worker 0, and states by rank."""
    home = {name: value.detach().to("cpu").contiguous() for name, value in own.items()}
    mine = {
        name: zlib.crc32(value.view(-1).view(torch.uint8).numpy().tobytes()) for name, value in home.items()
    }
    everyone = [msgspec.json.decode(row) for row in world.gather(msgspec.json.encode([mine, states]))]
    first, first_states = everyone[0]
    differing = {name: home[name] for name, digest in mine.items() if first.get(name) != digest}
    found: Tensors = {}
    for rank in range(1, world.size):  # one after the other: nobody needs room for all of them at once
        blob = world.gather(_packed(differing) if world.rank == rank else b"")[rank]
        if world.rank == 0:
            found |= {f"worker-{rank}/{name}": value for name, value in _unpacked(blob).items()}
    others = {str(rank): own for rank, (_, own) in enumerate(everyone) if own != first_states}
    return found, others


def hand_out_apart(saved: Tensors, world: World) -> Tensors:
    """The inverse: from worker 0 to each of the others what was its own."""
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
