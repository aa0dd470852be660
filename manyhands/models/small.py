"""Small networks that train on a CPU in seconds."""

import math
from collections import OrderedDict

from torch import nn

from manyhands.models import checks
from manyhands.models.initial import he_


def mlp(shape: tuple[int, ...], classes: int, *, hidden: tuple[int, ...] = (256,)) -> nn.Module:
    """Multi-layer perceptron, hidden=4096-4096 for two hidden layers (Rumelhart et al. 1986)."""
    layers = OrderedDict[str, nn.Module](flatten=nn.Flatten())
    inputs = math.prod(shape)
    for number, width in enumerate(hidden, start=1):
        checks.positive("mlp", hidden=width)
        layers[f"fc{number}"] = nn.Linear(inputs, width)
        layers[f"relu{number}"] = nn.ReLU(inplace=True)
        inputs = width
    layers["output"] = nn.Linear(inputs, classes)
    model = nn.Sequential(layers)
    he_(model)
    return model


def cnn(shape: tuple[int, ...], classes: int, *, width: int = 32) -> nn.Module:
    """Small convolutional network: 3 convolutions, 2 linear layers (after LeCun et al. 1998)."""
    checks.positive("cnn", width=width)
    channels, _, _ = checks.image("cnn", shape, smallest=8)
    model = nn.Sequential(
        OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(channels, width, 3, padding=1),
            relu1=nn.ReLU(inplace=True),
            conv2=nn.Conv2d(width, 2 * width, 3, padding=1),
            relu2=nn.ReLU(inplace=True),
            pool2=nn.MaxPool2d(2),
            conv3=nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            relu3=nn.ReLU(inplace=True),
            grid=nn.AdaptiveAvgPool2d(4),
            flatten=nn.Flatten(),
            fc4=nn.Linear(2 * width * 4 * 4, 4 * width),
            relu4=nn.ReLU(inplace=True),
            fc5=nn.Linear(4 * width, classes),
        )
    )
    he_(model)
    return model


def lenet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-5: 2 convolutions, 3 linear layers, tanh (LeCun et al. 1998)."""
    channels, height, width = checks.image("lenet", shape, smallest=8)
    model = nn.Sequential(
        OrderedDict[str, nn.Module](
            centre=_centre(height, width),
            conv1=nn.Conv2d(channels, 6, 5),
            tanh1=nn.Tanh(),
            pool2=nn.AvgPool2d(2),
            conv3=nn.Conv2d(6, 16, 5),
            tanh3=nn.Tanh(),
            pool4=nn.AvgPool2d(2),
            grid=nn.AdaptiveAvgPool2d(5),
            flatten=nn.Flatten(),
            fc5=nn.Linear(16 * 5 * 5, 120),
            tanh5=nn.Tanh(),
            fc6=nn.Linear(120, 84),
            tanh6=nn.Tanh(),
            output=nn.Linear(84, classes),
        )
    )
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return model


def _centre(height: int, width: int) -> nn.Module:
    """Put smaller images in the middle of a 32×32 field, as the paper does with its 28×28 digits."""
    rows, columns = max(0, 32 - height), max(0, 32 - width)
    return nn.ZeroPad2d((columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
