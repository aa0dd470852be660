"""AlexNet in one column, without local response normalisation."""

from collections import OrderedDict

from torch import nn

from manyhands.models import checks
from manyhands.models.initial import gaussian_, he_


def alexnet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """AlexNet: 5 convolutions, 3 linear layers (Krizhevsky et al. 2012, one column as in Krizhevsky 2014)."""
    channels, height, width = checks.image("alexnet", shape, smallest=32)
    sides = _sides_before_pools(min(height, width))
    features = nn.Sequential(
        OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(channels, 64, 11, stride=4, padding=2),
            relu1=nn.ReLU(inplace=True),
            pool1=_pool(sides[0]),
            conv2=nn.Conv2d(64, 192, 5, padding=2),
            relu2=nn.ReLU(inplace=True),
            pool2=_pool(sides[1]),
            conv3=nn.Conv2d(192, 384, 3, padding=1),
            relu3=nn.ReLU(inplace=True),
            conv4=nn.Conv2d(384, 256, 3, padding=1),
            relu4=nn.ReLU(inplace=True),
            conv5=nn.Conv2d(256, 256, 3, padding=1),
            relu5=nn.ReLU(inplace=True),
            pool5=_pool(sides[2]),
        )
    )
    head = nn.Sequential(
        OrderedDict[str, nn.Module](
            grid=nn.AdaptiveAvgPool2d(6),
            flatten=nn.Flatten(),
            drop6=nn.Dropout(),
            fc6=nn.Linear(256 * 6 * 6, 4096),
            relu6=nn.ReLU(inplace=True),
            drop7=nn.Dropout(),
            fc7=nn.Linear(4096, 4096),
            relu7=nn.ReLU(inplace=True),
            fc8=nn.Linear(4096, classes),
        )
    )
    model = nn.Sequential(OrderedDict[str, nn.Module](features=features, head=head))
    he_(model)
    gaussian_(model)
    return model


def _sides_before_pools(side: int) -> list[int]:
    """The shorter side of the feature map in front of each of the three pools."""
    sides = [(side + 2 * 2 - 11) // 4 + 1]
    while len(sides) < 3:
        sides.append((sides[-1] - 3) // 2 + 1)
    return sides


def _pool(side: int) -> nn.Module:
    """3×3 pooling; left out where its window no longer fits (the last one, for images below 63×63).

    An identity takes its place, so that parameters have the same names at every image size.
    """
    return nn.MaxPool2d(3, stride=2) if side >= 3 else nn.Identity()
