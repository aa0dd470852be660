"""What the scripts find in the folder that they run in, where they read files of their own."""

from pathlib import Path

import numpy as np
import torch

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def write(folder: Path) -> None:
    """The same files for all scripts: small, and made from seeds."""
    drawn = np.random.default_rng(0)
    (folder / "data" / "tiny").mkdir(parents=True)
    (folder / "results").mkdir()
    lines = (
        " ".join(WORDS[(start + step) % 10] for step in range(10)) for start in drawn.integers(10, size=600)
    )
    (folder / "data" / "train.txt").write_text("\n".join(lines) + "\n")
    for name, count in (("train", 4000), ("val", 1000)):
        (np.arange(count) % 61).astype(np.uint16).tofile(folder / "data" / "tiny" / f"{name}.bin")
    waves = np.sin((np.arange(24) + drawn.integers(80, size=(9, 1))) / 4.0)
    torch.save(waves, folder / "traindata.pt")
