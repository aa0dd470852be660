"""VGG networks, configurations D and E."""

from collections import OrderedDict

from torch import nn

from manyhands.errors import UnknownName
from manyhands.models import checks
from manyhands.models.initial import gaussian_, he_

WIDTHS = (64, 128, 256, 512, 512)


def vgg16(shape: tuple[int, ...], classes: int, *, head: str = "published") -> nn.Module:
    """VGG-16: 13 convolutions, 3 linear layers or one with head=linear (Simonyan & Zisserman 2014)."""
    return _vgg("vgg16", (2, 2, 3, 3, 3), shape, classes, head)


def vgg19(shape: tuple[int, ...], classes: int, *, head: str = "published") -> nn.Module:
    """VGG-19: 16 convolutions, 3 linear layers or one with head=linear (Simonyan & Zisserman 2014)."""
    return _vgg("vgg19", (2, 2, 4, 4, 4), shape, classes, head)


def _vgg(name: str, depths: tuple[int, ...], shape: tuple[int, ...], classes: int, head: str) -> nn.Module:
    channels, _, _ = checks.image(name, shape, smallest=32)
    heads = {"published": _published_head, "linear": _linear_head}
    if head not in heads:
        raise UnknownName(f"head of {name}", head, heads)
    parts = OrderedDict[str, nn.Module]()
    for number, (depth, width) in enumerate(zip(depths, WIDTHS, strict=True), start=1):
        parts[f"stage{number}"] = _stage(channels, width, depth)
        channels = width
    parts["head"] = heads[head](channels, classes)
    model = nn.Sequential(parts)
    he_(model)
    gaussian_(model)
    return model


def _stage(channels: int, width: int, depth: int) -> nn.Sequential:
    """`depth` 3×3 convolutions, then the image is halved."""
    layers = OrderedDict[str, nn.Module]()
    for number in range(1, depth + 1):
        layers[f"conv{number}"] = nn.Conv2d(channels, width, 3, padding=1)
        layers[f"relu{number}"] = nn.ReLU(inplace=True)
        channels = width
    layers["pool"] = nn.MaxPool2d(2)
    return nn.Sequential(layers)


def _published_head(channels: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            grid=nn.AdaptiveAvgPool2d(7),
            flatten=nn.Flatten(),
            fc6=nn.Linear(channels * 7 * 7, 4096),
            relu6=nn.ReLU(inplace=True),
            drop6=nn.Dropout(),
            fc7=nn.Linear(4096, 4096),
            relu7=nn.ReLU(inplace=True),
            drop7=nn.Dropout(),
            fc8=nn.Linear(4096, classes),
        )
    )


def _linear_head(channels: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            mean=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(channels, classes)
        )
    )
