"""Which stage has which tensors and modules, and what is known of passes through them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from manyhands.placement.pipeline.distant import Distant, twin_of

FLAGS = (bool, str, type(None))
MOST_KINDS = 4096  # of passes, by the shapes of their batches, that are remembered

EVERYWHERE = -1  # the stage of tensors that all stages have, and of modules that are no unit


class Following(Protocol):
    """A pass, as the model's modules see it."""

    @property
    def only_shapes(self) -> bool: ...

    def unit(self, number: int, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...

    def run(self, call: Callable[[], Any]) -> Any: ...


def tensors_of_model(model: nn.Module) -> list[Tensor]:
    """Every parameter and buffer, once, in the model's order."""
    return [*model.parameters(), *model.buffers()]


@dataclass(frozen=True)
class StageDivision:
    """How a model is divided, in numbers that every worker understands in the same way."""

    stages: int
    units: tuple[int, ...]
    """By module: the stage that calls it as a whole; `EVERYWHERE` for all others."""
    tensors: tuple[int, ...]
    """By parameter and buffer: the stage that has it."""
    lent: tuple[tuple[int, int], ...] = ()
    """Tensors that a later stage uses too, and which stage: tied weights."""

    def lent_tensors(self, model: nn.Module) -> list[Tensor]:
        tensors = tensors_of_model(model)
        return [tensors[number] for number, _ in self.lent]

    def encoded(self) -> tuple[int, ...]:
        return (self.stages, *self.units, *self.tensors, *(number for pair in self.lent for number in pair))

    @staticmethod
    def decoded(numbers: Sequence[int], model: nn.Module) -> "StageDivision":
        stages, *rest = numbers
        modules, tensors = len(list(model.modules())), len(tensors_of_model(model))
        pairs = rest[modules + tensors :]
        return StageDivision(
            stages=stages,
            units=tuple(rest[:modules]),
            tensors=tuple(rest[modules : modules + tensors]),
            lent=tuple(zip(pairs[::2], pairs[1::2], strict=True)),
        )


@dataclass(frozen=True)
class Needs:
    """What a pass through one stage must know beforehand; the first pass of its kind finds it out."""

    labels: frozenset[int]
    """The values that later stages need."""
    digest: int
    """What was called up to the end of the stage."""
    random: frozenset[int]
    """Which calls on values that every stage has draw random numbers: one stage makes them, for all."""
    writes: bool = False
    """Whether the code writes into its batch, so that each pass needs a batch of its own."""


class StagePlan:
    """A model whose modules answer to passes: each calls its own stage's, and imagines what the others give."""

    def __init__(self, model: nn.Module, division: StageDivision) -> None:
        self.model, self.stages = model, division.stages
        self.last = division.stages - 1
        self.division = division
        self.current: Following | None = None
        self.needs: dict[Any, Needs] = {}
        tensors = tensors_of_model(model)
        self.tensors = {id(tensor): tensor for tensor in tensors}
        self.stage_of = {
            id(tensor): stage
            for tensor, stage in zip(tensors, division.tensors, strict=True)
            if stage != EVERYWHERE
        }
        self.lent = {(id(tensors[number]), stage) for number, stage in division.lent}
        self.names = {id(each): name for name, each in (*model.named_parameters(), *model.named_buffers())}
        self._twins = {id(tensor): twin_of(tensor.detach()) for tensor in tensors}
        self.units: list[tuple[nn.Module, int, str]] = []
        self._shapes: dict[Any, Any] = {}
        self._answers: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._former: list[tuple[nn.Module, Any]] = []
        inside = {
            id(part)
            for module, stage in zip(model.modules(), division.units, strict=True)
            if stage != EVERYWHERE
            for part in module.modules()
        }
        self._open = [module for module in model.modules() if id(module) not in inside]
        for (name, module), stage in zip(model.named_modules(), division.units, strict=True):
            if stage != EVERYWHERE:
                self._intercept(module, name, stage)
            elif "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
                self._silence(module)
        self.attach()

    def of_stages(self, stages: Sequence[int]) -> set[int]:
        """The ids of the tensors that these stages have; with the first stage, those that no stage uses."""
        return {each for each in self.tensors if self.stage_of.get(each, EVERYWHERE) in (*stages, EVERYWHERE)}

    def owners(self) -> list[tuple[int, Tensor]]:
        """The tensors that later stages use too, and their stages, in the model's order."""
        lent = {each for each, _ in self.lent}
        return [(self.stage_of[each], tensor) for each, tensor in self.tensors.items() if each in lent]

    def twin(self, tensor: Tensor) -> Tensor:
        """The shape and type of a tensor; a parameter's whole shape, whatever of it is here."""
        return self._twins.get(id(tensor)) if id(tensor) in self._twins else twin_of(tensor)  # type: ignore[return-value]

    # Passes

    def mode(self, loss: Any) -> Any:
        """What the path of the code may depend on beside the batch: which loss, and the flags of the modules whose
        code runs on every stage."""
        flags = [
            value for module in self._open for value in vars(module).values() if isinstance(value, FLAGS)
        ]
        return (
            id(loss),
            torch.is_grad_enabled(),
            tuple(flags),
            tuple([module.training for module, _, _ in self.units]),
        )

    def learn(self, kind: Any, needs: Needs) -> None:
        """Passes of this kind need not find it out again."""
        if len(self.needs) > MOST_KINDS:
            self.needs.clear()
            self._shapes.clear()
        self.needs[kind] = needs

    # Modules

    def attach(self) -> None:
        """The modules answer to passes. Of their attributes PyTorch leaves this one out of copies and pickles."""
        for module, call in self._answers if not self._former else ():
            former: Any = module._compiled_call_impl
            self._former.append((module, former))
            module._compiled_call_impl = partial(_called, call, former or module._call_impl)  # type: ignore[assignment]

    def remove(self) -> None:
        """The model's modules are as they were."""
        for module, former in self._former:
            module._compiled_call_impl = former
            if former is None:
                del module.__dict__["_compiled_call_impl"]
        self._former.clear()

    def _intercept(self, module: nn.Module, name: str, stage: int) -> None:
        number = len(self.units)
        self.units.append((module, stage, name))

        def call(inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            current = self.current
            return inner(*args, **kwargs) if current is None else current.unit(number, inner, args, kwargs)

        self._answers.append((module, call))

    def _silence(self, module: nn.Module) -> None:
        """Divided layers exchange slices with other workers: where only shapes are asked for, they must not."""

        def call(inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if self.current is not None and self.current.only_shapes:
                return type(module).forward(module, *args, **kwargs)
            return inner(*args, **kwargs)

        self._answers.append((module, call))

    # What modules of other stages give

    def imagined(self, number: int, args: Any, kwargs: Any, shapes: Callable[[], Following]) -> Any:
        """What a unit gives, by shape and type; found once for inputs of the same shapes."""
        leaves, structure = tree_flatten((args, kwargs))
        module = self.units[number][0]
        key = (number, module.training, structure, *(_signature(leaf) for leaf in leaves))
        if key not in self._shapes:
            self._shapes[key] = _describe(leaves, self._try(module, args, kwargs, leaves, shapes))
        found, structure = self._shapes[key]
        return tree_unflatten([_made(each, leaves) for each in found], structure)

    def _try(
        self, module: nn.Module, args: Any, kwargs: Any, leaves: list[Any], shapes: Callable[[], Following]
    ) -> Any:
        """Its own code, on shapes. Where that asks for numbers, we guess that it gives what it takes; a wrong guess
        ends the run at the next stage, which gets another shape."""
        buffers = [(each._buffers, dict(each._buffers)) for each in module.modules()]
        try:
            return shapes().run(lambda: type(module).forward(module, *args, **kwargs))
        except Exception:
            first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
            if first is None:
                raise
            return Distant.like(twin_of(first))
        finally:
            for own, before in buffers:  # its code may put another tensor in the place of one
                own.update(before)


def _called(call: Callable[..., Any], inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(inner, args, kwargs)


def kind_of(mode: Any, batch: Any) -> Any:
    """Passes with equal kinds run alike: the same mode, and batches of the same shapes."""
    leaves, structure = tree_flatten(batch)
    return (mode, structure, *(_signature(leaf) for leaf in leaves))


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (*leaf.shape, leaf.dtype)
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)


def _describe(inputs: list[Any], result: Any) -> tuple[list[Any], Any]:
    """An output is one of the inputs, or a tensor of some shape, or no tensor."""
    leaves, structure = tree_flatten(result)
    known = {id(each): place for place, each in enumerate(inputs) if isinstance(each, Tensor)}
    found: list[Any] = []
    for leaf in leaves:
        if id(leaf) in known:
            found.append(known[id(leaf)])
        else:
            found.append(twin_of(leaf) if isinstance(leaf, Tensor) else (leaf,))
    return found, structure


def _made(description: Any, inputs: list[Any]) -> Any:
    if isinstance(description, torch.Tensor):
        return Distant.like(description)
    return description[0] if isinstance(description, tuple) else inputs[description]
