"""A model as a graph: its modules, nested as they are, and the tensors between them with their shapes.

The model runs once on a batch, and every call is noted: of modules by hooks, of functions outside of them by
`__torch_function__`. So whatever control flow the code has, the graph is the way that this batch took. It runs on the
meta device, where tensors have shapes and no numbers; code that looks at numbers runs again with real ones; and where
neither works, the graph has the modules alone, and says why.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

INPUT, OUTPUT = "(input)", "(output)"  # no module can have such a name
_CONTAINERS: tuple[type[nn.Module], ...] = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_CONTAINERS += (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)


@dataclass
class GraphNode:
    """A module, or a function that a module calls; what goes in and what comes out are nodes as well."""

    id: str
    """A module's name in the model; of a function that of the module that calls it, a slash, its name and number."""
    name: str
    kind: str
    """The module's class, `function`, `input` or `output`."""
    parent: str
    """The id of the module that it is part of; empty at the top."""
    is_leaf: bool = True
    settings: str = ""
    parameters: int = 0
    """With those of all its parts; what several have is counted with each of them."""
    parameter_bytes: int = 0
    calls: int = 0
    input_shapes: list[list[int]] = field(default_factory=list)
    output_shapes: list[list[int]] = field(default_factory=list)
    output_bytes: int = 0
    flops: int = 0
    """Of the forward pass of the batch: a multiplication and an addition are two."""
    forward_s: float | None = None
    backward_s: float | None = None


@dataclass
class GraphEdge:
    """A tensor that goes from one leaf to another."""

    source: str
    target: str
    shape: list[int]
    dtype: str


@dataclass
class ModelGraph:
    """All of it, as plain values."""

    batch: int
    """Samples of the batch that ran: the first number of most shapes."""
    parameters: int
    parameter_bytes: int
    nodes: list[GraphNode]
    edges: list[GraphEdge]
    note: str = ""
    """Why there are no edges, if there are none."""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def graph_of(model: nn.Module, inputs: Any) -> ModelGraph:
    """The graph of a run on a batch of inputs; the model stays as it was."""
    failures = []
    for device in ("meta", "cpu"):
        trial = _copied(model, device)
        given = tree_map(lambda one, to=device: one.to(to) if isinstance(one, Tensor) else one, inputs)
        try:
            nodes, edges = _Tracer(trial).trace(given)
        except Exception as error:  # the model's own code may raise anything
            failures.append(f"{type(error).__name__}: {error}".partition("\n")[0])
            continue
        return _made(model, inputs, nodes, edges, "")
    nodes = {node.id: node for node in _module_nodes(model)}
    return _made(model, inputs, nodes, {}, f"the model does not run on such a batch ({failures[-1]})")


def _copied(model: nn.Module, device: str) -> nn.Module:
    """The same modules; on the meta device without a copy of the numbers, which may be many."""
    own = [*model.parameters(), *model.buffers()] if device == "meta" else []
    memo: dict[int, Any] = {id(one): one.detach().to(device).requires_grad_(one.requires_grad) for one in own}
    for param in model.parameters() if device == "meta" else ():
        memo[id(param)] = nn.Parameter(memo[id(param)], requires_grad=param.requires_grad)
    return copy.deepcopy(model, memo).to(device)


def _made(
    model: nn.Module,
    inputs: Any,
    nodes: Mapping[str, GraphNode],
    edges: Mapping[tuple[str, str], GraphEdge],
    note: str,
) -> ModelGraph:
    own = list(model.parameters())
    return ModelGraph(
        batch=next((len(one) for one in tree_leaves(inputs) if isinstance(one, Tensor)), 0),
        parameters=sum(param.numel() for param in own),
        parameter_bytes=sum(param.nbytes for param in own),
        nodes=list(nodes.values()),
        edges=list(edges.values()),
        note=note,
    )


def _module_nodes(model: nn.Module) -> Iterator[GraphNode]:
    for name, module in model.named_modules():
        if not name:
            continue
        own = list(module.parameters())
        parent, _, last = name.rpartition(".")
        yield GraphNode(
            id=name,
            name=last,
            kind=type(module).__name__,
            parent=parent,
            is_leaf=is_leaf(module),
            settings=module.extra_repr() if is_leaf(module) else "",
            parameters=sum(param.numel() for param in own),
            parameter_bytes=sum(param.nbytes for param in own),
        )


