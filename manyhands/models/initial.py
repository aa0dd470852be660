"""How networks of rectifiers start (He et al., Delving Deep into Rectifiers, 2015)."""

from torch import nn


def he_(model: nn.Module) -> None:
    """Keep the size of the signal from layer to layer, and start the last linear layer near zero.

    The first predictions are then close to uniform.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    gaussian_([layer for layer in model.modules() if isinstance(layer, nn.Linear)][-1])


def gaussian_(part: nn.Module) -> None:
    """Start linear layers with N(0, 0.01), as AlexNet and VGG do.

    Their papers start convolutions like that as well, but for pixels from 0 to 255: on normalised images the
    signal dies on the way and nothing is learnt, so convolutions stay with `he_`.
    """
    for layer in part.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.01)
