"""Models as people write them: calls between layers, masks made on the way, tied weights, losses of their own."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[nn.Module, Any], Tensor]

WORDS, WIDTH, LENGTH = 13, 8, 6


@dataclass(frozen=True)
class Case:
    """A model with its loss, what a batch of so many samples is, and what the placement is told."""

    model: Callable[[], nn.Module]
    loss: Loss
    batch: Callable[[int, torch.Generator], Any]
    text: str = "microbatches=3"


# Pictures


class Digits(nn.Module):
    """Functions between layers, as in the first example that everyone reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 3, 3)
        self.conv2 = nn.Conv2d(3, 4, 3)
        self.drop = nn.Dropout(0.0)
        self.fc1 = nn.Linear(16, 7)
        self.fc2 = nn.Linear(7, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.relu(self.conv1(inputs))
        hidden = F.max_pool2d(F.relu(self.conv2(hidden)), 2)
        hidden = torch.flatten(self.drop(hidden), 1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(hidden))), dim=1)


class Block(nn.Module):
    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(inputs)))))
        outputs += self.shortcut(inputs)
        return F.relu(outputs)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(Block(4, 4, 1), Block(4, 4, 1))
        self.layer2 = nn.Sequential(Block(4, 6, 2))
        self.linear = nn.Linear(6, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layer2(self.layer1(F.relu(self.bn1(self.conv1(inputs)))))
        outputs = F.avg_pool2d(outputs, 4)
        outputs = outputs.view(outputs.size(0), -1)
        return self.linear(outputs)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 3, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(3, 4, 4, 2, 1, bias=False),
            nn.BatchNorm2d(4),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(4, 1, 2, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.main(inputs).view(-1, 1).squeeze(1)


class Skipping(nn.Module):
    """Values go around whole stages, and a path depends on the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(64, 12), nn.Linear(12, 6)])
        self.up = nn.ModuleList([nn.Linear(6, 12), nn.Linear(24, 10)])
        self.out = nn.Linear(16, 5)
        self.extra = nn.Linear(10, 10)
        self.register_buffer("shift", torch.linspace(-1, 1, 64))

    def forward(self, inputs: Tensor) -> Tensor:
        first = torch.tanh(self.down[0](inputs.flatten(1) + self.shift))
        second = torch.tanh(self.down[1](first))
        third = torch.cat([torch.tanh(self.up[0](second)), first], dim=-1)
        fourth = torch.relu(self.up[1](third))
        if inputs.shape[-1] > 7 and self.training:
            fourth = fourth + self.extra(fourth)
        return self.out(torch.cat([fourth, second], 1))


def pictures(samples: int, generator: torch.Generator) -> Any:
    return (
        torch.randn(samples, 1, 8, 8, generator=generator, dtype=torch.float64),
        torch.randint(0, 5, (samples,), generator=generator),
    )


def likelihood(model: nn.Module, batch: Any) -> Tensor:
    return F.nll_loss(model(batch[0]), batch[1])


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch[0])
    assert scores.argmax(1).eq(batch[1]).sum().item() >= 0  # a loss may look at what it gets
    return F.cross_entropy(scores, batch[1]) + 0.01 * scores.square().mean()


def real(model: nn.Module, batch: Any) -> Tensor:
    return F.binary_cross_entropy(model(batch[0]), (batch[1] > 1).to(batch[0].dtype))


# Words


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = None

    def forward(self, inputs: Tensor) -> Tensor:
        return F.layer_norm(inputs, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("causal", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        samples, length, width = inputs.size()
        query, key, value = (
            each.view(samples, length, 2, width // 2).transpose(1, 2)
            for each in self.into(inputs).split(width, dim=2)
        )
        scores = query @ key.transpose(-2, -1) / width**0.5
        if mask is None:
            scores = scores.masked_fill(self.causal[:, :, :length, :length] == 0, float("-inf"))
        else:
            scores = scores + mask
        seen = scores.softmax(-1) @ value
        return self.out(seen.transpose(1, 2).contiguous().view(samples, length, width))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = inputs + self.attention(self.norm1(inputs), mask)
        return hidden + self.mlp(self.norm2(hidden))


class Generator(nn.Module):
    """Tied embeddings, and a loss of its own where it is given targets."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {
                "words": nn.Embedding(WORDS, WIDTH),
                "places": nn.Embedding(LENGTH, WIDTH),
                "drop": nn.Dropout(0.0),
                "layers": nn.ModuleList([Layer() for _ in range(3)]),
                "norm": Norm(),
            }
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.parts["words"].weight = self.head.weight

    def forward(self, words: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        places = torch.arange(words.size(1), device=words.device)
        hidden = self.parts["drop"](self.parts["words"](words) + self.parts["places"](places))
        for layer in self.parts["layers"]:
            hidden = layer(hidden)
        hidden = self.parts["norm"](hidden)
        if targets is None:
            return self.head(hidden[:, [-1], :]), None
        scores = self.head(hidden)
        return scores, F.cross_entropy(scores.view(-1, scores.size(-1)), targets.view(-1), ignore_index=-1)


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.kinds = nn.Embedding(2, WIDTH)
        self.register_buffer("places", torch.arange(LENGTH).expand((1, -1)), persistent=False)
        self.place = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, words: Tensor, kinds: Tensor | None) -> Tensor:
        if kinds is None:
            kinds = torch.zeros(words.shape, dtype=torch.long)
        places = self.place[self.places[:, : words.shape[1]]]
        return self.norm(self.words(words) + self.kinds(kinds) + places)


class Encoder(nn.Module):
    """Inputs by name, a mask made of one of them, results in a dictionary with what is not there as None."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.classifier = nn.Linear(WIDTH, 3)
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(
        self,
        words: Tensor,
        mask: Tensor | None = None,
        kinds: Tensor | None = None,
        labels: Tensor | None = None,
        return_states: bool = False,
    ) -> Any:
        hidden = self.embeddings(words, kinds)
        wide = None
        if mask is not None:
            wide = (1.0 - mask[:, None, None, :].to(hidden.dtype)) * torch.finfo(hidden.dtype).min
        states = [hidden]
        for layer in self.layers:
            hidden = layer(hidden, mask=wide)
            states.append(hidden)
        pooled = torch.tanh(self.pooler(hidden[:, 0]))
        scores = self.classifier(pooled) / self.temperature
        found: dict[str, Any] = OrderedDict(loss=None, scores=scores, states=None)
        if labels is not None:
            found["loss"] = F.cross_entropy(scores.view(-1, 3), labels.view(-1))
        if return_states:
            found["states"] = tuple(states)
        return found


def text(samples: int, generator: torch.Generator) -> Any:
    length = LENGTH if samples > 4 else LENGTH - 2
    words = torch.randint(0, WORDS, (samples, length + 1), generator=generator)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def sentences(samples: int, generator: torch.Generator) -> Any:
    words = torch.randint(1, WORDS, (samples, LENGTH), generator=generator)
    mask = torch.ones(samples, LENGTH, dtype=torch.long)
    mask[::2, -2:] = 0
    labels = torch.randint(0, 3, (samples,), generator=generator)
    return {"words": words * mask, "mask": mask, "labels": labels}


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    _, value = model(*batch)
    return value


def by_name(model: nn.Module, batch: Any) -> Tensor:
    found = model(**batch, return_states=True)
    return found["loss"] + 0.1 * sum(state.square().mean() for state in found["states"])


MODELS = {
    "digits": Case(Digits, likelihood, pictures),
    "residual": Case(Residual, cross_entropy, pictures, "microbatches=1"),
    "discriminator": Case(Discriminator, real, pictures, "microbatches=1"),
    "skipping": Case(Skipping, cross_entropy, pictures),
    "generator": Case(Generator, own_loss, text),
    "encoder": Case(Encoder, by_name, sentences),
}
