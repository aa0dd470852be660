"""Whether hosts make the same bits of the same factors: each computes the sum of their products by itself.

Another processor, or another number of threads, may add up in another order. Such hosts exchange matrices.
"""

import platform
import zlib
from pathlib import Path

import torch

_WIDTH, _HEIGHT = 1030, 520
_ROWS = (1, 6, 33, 130)


def sign_of_products() -> int:
    """Of the processor, the library, its threads and the bits of a few products; equal on hosts that compute alike."""
    # By how many threads a product is divided depends on its shape: no few products show it of all.
    sign = zlib.crc32(f"{_processor()} {torch.__version__} {torch.get_num_threads()}".encode())
    numbers = torch.arange(_ROWS[-1] * _WIDTH, dtype=torch.float32)
    right = (numbers * 0.7310586).sin().view(_ROWS[-1], _WIDTH)
    left = (numbers[: _ROWS[-1] * _HEIGHT] * 0.4142136).cos().view(_ROWS[-1], _HEIGHT)
    total = torch.zeros(_HEIGHT, _WIDTH)
    for rows in _ROWS:
        total.addmm_(left[:rows].t(), right[:rows])
        sign = zlib.crc32(total.numpy().data, sign)
    return sign


def _processor() -> str:
    """Its name, as the kernel knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line for line in lines if line.startswith("model name")), platform.machine())
