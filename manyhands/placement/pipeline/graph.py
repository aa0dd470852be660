"""A model as a row of operations that can be cut between any two of them: a sequence, or what tracing finds."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from manyhands.errors import UsageError

Values = dict[str, Any]

_tracing = threading.Lock()  # it changes how modules are called, for the whole process


@dataclass(frozen=True)
class Row:
    """The operations of a model in the order in which they run."""

    model: nn.Module
    inputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    output: fx.Node

    def name(self, index: int) -> str:
        """What a person calls an operation: the module's name, else that of the operation."""
        node = self.nodes[index]
        return str(node.target) if node.op == "call_module" else node.name

    def live(self, index: int) -> list[fx.Node]:
        """Values that exist after so many operations and are still needed, in the order in which they came to be."""
        later = {*self.nodes[index:], self.output}
        return [
            node for node in (*self.inputs, *self.nodes[:index]) if any(user in later for user in node.users)
        ]

    def tensors(self, start: int, stop: int) -> list[Tensor]:
        """The parameters and buffers that some of the operations use."""
        found: dict[int, Tensor] = {}
        for node in self.nodes[start:stop]:
            used = list(node.all_input_nodes)
            values = [_attribute(self.model, each) for each in used if each.op == "get_attr"]
            if node.op == "call_module":
                module = self.model.get_submodule(str(node.target))
                values += [*module.parameters(), *module.buffers()]
            found |= {id(value): value for value in values if isinstance(value, Tensor)}
        return list(found.values())

    def parameters(self, start: int, stop: int) -> list[nn.Parameter]:
        return [tensor for tensor in self.tensors(start, stop) if isinstance(tensor, nn.Parameter)]

    def run(self, index: int, values: Values) -> Any:
        """One operation on values by name."""
        return self._call(self.nodes[index], self._filled(values))

    def result(self, values: Values) -> Any:
        """What the model returns."""
        return fx.map_arg(self.output.args[0], self._filled(values))

    def _filled(self, values: Values) -> Callable[[fx.Node], Any]:
        return lambda node: _attribute(self.model, node) if node.op == "get_attr" else values[node.name]

    def _call(self, node: fx.Node, filled: Callable[[fx.Node], Any]) -> Any:
        args, kwargs = fx.map_arg(node.args, filled), fx.map_arg(node.kwargs, filled)
        if node.op == "call_module":
            return self.model.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Values:
        """The model's inputs by name, as a call gave them."""
        names = [str(node.target) for node in self.inputs]
        given = dict(zip(names, args, strict=False)) | kwargs
        values = {}
        for node, name in zip(self.inputs, names, strict=True):
            if name not in given and not node.args:
                raise UsageError(f"the loss calls the model without its input {name!r}")
            values[node.name] = given[name] if name in given else node.args[0]
        return values


def row(model: nn.Module) -> Row:
    """The model's operations; refuses models that are no sequence and cannot be traced."""
    graph = _sequence(model) if type(model) is nn.Sequential else _traced(model)
    nodes = [node for node in graph.nodes if node.op in ("call_module", "call_function", "call_method")]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output")
    return Row(model, tuple(inputs), tuple(nodes), output)


def _sequence(model: nn.Sequential) -> fx.Graph:
    """Sequences inside sequences are one long row."""
    graph = fx.Graph()
    value = graph.placeholder("inputs")

    def add(module: nn.Module, name: str) -> None:
        nonlocal value
        if type(module) is nn.Sequential:
            for key, child in module.named_children():
                add(child, f"{name}.{key}" if name else key)
        else:
            value = graph.call_module(name, (value,))

    add(model, "")
    graph.output(value)
    return graph


def _traced(model: nn.Module) -> fx.Graph:
    try:
        with _tracing:
            return fx.Tracer().trace(model)
    except Exception as error:  # whatever the user's code does with what is no tensor
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{type(model).__name__} is no nn.Sequential and cannot be traced ({reason}); make it a "
            f"sequence of modules to "
            "cut it into stages"
        ) from None


def _attribute(model: nn.Module, node: fx.Node) -> Any:
    value: Any = model
    for word in str(node.target).split("."):
        value = getattr(value, word)
    return value


class Entry(torch.autograd.Function):
    """Lets values in from another stage: they need gradients, which are left in `box`, and may be changed in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, box: list[Any], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.box = box
        ctx.mark_dirty(*values)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.box[:] = gradients
        return (None, None, *(None for _ in gradients))


def enter(values: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """The values as the beginning of a graph, and where their gradients will be found."""
    box: list[Any] = []
    if not values:
        return [], box
    anchor = torch.zeros(0, requires_grad=True)
    return list(Entry.apply(anchor, box, *values)), box  # type: ignore[no-untyped-call]
