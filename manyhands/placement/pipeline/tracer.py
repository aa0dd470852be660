"""Runs the user's loss once as one process would, and notes every call."""

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from manyhands.errors import UsageError
from manyhands.placement.function_transforms import refuse_transforms
from manyhands.placement.pipeline.distant import (
    Look,
    draws,
    imagine,
    is_question,
    name_of,
    tensors_in,
    tensors_of,
)
from manyhands.placement.pipeline.recording import Recording, Segment, Value
from manyhands.placement.pipeline.stage_channel import TYPES
from manyhands.replica.returned import leaves_of
from manyhands.replica.state.buffers import dense, put

# Modules of PyTorch that call others; all its other ones are layers.
CONTAINERS: tuple[type[nn.Module], ...] = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
CONTAINERS += (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)

REPEATS = 3

PlainAttributes = list[tuple[nn.Module, dict[str, Any]]]


def record(model: nn.Module, run: Callable[[], Tensor]) -> Recording:
    """What a run of the loss shows, with the least of some measured times; the model stays as it was."""
    with unchanged(model):
        recording = _Recorder(model, checks=True).record(run)
        for _ in range(REPEATS):
            again = _Recorder(model, checks=False).record(run)
            if len(again.segments) != len(recording.segments):
                raise UsageError(
                    f"the model's code called {len(recording.segments)} layers in one run on the first batch and "
                    f"{len(again.segments)} in another; a pipeline needs a model that does the same on the same shapes"
                )
            for first, second in zip(recording.segments, again.segments, strict=True):
                first.seconds = min(first.seconds or second.seconds, second.seconds)
    return recording


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers, random states, gradients and the plain attributes of modules are what they were."""
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    values = [(part, part.clone()) for part in dense(model.buffers())]
    plain = plain_attributes(model)
    states = torch.get_rng_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        for own, before in buffers:  # the code may have put another tensor in the place of one
            own.clear()
            own.update(before)
        for part, value in values:
            put(value, part)
        set_plain_attributes(plain)
        for param in model.parameters():
            param.grad = None


@contextmanager
def unchanged_outside(model: nn.Module, loss: Tensor) -> Iterator[None]:
    """Afterwards what the loss depends on beside the model, as a criterion, has the gradients that it had."""
    own = {id(param) for param in model.parameters()}
    outside = [leaf for leaf in leaves_of(loss) if id(leaf) not in own]
    before = [None if leaf.grad is None else leaf.grad.clone() for leaf in outside]
    try:
        yield
    finally:
        for leaf, gradient in zip(outside, before, strict=True):
            leaf.grad = gradient


def plain_attributes(model: nn.Module) -> PlainAttributes:
    """What modules count or switch: their numbers, flags and words."""
    return [
        (module, {name: value for name, value in vars(module).items() if isinstance(value, PLAIN)})
        for module in model.modules()
    ]


def set_plain_attributes(attributes: PlainAttributes) -> None:
    for module, values in attributes:
        own = vars(module)
        for name in [name for name, value in own.items() if isinstance(value, PLAIN) and name not in values]:
            del own[name]  # of the class before
        own.update(values)


PLAIN = (bool, int, float, str, type(None))


class _Recorder(TorchFunctionMode):
    """One run; with `checks` also what shapes alone would have given, which must be the same."""

    def __init__(self, model: nn.Module, *, checks: bool) -> None:
        super().__init__()
        self._model, self._checks = model, checks
        self._recording = Recording(model)
        self._modules = list(model.modules())
        self._names = {id(each): name for name, each in (*model.named_parameters(), *model.named_buffers())}
        self._params = {id(param) for param in model.parameters()}
        self._numbers: dict[int, int] = {}
        self._held: list[Tensor] = []
        self._stack: list[int] = []
        self._stamps: list[tuple[float, int]] = []  # when the backward pass came to which segment
        self._is_off = False
        self._drawn: Any = None

    def record(self, run: Callable[[], Tensor]) -> Recording:
        versions = [(buffer, buffer._version) for buffer in self._model.buffers()]
        former = [(module, module._compiled_call_impl) for module in self._modules]
        names = [name for name, _ in self._model.named_modules()]
        for place, (module, before) in enumerate(former):
            module._compiled_call_impl = self._around(  # type: ignore[assignment]
                place, names[place], before or module._call_impl
            )
        self._drawn = _python_draws()
        try:
            with self:
                loss = run()
        finally:
            for module, before in former:
                module._compiled_call_impl = before  # type: ignore[assignment]
                if before is None:
                    del module.__dict__["_compiled_call_impl"]
        self._check_draws()
        if not self._recording.segments:
            raise UsageError("the loss does not call the model it is given; in a pipeline it must")
        self._recording.changed = {id(buffer) for buffer, version in versions if buffer._version != version}
        self._time_backward(loss)
        self._held.clear()
        return self._recording

    # Calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_off or is_question(func):
            return func(*args, **kwargs)
        refuse_transforms("pipeline")
        tensors = tensors_in(args, kwargs)
        params = [tensor for tensor in tensors if id(tensor) in self._params]
        depends = any(id(tensor) in self._numbers for tensor in tensors)
        if not params and not depends and not (self._checks and draws(func, args, kwargs)):
            return func(*args, **kwargs)
        if params:
            self._begin(self._names[id(params[0])], params, None)
        imagined = self._imagined(func, args, kwargs) if self._checks else None
        versions = [tensor._version for tensor in tensors]
        began = time.thread_time()
        result = func(*args, **kwargs)
        self._took(time.thread_time() - began)
        self._use(tensors)
        self._written(tensors, versions)
        made = tensors_of(args[0] if result is None and args else result)
        if self._checks and [tuple(each.shape) for each in made] != imagined:
            self._recording.looks.append((self._now, tuple(self._stack), name_of(func)))
        self._make(made)
        return result

    def _imagined(self, func: Any, args: Any, kwargs: dict[str, Any]) -> list[tuple[int, ...]] | None:
        try:
            made = imagine(func, args, kwargs)
        except Look:
            return None
        return [tuple(each.shape) for each in tensors_of(args[0] if made is None and args else made)]

    def _around(self, place: int, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        module = self._modules[place]
        is_layer = _is_layer(module)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_off:
                return inner(*args, **kwargs)
            self._stack.append(place)
            try:
                result = self._layer(place, name, inner, args, kwargs) if is_layer else inner(*args, **kwargs)
            finally:
                self._stack.pop()
            self._recording.last_of[name] = self._now
            if not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in tree_leaves(result)):
                self._recording.open_only.add(place)
            return result

        return call

    def _layer(self, place: int, name: str, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        module = self._modules[place]
        self._check_draws()
        self._begin(name, [*module.parameters(), *module.buffers()], place)
        given = tensors_of((args, kwargs))
        self._use(given)
        with self._paused():
            versions = [tensor._version for tensor in given]
            began = time.thread_time()
            result = inner(*args, **kwargs)
            self._took(time.thread_time() - began)
            self._drawn = _python_draws()
            self._written(given, versions)
            inputs = {id(tensor) for tensor in given}
            self._make([tensor for tensor in tensors_of(result) if id(tensor) not in inputs])
        return result

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    # What is noted

    @property
    def _now(self) -> int:
        return max(0, len(self._recording.segments) - 1)

    def _begin(self, name: str, tensors: list[Tensor], leaf: int | None) -> None:
        self._recording.segments.append(Segment(name, tensors, tuple(self._stack), leaf))

    def _took(self, seconds: float) -> None:
        if self._recording.segments:
            self._recording.segments[-1].seconds += seconds

    def _use(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            number = self._numbers.get(id(tensor))
            if number is not None:
                self._recording.values[number].last = self._now

    def _written(self, tensors: list[Tensor], versions: list[int]) -> None:
        for tensor, version in zip(tensors, versions, strict=True):
            if tensor._version != version:
                self._recording.written[tensor.untyped_storage()._cdata] = self._now

    def _make(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) in self._numbers or id(tensor) in self._params:
                continue
            self._numbers[id(tensor)] = len(self._held)
            self._held.append(tensor)
            is_dense = tensor.layout == torch.strided and tensor.dtype in TYPES
            storage = tensor.untyped_storage()._cdata if is_dense else 0
            self._recording.values.append(Value(self._now, self._now, tensor.nbytes, storage, is_dense))
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(partial(self._stamp, self._now))

    def _check_draws(self) -> None:
        """Python's and NumPy's random numbers in code that every stage runs would differ from stage to stage."""
        drawn = _python_draws()
        if drawn != self._drawn:
            self._recording.looks.append(
                (self._now, tuple(self._stack), "random numbers that are not torch's")
            )
        self._drawn = drawn

    def _time_backward(self, loss: Tensor) -> None:
        """A segment's backward pass goes on until it comes to something of another one."""
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise UsageError("the loss has no gradient; it must come from the model's output")
        with unchanged_outside(self._model, loss):
            loss.backward()  # type: ignore[no-untyped-call]
        self._stamp(0)
        for (began, index), (ended, _) in itertools.pairwise(self._stamps):
            self._recording.segments[index].seconds += ended - began

    def _stamp(self, segment: int, *gradients: Any) -> None:
        self._stamps.append((time.thread_time(), segment))


def _is_layer(module: nn.Module) -> bool:
    """A module with parameters that is called as a whole: PyTorch's own, and those that have none inside."""
    if next(module.parameters(), None) is None or isinstance(module, CONTAINERS):
        return False
    if type(module).__module__.startswith("torch.nn."):
        return True
    return all(next(child.parameters(), None) is None for child in module.children())


def _python_draws() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy else ()
    return hash(random.getstate()), *(
        part if isinstance(part, (int, str)) else part.tobytes() for part in state[:3]
    )
