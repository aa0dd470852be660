"""Which layers are divided, and how: one table, from the largest thing it knows to the smallest.

`columns` divides a layer by what it gives, `rows` a linear layer by what it takes. In a chain, a layer divided by
columns hands its slice on to one divided by rows, element by element, without an exchange between them: attention by
heads, and perceptrons.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from manyhands.errors import UsageError
from manyhands.models.blocks import Branches
from manyhands.models.transformer import Attention
from manyhands.placement.tensor.alterations import Alterations

COLUMNS, ROWS, BRANCHES, HEADS, WHOLE = "columns", "rows", "branches", "heads", "whole"

ELEMENT_WISE = (nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Identity)


@dataclass(frozen=True, eq=False)
class SliceChain:
    """Layers of one module, and what lies between them, through which slices go in that module's own pass."""

    owner: nn.Module
    links: tuple[nn.Module, ...]


@dataclass(frozen=True)
class Rule:
    """How one layer is divided, and the chain in which it hands its slice on, or takes one."""

    kind: str
    chain: SliceChain | None = None


Rules = dict[nn.Module, Rule]


def divide(
    model: nn.Module,
    modules: Iterable[nn.Module],
    ways: int,
    given: Mapping[str, Sequence[str]],
    alterations: Alterations,
) -> Rules:
    """The rule of every layer that is divided; what a person has `given` by name comes first."""
    rules = named = _given(model, given, alterations)
    finders: tuple[Callable[[nn.Module, int, Alterations], Rules | None], ...]
    finders = (_branches, _heads, _attention, _perceptron, _layer)
    for module in modules:
        for find in finders:
            found = find(module, ways, alterations)
            if found and not rules.keys() & found.keys() and not named.keys() & _links(found):
                rules = rules | found
                break
    return {module: rule for module, rule in rules.items() if rule.kind != WHOLE}


def _links(rules: Rules) -> set[nn.Module]:
    return {link for rule in rules.values() if rule.chain for link in rule.chain.links}


def _given(model: nn.Module, given: Mapping[str, Sequence[str]], alterations: Alterations) -> Rules:
    rules: Rules = {}
    known = dict(model.named_modules())
    for kind, names in given.items():
        for name in names:
            if name not in known:
                raise UsageError(
                    f"{kind}={name}: the model has no such layer; it has {', '.join(filter(None, known))}"
                )
            inside = list(known[name].modules()) if kind == WHOLE else [known[name]]
            if kind == ROWS and not _is_plain(known[name], alterations, nn.Linear):
                raise UsageError(f"rows={name}: only PyTorch's own linear layers can be divided by rows")
            if kind == COLUMNS and not _layer(known[name], 1, alterations):
                raise UsageError(
                    f"columns={name}: {type(known[name]).__name__} cannot be divided; name a layer of features"
                )
            rules |= {module: Rule(kind) for module in inside}
    return rules


def _branches(module: nn.Module, ways: int, alterations: Alterations) -> Rules | None:
    """By branches, where each runs on one worker; inside them nothing is cut."""
    if not isinstance(module, Branches) or not _has_pass_of(module, Branches, alterations):
        return None
    inside = [each for each in module.modules() if each is not module]
    if len(module.only) < ways or any(map(alterations.watched, inside)):
        return None
    return {module: Rule(BRANCHES), **{each: Rule(WHOLE) for each in inside}}


def _heads(module: nn.Module, ways: int, alterations: Alterations) -> Rules | None:
    """By heads: PyTorch's own attention, which uses the layer inside it without calling it."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    is_own = _has_pass_of(module, nn.MultiheadAttention, alterations)
    is_free = is_own and _is_plain(module.out_proj, alterations, nn.Linear)
    kind = WHOLE if module.num_heads % ways or not is_free else HEADS
    return {module: Rule(kind), module.out_proj: Rule(WHOLE)}


def _attention(module: nn.Module, ways: int, alterations: Alterations) -> Rules | None:
    """By heads: the zoo's attention, which reads the number of heads from the data."""
    if not isinstance(module, Attention) or not _has_pass_of(module, Attention, alterations):
        return None
    layers = [module.query, module.key, module.value, module.out]
    if not all(_can_link(layer, alterations, nn.Linear) for layer in layers):
        return None
    if len(set(layers)) < 4 or module.query.out_features // module.head_width % ways:
        return None
    chain = SliceChain(module, tuple(layers))
    return {**{layer: Rule(COLUMNS, chain) for layer in layers[:3]}, module.out: Rule(ROWS, chain)}


def _perceptron(module: nn.Module, ways: int, alterations: Alterations) -> Rules | None:
    """Two linear layers with nothing but functions of single elements between them."""
    if type(module) is not nn.Sequential or alterations.changed(module):
        return None
    layers = list(module)
    pairs: list[tuple[int, int]] = []
    before: int | None = None
    for place, layer in enumerate(layers):
        if _can_link(layer, alterations, nn.Linear) and layers.count(layer) == 1:
            if before is not None:
                pairs.append((before, place))
                before = None
            else:
                before = place
        elif type(layer) not in ELEMENT_WISE or alterations.changed(layer) or alterations.watched(layer):
            before = None
    chain = SliceChain(module, tuple(link for first, last in pairs for link in layers[first : last + 1]))
    rules = {layers[first]: Rule(COLUMNS, chain) for first, _ in pairs}
    return rules | {layers[last]: Rule(ROWS, chain) for _, last in pairs} or None


def _can_link(module: nn.Module, alterations: Alterations, kind: type[nn.Module]) -> bool:
    return _is_plain(module, alterations, kind) and not alterations.watched(module)


def _has_pass_of(module: nn.Module, kind: type[nn.Module], alterations: Alterations) -> bool:
    return type(module).forward is kind.forward and not alterations.changed(module)


def _is_plain(module: nn.Module, alterations: Alterations, kind: type[nn.Module]) -> bool:
    """Whether a layer computes as PyTorch's own does, from parameters of its own."""
    params = module._parameters
    return (
        isinstance(module, kind)
        and _has_pass_of(module, kind, alterations)
        and getattr(type(module), "_conv_forward", None) is getattr(kind, "_conv_forward", None)
        and params.keys() <= {"weight", "bias"}
        and params.get("weight") is not None
    )


def _layer(module: nn.Module, ways: int, alterations: Alterations) -> Rules | None:
    if isinstance(module, nn.Linear) and _is_plain(module, alterations, nn.Linear):
        features = module.out_features
    elif isinstance(module, nn.Conv2d) and _is_plain(module, alterations, nn.Conv2d) and module.groups == 1:
        features = module.out_channels
    elif (
        isinstance(module, nn.Embedding)
        and _is_plain(module, alterations, nn.Embedding)
        and module.max_norm is None
    ):
        features = module.embedding_dim
    else:
        return None
    return {module: Rule(COLUMNS)} if features >= ways else None
