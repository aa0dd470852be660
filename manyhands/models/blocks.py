"""What several families are made of."""

from collections import OrderedDict

import torch
from torch import Tensor, nn


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


class Branches(nn.Module):
    """Modules over the same input, their channels joined in order."""

    def __init__(self, **branches: nn.Module) -> None:
        super().__init__()
        self.only = tuple(branches)
        """Which of them run here; others may run on other workers."""
        for name, branch in branches.items():
            self.add_module(name, branch)

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self.get_submodule(name)(images) for name in self.only], dim=1)
