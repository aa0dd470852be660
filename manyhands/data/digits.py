"""The handwritten digits that come with the package; `digits.md` says where they are from."""

from pathlib import Path

import numpy as np
import torch

from manyhands.data.pictures import pictures
from manyhands.data.request import NoSettings, Request
from manyhands.data.sets import ArrayStore, Data, hold_out
from manyhands.data.transforms import Scale

_TEST_SAMPLES = 360
_BRIGHTEST = 16
_SPLIT_SEED = 0
"""Fixed: accuracies of different runs are comparable only on the same held-out part."""


def load(request: Request, settings: NoSettings) -> Data:
    """1437 pictures to train on and 360 to test on, each digit in proportion."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as arrays:
        images, labels = torch.from_numpy(arrays["x"]).unsqueeze(1), torch.from_numpy(arrays["y"])
    train, test = hold_out(labels, _TEST_SAMPLES, _SPLIT_SEED)
    return pictures(
        request,
        train=ArrayStore(inputs=images[train], targets=labels[train]),
        test=ArrayStore(inputs=images[test], targets=labels[test]),
        shape=(1, 8, 8),
        classes=10,
        scale=Scale(full=_BRIGHTEST),
        class_names=tuple("0123456789"),
    )
