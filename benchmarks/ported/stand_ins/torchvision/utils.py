"""Pictures are of no use here; the file shows that the script came so far."""

from pathlib import Path
from typing import Any

from torch import Tensor


def save_image(images: Tensor, path: str, **settings: Any) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(f"{tuple(images.shape)}\n")
