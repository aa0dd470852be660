"""The random numbers of a process: those of PyTorch, of Python and of NumPy.

Scripts seed all workers alike. Then dropout, noise and random batches would be the same on all of them, so each worker
draws from a stream of its own from `mh.session` on. The first one keeps the stream that the script has seeded, so that
one worker equals plain PyTorch. Workers that compute the same samples draw the same numbers.
"""

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from manyhands import telemetry
from manyhands.cluster.worker.world import World
from manyhands.errors import CheckpointError


def capture() -> dict[str, Any]:
    """What the next random numbers of this process depend on."""
    version, words, gauss = random.getstate()
    state: Any = numpy.random.get_state(legacy=False)
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "cuda": [one.numpy().tobytes().hex() for one in on_gpus],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "python": [version, list(words), gauss],
        "numpy": {
            **state,
            "state": {
                key: value.tolist() if isinstance(value, numpy.ndarray) else int(value)
                for key, value in state["state"].items()
            },
        },
    }


def restore(saved: dict[str, Any]) -> None:
    """The same random numbers again; what was not saved stays as it is."""
    try:
        _restore(saved)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"the state of the random numbers cannot be taken over ({error})") from None


def _restore(saved: dict[str, Any]) -> None:
    torch.set_rng_state(_bytes(saved["torch"]))
    if torch.cuda.is_available():
        for device, one in enumerate(saved.get("cuda", [])[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_bytes(one), device)
    if "python" in saved:
        version, words, gauss = saved["python"]
        random.setstate((version, tuple(words), gauss))
    if "numpy" in saved:
        numpy.random.set_state(saved["numpy"])


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def take_own(seed: int, feed: int, *, number: int | None = None) -> None:
    """Begin the stream of a worker that computes the samples of this feed. A worker that comes later has a `number`:
    what those before it have drawn is not drawn again."""
    own = hash((seed, feed, *(() if number is None else (number,)))) & 0x7FFF_FFFF_FFFF_FFFF
    if feed or number is not None:
        torch.manual_seed(own)
        random.seed(own)
        numpy.random.seed(own & 0xFFFF_FFFF)
    telemetry.event("random numbers", stream=feed, seed=own if feed or number is not None else seed)


def go_on(
    saved: Sequence[dict[str, Any]], world: World, *, copies: int, seed: int | None, steps: int
) -> None:
    """A run is resumed by other workers than those that saved: the first one goes on with its stream, and the others
    begin new ones."""
    feed = world.rank // copies
    if feed == 0:
        restore(saved[0])
    elif seed is not None:
        take_own(seed, feed, number=-steps)
    if copies > 1:
        share(world, copies)


def share(world: World, copies: int) -> None:
    """Workers that compute the same samples, so many each, go on with the numbers of the first of them."""
    lead = world.rank // copies * copies
    said = world.gather(json.dumps(capture()).encode() if lead == world.rank else b"")
    if lead != world.rank:
        restore(json.loads(said[lead]))
