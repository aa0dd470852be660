"""How networks of rectifiers start (He et al., Delving Deep into Rectifiers, 2015)."""

from torch import nn


def he_(model: nn.Module) -> None:
    """Keep the size of the signal from layer to layer; start the last linear layer near zero.

    The N(0, 0.01) of the AlexNet and VGG papers assumes pixels from 0 to 255. On normalised images it lets
    the signal die before the last layer, so their convolutions and hidden layers start as He et al. derive
    it too. The output layer keeps 0.01: the first predictions are then close to uniform.
    """
    linears = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    nn.init.normal_(linears[-1].weight, std=0.01)
