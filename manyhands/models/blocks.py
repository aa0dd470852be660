"""What several families are made of."""

from collections import OrderedDict

from torch import nn


def convolution(
    channels: int, width: int, kernel: int, *, stride: int = 1, relu: bool = True
) -> nn.Sequential:
    """Convolution and batch normalisation, rectified unless a sum follows."""
    layers = OrderedDict[str, nn.Module](
        conv=nn.Conv2d(channels, width, kernel, stride=stride, padding=kernel // 2, bias=False),
        norm=nn.BatchNorm2d(width),
    )
    if relu:
        layers["relu"] = nn.ReLU(inplace=True)
    return nn.Sequential(layers)
