"""The random states of a process: those of PyTorch, of Python and of NumPy, as plain values and back."""

import random
from typing import Any

import numpy
import torch


def capture() -> dict[str, Any]:
    """What the next random numbers of this process depend on."""
    version, words, gauss = random.getstate()
    state: Any = numpy.random.get_state(legacy=False)
    return {
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
    state = bytearray.fromhex(saved["torch"])
    torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8))
    if "python" in saved:
        version, words, gauss = saved["python"]
        random.setstate((version, tuple(words), gauss))
    if "numpy" in saved:
        numpy.random.set_state(saved["numpy"])
