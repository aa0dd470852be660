"""Which layers are divided, and how: one table, from the largest thing it knows to the smallest.

`columns` divides a layer by what it gives, `rows` a linear layer by what it takes. A layer divided by columns may
hand its slice on to one divided by rows, element by element, without an exchange between them: attention by heads,
and perceptrons.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from manyhands.errors import UsageError

COLUMNS, ROWS, BRANCHES, HEADS, WHOLE = "columns", "rows", "branches", "heads", "whole"

ELEMENT_WISE = (nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Identity)


@dataclass(frozen=True)
class Rule:
    """How one layer is divided; `open` says that its other end is a slice too, so nothing is exchanged there."""

    kind: str
    open: bool = False


def divide(
    model: nn.Module, modules: Iterable[nn.Module], ways: int, given: Mapping[str, Sequence[str]]
) -> dict[nn.Module, Rule]:
    """The rule of every layer that is divided; what a person has `given` by name comes first."""
    rules: dict[nn.Module, Rule] = _given(model, given)
    for module in modules:
        for find in (_branches, _heads, _attention, _perceptron, _layer):
            found = find(module, ways)
            if found and not rules.keys() & found.keys():
                rules |= found
                break
    return {module: rule for module, rule in rules.items() if rule.kind != WHOLE}


def _given(model: nn.Module, given: Mapping[str, Sequence[str]]) -> dict[nn.Module, Rule]:
    rules: dict[nn.Module, Rule] = {}
    known = dict(model.named_modules())
    for kind, names in given.items():
        for name in names:
            if name not in known:
                raise UsageError(
                    f"{kind}={name}: the model has no such layer; it has {', '.join(filter(None, known))}"
                )
            inside = list(known[name].modules()) if kind == WHOLE else [known[name]]
            if kind == ROWS and not isinstance(known[name], nn.Linear):
                raise UsageError(f"rows={name}: only linear layers can be divided by rows")
            if kind == COLUMNS and not _layer(known[name], 1):
                raise UsageError(
                    f"columns={name}: {type(known[name]).__name__} cannot be divided; name a layer of features"
                )
            rules |= {module: Rule(kind) for module in inside}
    return rules


def _branches(module: nn.Module, ways: int) -> dict[nn.Module, Rule] | None:
    """By branches: modules that say which of their branches run here, as the zoo's do; inside them nothing is cut."""
    only = getattr(module, "only", None)
    if not isinstance(only, tuple) or len(only) < ways:
        return None
    inside = [each for each in module.modules() if each is not module]
    return {module: Rule(BRANCHES), **{each: Rule(WHOLE) for each in inside}}


def _heads(module: nn.Module, ways: int) -> dict[nn.Module, Rule] | None:
    """By heads: PyTorch's own attention, which uses the layer inside it without calling it."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    kind = WHOLE if module.num_heads % ways else HEADS
    return {module: Rule(kind), module.out_proj: Rule(WHOLE)}


def _attention(module: nn.Module, ways: int) -> dict[nn.Module, Rule] | None:
    """By heads: modules that read the number of heads from the data, as the zoo's do."""
    parts = [getattr(module, name, None) for name in ("query", "key", "value", "out")]
    width = getattr(module, "head_width", None)
    layers = [part for part in parts if isinstance(part, nn.Linear)]
    if len(layers) < 4 or not isinstance(width, int):
        return None
    if layers[0].out_features // width % ways:
        return None
    *into, out = layers
    return {**{layer: Rule(COLUMNS, open=True) for layer in into}, out: Rule(ROWS, open=True)}


def _perceptron(module: nn.Module, ways: int) -> dict[nn.Module, Rule] | None:
    """Two linear layers with nothing but functions of single elements between them."""
    if type(module) is not nn.Sequential:
        return None
    rules: dict[nn.Module, Rule] = {}
    before: nn.Linear | None = None
    for layer in module:
        if isinstance(layer, nn.Linear):
            if before is not None:
                rules |= {before: Rule(COLUMNS, open=True), layer: Rule(ROWS, open=True)}
                before = None
            else:
                before = layer
        elif not isinstance(layer, ELEMENT_WISE):
            before = None
    return rules or None


def _layer(module: nn.Module, ways: int) -> dict[nn.Module, Rule] | None:
    if isinstance(module, nn.Linear):
        features = module.out_features
    elif isinstance(module, nn.Conv2d) and module.groups == 1:
        features = module.out_channels
    elif isinstance(module, nn.Embedding) and module.max_norm is None:
        features = module.embedding_dim
    else:
        return None
    return {module: Rule(COLUMNS)} if features >= ways else None