def is_leaf(module: nn.Module) -> bool:
    """Whether it is drawn as one box: it has no parts, or is a layer of PyTorch's that has some."""
    is_torchs = type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS)
    return is_torchs or next(module.children(), None) is None


class _Tracer(TorchFunctionMode):
    """One run of a model, noted."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._nodes = {INPUT: GraphNode(id=INPUT, name="input", kind="input", parent="")}
        self._nodes |= {node.id: node for node in _module_nodes(model)}
        self._edges: dict[tuple[str, str], GraphEdge] = {}
        self._maker: dict[int, str] = {}  # of each tensor: the node that has made it
        self._held: list[Tensor] = []  # so that no other tensor gets the place of one
        self._inside: list[str] = [""]  # the modules that are running, the innermost last
        self._leaves = 0  # of those, how many are leaves
        self._numbers: dict[str, int] = {}

    def trace(self, inputs: Any) -> tuple[dict[str, GraphNode], dict[tuple[str, str], GraphEdge]]:
        self._note_made(INPUT, inputs)
        with self._hooked(), torch.no_grad(), FlopCounterMode(display=False) as counter, self:
            outputs = self._model(inputs)
        end = self._nodes[OUTPUT] = GraphNode(id=OUTPUT, name="output", kind="output", parent="")
        self._note_used(end, outputs)
        self._add_flops(counter)
        return self._nodes, self._edges

    def _add_flops(self, counter: FlopCounterMode) -> None:
        whole = type(self._model).__name__
        for name, counts in counter.get_flop_counts().items():
            node = self._nodes.get(name.removeprefix(f"{whole}."))
            if node is not None:
                node.flops = sum(counts.values())

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        hooks = []
        for name, module in self._model.named_modules():
            if name:
                before = self._before(name)
                hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
                hooks.append(module.register_forward_hook(self._after(name), with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, name: str) -> Any:
        node = self._nodes[name]

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._leaves:
                node.calls += 1
                node.input_shapes = [list(one.shape) for one in _tensors((args, kwargs))]
                if node.is_leaf:
                    self._note_used(node, (args, kwargs))
            self._inside.append(name)
            self._leaves += node.is_leaf

        return note

    def _after(self, name: str) -> Any:
        node = self._nodes[name]

        def note(module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            self._inside.pop()
            self._leaves -= node.is_leaf
            if not self._leaves:
                made = _tensors(outputs)
                node.output_shapes = [list(one.shape) for one in made]
                node.output_bytes = sum(one.nbytes for one in made)
                if node.is_leaf:
                    self._note_made(name, outputs)

        return note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if self._leaves or getattr(func, "__name__", "") == "__get__":
            return outputs
        made = [one for one in _tensors(outputs) if isinstance(one, Tensor)]
        used = [one for one in _tensors((args, kwargs)) if id(one) in self._maker]
        if made and used:
            parent = self._inside[-1]
            node = self._function(func, parent)
            node.calls = 1
            node.input_shapes = [list(one.shape) for one in _tensors((args, kwargs))]
            node.output_shapes = [list(one.shape) for one in made]
            node.output_bytes = sum(one.nbytes for one in made)
            self._note_used(node, used)
            self._note_made(node.id, outputs)
        return outputs

    def _function(self, func: Any, parent: str) -> GraphNode:
        name = (resolve_name(func) or getattr(func, "__name__", "function")).rpartition(".")[2].strip("_")
        self._numbers[name] = number = self._numbers.get(name, 0) + 1
        node = GraphNode(id=f"{parent}/{name}-{number}", name=name, kind="function", parent=parent)
        self._nodes[node.id] = node
        return node

    def _note_used(self, node: GraphNode, values: Any) -> None:
        for one in _tensors(values):
            source = self._maker.get(id(one))
            if source is not None and source != node.id:
                dtype = str(one.dtype).removeprefix("torch.")
                edge = GraphEdge(source=source, target=node.id, shape=list(one.shape), dtype=dtype)
                self._edges.setdefault((source, node.id), edge)

    def _note_made(self, name: str, values: Any) -> None:
        for one in _tensors(values):
            self._maker[id(one)] = name
            self._held.append(one)


def _tensors(values: Any) -> list[Tensor]:
    return [
        one for one in tree_leaves(values) if isinstance(one, Tensor) and not isinstance(one, nn.Parameter)
    ]
