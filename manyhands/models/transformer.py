"""A decoder-only transformer language model, normalised before each sub-layer."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.errors import UsageError
from manyhands.models import checks


def transformer(
    shape: tuple[int, ...], classes: int, *, layers: int = 4, width: int = 128, heads: int = 4
) -> nn.Module:
    """Decoder-only transformer language model (Vaswani et al. 2017; as in Radford et al. 2019)."""
    length = checks.tokens("transformer", shape)
    checks.positive("transformer", layers=layers, width=width, heads=heads)
    if width % heads:
        raise UsageError(
            f"transformer: width {width} cannot be divided among {heads} heads; "
            f"use width={math.ceil(width / heads) * heads} or another number of heads"
        )
    parts = OrderedDict[str, nn.Module](embedding=Embedding(classes, length, width))
    for number in range(1, layers + 1):
        parts[f"block{number}"] = Block(width, heads)
    parts["norm"] = nn.LayerNorm(width)
    parts["head"] = nn.Linear(width, classes, bias=False)
    model = nn.Sequential(parts)
    _initialise_(model, layers)
    return model


class Embedding(nn.Module):
    """Token ids [batch, length] → vectors that know their token and their position."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))

    def forward(self, ids: Tensor) -> Tensor:
        vectors: Tensor = self.token(ids) + self.position[: ids.shape[1]]
        return vectors


class Block(nn.Module):
    """Attention to the tokens so far, then a perceptron on each token; each adds to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            OrderedDict[str, nn.Module](
                up=nn.Linear(width, 4 * width),
                gelu=nn.GELU(approximate="tanh"),
                down=nn.Linear(4 * width, width),
            )
        )

    def forward(self, sequence: Tensor) -> Tensor:
        sequence = sequence + self.attention(self.norm1(sequence))
        result: Tensor = sequence + self.perceptron(self.norm2(sequence))
        return result


class Attention(nn.Module):
    """Causal self-attention with several heads.

    Only the width of one head is remembered and the number of heads is read from the data, so the same code
    works on a slice of the heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, sequence: Tensor) -> Tensor:
        query, key, value = (
            project(sequence).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return result


def _initialise_(model: nn.Module, layers: int) -> None:
    """N(0, 0.02); what adds to the residual stream is smaller, so that the sum stays the same size."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            continue
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif name.endswith(("out.weight", "down.weight")):
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))
        else:
            nn.init.normal_(parameter, std=0.02)
