"""GoogLeNet with batch normalisation, without the auxiliary classifiers.

The filter table is the paper's table 1, including its 5×5 convolutions. A widespread implementation has 3×3
in their place and therefore 6,624,904 parameters instead of 7,005,832.
"""

from collections import OrderedDict
from typing import NamedTuple

from torch import nn

from manyhands.models import checks
from manyhands.models.blocks import Branches, convolution
from manyhands.models.initial import he_


class Filters(NamedTuple):
    """One row of the paper's table: output channels of each convolution of an inception module."""

    one: int
    three_reduce: int
    three: int
    five_reduce: int
    five: int
    pool_project: int


TABLE = {
    "inception3a": Filters(64, 96, 128, 16, 32, 32),
    "inception3b": Filters(128, 128, 192, 32, 96, 64),
    "inception4a": Filters(192, 96, 208, 16, 48, 64),
    "inception4b": Filters(160, 112, 224, 24, 64, 64),
    "inception4c": Filters(128, 128, 256, 24, 64, 64),
    "inception4d": Filters(112, 144, 288, 32, 64, 64),
    "inception4e": Filters(256, 160, 320, 32, 128, 128),
    "inception5a": Filters(256, 160, 320, 32, 128, 128),
    "inception5b": Filters(384, 192, 384, 48, 128, 128),
}


def googlenet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """GoogLeNet: 9 inception modules (Szegedy et al. 2014), batch-normalised (Ioffe & Szegedy 2015)."""
    channels, _, _ = checks.image("googlenet", shape, smallest=32)
    parts = OrderedDict[str, nn.Module](
        conv1=convolution(channels, 64, 7, stride=2),
        pool1=_halve(),
        conv2=nn.Sequential(convolution(64, 64, 1), convolution(64, 192, 3)),
        pool2=_halve(),
    )
    channels = 192
    for name, filters in TABLE.items():
        if name in ("inception4a", "inception5a"):
            parts[f"pool{int(name[-2]) - 1}"] = _halve()
        parts[name] = Inception(channels, filters)
        channels = filters.one + filters.three + filters.five + filters.pool_project
    parts["head"] = nn.Sequential(
        OrderedDict[str, nn.Module](
            mean=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            drop=nn.Dropout(0.4),
            fc=nn.Linear(channels, classes),
        )
    )
    model = nn.Sequential(parts)
    he_(model)
    return model


class Inception(Branches):
    """Four branches over the same input, their channels joined."""

    def __init__(self, channels: int, filters: Filters) -> None:
        super().__init__(
            one=convolution(channels, filters.one, 1),
            three=nn.Sequential(
                convolution(channels, filters.three_reduce, 1),
                convolution(filters.three_reduce, filters.three, 3),
            ),
            five=nn.Sequential(
                convolution(channels, filters.five_reduce, 1),
                convolution(filters.five_reduce, filters.five, 5),
            ),
            pool=nn.Sequential(
                nn.MaxPool2d(3, stride=1, padding=1), convolution(channels, filters.pool_project, 1)
            ),
        )


def _halve() -> nn.Module:
    # Rounding up gives the paper's sizes (112 → 56 → 28 → 14 → 7) and keeps the window valid down to 2×2.
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)
