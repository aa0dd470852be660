"""Published data in its official form, with records that are made up: a test downloads nothing."""

from pathlib import Path

import numpy as np


def cifar10(folder: Path) -> None:
    """The files of CIFAR-10, 64 records each: a class and 3 × 32 × 32 bytes."""
    folder = folder / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        records = random.integers(0, 256, (64, 1 + 3 * 32 * 32), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(folder / f"{name}.bin")
