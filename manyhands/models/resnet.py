"""Residual networks: the ImageNet ones with bottlenecks and the CIFAR one with basic blocks."""

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.models import checks
from manyhands.models.blocks import convolution
from manyhands.models.initial import he_


def resnet50(shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-50: bottleneck blocks 3-4-6-3 (He et al. 2015; stride in the 3×3 as in Goyal et al. 2017)."""
    return _imagenet("resnet50", (3, 4, 6, 3), shape, classes)


def resnet152(shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-152: bottleneck blocks 3-8-36-3 (He et al. 2015; stride in the 3×3 as in Goyal et al. 2017)."""
    return _imagenet("resnet152", (3, 8, 36, 3), shape, classes)


def resnet20(shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-20 for small images: basic blocks 3-3-3, 16 to 64 channels (He et al. 2015, section 4.2)."""
    channels, _, _ = checks.image("resnet20", shape, smallest=8)
    parts = OrderedDict[str, nn.Module](stem=convolution(channels, 16, 3))
    channels = 16
    for number, width in enumerate((16, 32, 64), start=1):
        blocks: list[nn.Module] = []
        for index in range(3):
            stride = 2 if index == 0 and number > 1 else 1
            blocks.append(_basic(channels, width, stride))
            channels = width
        parts[f"stage{number}"] = nn.Sequential(*blocks)
    return _finish(parts, channels, classes)


def _imagenet(name: str, depths: tuple[int, ...], shape: tuple[int, ...], classes: int) -> nn.Module:
    channels, _, _ = checks.image(name, shape, smallest=32)
    stem = nn.Sequential(convolution(channels, 64, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1))
    parts = OrderedDict[str, nn.Module](stem=stem)
    channels = 64
    for number, (depth, width) in enumerate(zip(depths, (64, 128, 256, 512), strict=True), start=1):
        blocks: list[nn.Module] = []
        for index in range(depth):
            stride = 2 if index == 0 and number > 1 else 1
            blocks.append(_bottleneck(channels, width, stride))
            channels = 4 * width
        parts[f"stage{number}"] = nn.Sequential(*blocks)
    return _finish(parts, channels, classes)


def _finish(parts: OrderedDict[str, nn.Module], channels: int, classes: int) -> nn.Module:
    parts["head"] = nn.Sequential(
        OrderedDict[str, nn.Module](
            mean=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(channels, classes)
        )
    )
    model = nn.Sequential(parts)
    he_(model)
    return model


class Residual(nn.Module):
    """A branch added to its own input, then rectified."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut
        self.relu = nn.ReLU(inplace=True)

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.relu(self.branch(images) + self.shortcut(images))
        return result


class PaddedShortcut(nn.Module):
    """Every second pixel, with channels of zeros added: a shortcut without parameters (option A)."""

    def __init__(self, extra_channels: int) -> None:
        super().__init__()
        self.extra_channels = extra_channels

    def forward(self, images: Tensor) -> Tensor:
        return F.pad(images[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.extra_channels))


def _bottleneck(channels: int, width: int, stride: int) -> nn.Module:
    branch = nn.Sequential(
        convolution(channels, width, 1),
        convolution(width, width, 3, stride=stride),
        convolution(width, 4 * width, 1, relu=False),
    )
    same = stride == 1 and channels == 4 * width
    shortcut = nn.Identity() if same else convolution(channels, 4 * width, 1, stride=stride, relu=False)
    return Residual(branch, shortcut)


def _basic(channels: int, width: int, stride: int) -> nn.Module:
    branch = nn.Sequential(
        convolution(channels, width, 3, stride=stride),
        convolution(width, width, 3, relu=False),
    )
    return Residual(branch, nn.Identity() if stride == 1 else PaddedShortcut(width - channels))
