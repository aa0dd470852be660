"""The zoo: published networks and small ones, by name, or the user's own by import path."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from manyhands import spec
from manyhands.errors import UnknownName, UsageError
from manyhands.models.alexnet import alexnet
from manyhands.models.googlenet import googlenet
from manyhands.models.lstm import lstm
from manyhands.models.resnet import resnet20, resnet50, resnet152
from manyhands.models.small import cnn, lenet, mlp
from manyhands.models.transformer import transformer
from manyhands.models.vgg import vgg16, vgg19

MODELS: dict[str, Callable[..., nn.Module]] = {
    builder.__name__: builder
    for builder in (
        mlp,
        cnn,
        lenet,
        resnet20,
        alexnet,
        vgg16,
        vgg19,
        googlenet,
        resnet50,
        resnet152,
        lstm,
        transformer,
    )
}

_KNOWN_ELSEWHERE = {
    **dict.fromkeys(("resnet", "resnet18", "resnet-18", "resnet34", "wideresnet"), "resnet20 or resnet50"),
    **dict.fromkeys(("resnet101", "resnext50"), "resnet50 or resnet152"),
    **dict.fromkeys(("vgg", "vgg11", "vgg13"), "vgg16"),
    **dict.fromkeys(("inception", "inception-v1"), "googlenet"),
    **dict.fromkeys(("gpt", "gpt2", "gpt-2", "nanogpt", "mingpt", "llama", "bert"), "transformer"),
    **dict.fromkeys(("rnn", "gru"), "lstm"),
    **dict.fromkeys(("linear", "dense", "mnist"), "mlp"),
}


def build(text: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """The model that `name:key=value,...` or `package.module:callable` names, for samples of this shape.

    `classes` is the number of classes, or the size of the vocabulary when samples are token sequences.
    """
    if classes < 1:
        raise UsageError(f"model {text!r} cannot be built for {classes} classes; at least 1 is needed")
    name, positional, settings = spec.split(text)
    if name not in MODELS:
        return _build_own(text, shape, classes)
    if positional:
        raise UsageError(f"model {text!r}: write settings as key=value, not {positional[0]!r}")
    builder = MODELS[name]
    known = [
        key
        for key, parameter in inspect.signature(builder).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    for key in settings:
        if key not in known:
            raise UnknownName(f"setting of model {name}", key, known or ["none at all"])
    return builder(shape, classes, **spec.settings_of(builder, settings, "model", name))


def _build_own(text: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Call the user's `package.module:callable` with (shape, classes), or with nothing."""
    name, positional, settings = spec.split(text)
    if not positional or not all(part.isidentifier() for part in name.split(".")):
        raise UnknownName("model", name, [*MODELS, "package.module:callable"], _KNOWN_ELSEWHERE)
    if settings or len(positional) > 1:
        raise UsageError(f"model {text!r}: write package.module:callable and nothing after it")
    builder = spec.imported(text, "model")
    model = builder(*_arguments(builder, text, shape, classes))
    if not isinstance(model, nn.Module):
        raise UsageError(f"model {text!r} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def _arguments(builder: Any, text: str, shape: tuple[int, ...], classes: int) -> tuple[Any, ...]:
    """The arguments that the user's callable can be called with."""
    # A module is callable too, but calling it is a forward pass; and it was made before the seed was set.
    if isinstance(builder, nn.Module) or not callable(builder):
        raise UsageError(
            f"model {text!r} is a {type(builder).__name__}; name a function or a class that makes the model"
        )
    try:
        signature = inspect.signature(builder)
    except ValueError:
        raise UsageError(
            f"model {text!r} does not say which arguments it takes; wrap it in a function"
        ) from None
    choices: tuple[tuple[Any, ...], ...] = ((shape, classes), ())
    for arguments in choices:
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return arguments
    raise UsageError(f"model {text!r} takes {signature}; it must take (shape, classes) or nothing")
