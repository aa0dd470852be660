"""One stage's forward pass over a microbatch: the user's own loss runs, and this stage computes its part of it.

Every stage runs the same code from its beginning, so control flow, flags and structures are what they are in one
process. What earlier stages compute is absent here, known by shape alone, until the code calls the stage's first
module: then the values that the stages before have sent take its place, in the very objects that the code holds. The
pass ends where the code calls the first module of a later stage. What needs neither parameters nor random numbers is
computed on every stage that comes by it.

Every value that depends on the model has a number, the same on all stages, and all that was called makes a digest: a
stage whose code has run otherwise is found at the next cut, and ends the run.
"""

import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from manyhands.errors import UsageError
from manyhands.placement.pipeline.distant import (
    Distant,
    Look,
    answer,
    draws,
    imagine,
    is_question,
    name_of,
    present,
    tensors_in,
    tensors_of,
)
from manyhands.placement.pipeline.stage_plan import Needs, StagePlan

BEFORE, INSIDE, AFTER, SHAPES = range(4)

MASK = (1 << 62) - 1

_codes: dict[str, int] = {}


@dataclass
class Crossing:
    """What goes over a cut: values with their numbers, and the digest of what was called before."""

    digest: int
    values: list[tuple[int, Tensor]]


class _Left(BaseException):
    """Leaves the user's code where the next stage begins."""


class StagePass(TorchFunctionMode):
    """A pass; `needs` is what the first pass of this kind has found out, None in that one."""

    def __init__(
        self, plan: StagePlan, stage: int, *, incoming: Crossing | None = None, needs: Needs | None = None
    ) -> None:
        super().__init__()
        self._plan, self._stage = plan, stage
        self._incoming, self._known = incoming, needs
        self._state = BEFORE if stage > 0 else INSIDE
        self._at = 0  # the stage to which the code has come
        self._has_present = False  # whether values have come that could not take the places of absent ones
        self._values: list[Tensor] = []  # by number; held, so that no other tensor gets the id of one
        self._numbers: dict[int, int] = {}
        self._changed: set[int] = set()  # storages of values that were made without the model
        self._digest = self._exit = self._calls = self._boundary = 0
        self._is_off = False
        self._kept: list[Tensor] = []
        self._random = set(needs.random) if needs else set()
        self._wanted: set[int] = set()
        self.needs: Needs | None = needs
        self.outgoing: Crossing | None = None

    @property
    def only_shapes(self) -> bool:
        return self._state == SHAPES

    def run(self, call: Callable[[], Any]) -> Any:
        """Run the user's code; returns what it returns on the stage that comes to its end."""
        before, self._plan.current = self._plan.current, self
        try:
            with self:
                result = call()
        except _Left:
            result = None
        except Exception as error:
            if self._state != AFTER or isinstance(error, UsageError):
                raise
            trace = error.__traceback__
            while trace:  # what it still had in its hands
                self._want(tensors_of(dict(trace.tb_frame.f_locals)))
                trace = trace.tb_next
            result = None
        finally:
            self._plan.current = before
        if self._state == SHAPES:
            return result
        if self._state == BEFORE:
            self._enter()
        if self._stage == self._plan.last:
            self.needs = self._known or Needs(frozenset(), 0, frozenset(self._random))
        else:
            if self._state == INSIDE:
                self._leave(is_over=True)
            self._want(tensors_of(result))
            self._settle()
        return result

    # What is called

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_off:
            return func(*args, **kwargs)
        if is_question(func):
            return answer(func, args, kwargs)
        if self._has_present:
            args, kwargs = present((args, kwargs))
        tensors = tensors_in(args, kwargs)
        uses = self._uses(tensors)
        if not uses and not self._depends(tensors) and not self._draws(func, args, kwargs):
            return func(*args, **kwargs)
        self._note(name_of(func))
        computes = self._state == INSIDE
        result = func(*args, **kwargs) if computes else self._imagine(func, args, kwargs, tensors)
        made = tensors_of(args[0] if result is None and args else result)
        self._number(made, tensors)
        return result

    def unit(self, number: int, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The code calls a module that belongs to one stage as a whole."""
        module, stage, name = self._plan.units[number]
        if self._state == SHAPES:
            return type(module).forward(module, *args, **kwargs)
        if stage < self._at:
            raise self._out_of_order(name)
        self._reach(stage)
        self._note(name)
        if self._has_present:
            args, kwargs = present((args, kwargs))
        if self._state == INSIDE:
            with self._paused():
                result = inner(*args, **kwargs)
        else:
            self._want(tensors_of((args, kwargs)))
            with self._paused():
                result = self._plan.imagined(number, args, kwargs, lambda: shapes_of(self._plan))
        given = {id(tensor) for tensor in tensors_of((args, kwargs))}
        self._number([tensor for tensor in tensors_of(result) if id(tensor) not in given], ())
        return result

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """While a module computes as it would without us."""
        self._plan.current = None
        is_top = torch.overrides._get_current_function_mode() is self  # else it is below one of the user's
        self._is_off = True
        if is_top:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            if is_top:
                self.__enter__()  # type: ignore[no-untyped-call]
            self._is_off = False
            self._plan.current = self

    def _uses(self, tensors: list[Tensor]) -> bool:
        """Whether one of them is the model's own; the first use of a stage's tensor begins the stage."""
        found = False
        for tensor in tensors:
            owner = self._plan.stage_of.get(id(tensor))
            if owner is None:
                continue
            found = True
            if self._state == SHAPES:
                continue
            if owner < self._at and (id(tensor), self._at) not in self._plan.lent:
                raise self._out_of_order(self._plan.names[id(tensor)])
            self._reach(owner)
        return found

    def _depends(self, tensors: list[Tensor]) -> bool:
        """Whether one of the values depends on the model, or on random numbers."""
        for tensor in tensors:
            if type(tensor) is Distant or id(tensor) in self._numbers:
                return True
            if self._changed and tensor.untyped_storage()._cdata in self._changed:
                self._number([tensor], ())
                return True
        return False

    def _draws(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a call on values that all stages have draws random numbers."""
        if self._state == SHAPES:
            return False
        self._calls += 1
        if self._known is not None:
            return self._calls in self._known.random
        if found := draws(func, args, kwargs):
            self._random.add(self._calls)
        return found

    def _imagine(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        self._want(tensors)
        try:
            return imagine(func, args, kwargs, self._plan.twin)
        except Look as look:
            if self._state == AFTER:  # the last stage knows how the code goes on from here
                self._want_all(sys._getframe(1))
                raise _Left from None
            if self._state == SHAPES:
                raise
            raise UsageError(
                f"stage {self._stage} cannot follow the model's code, which asks for numbers that stage "
                f"{self._stage - 1} has ({look}); {KEEP}"
            ) from None

    def _note(self, name: str) -> None:
        code = _codes.get(name)
        if code is None:
            code = _codes[name] = zlib.crc32(name.encode())
        self._digest = (self._digest * 31 + code) & MASK

    def _number(self, tensors: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) in self._numbers or id(tensor) in self._plan.tensors:
                continue
            self._numbers[id(tensor)] = len(self._values)
            self._values.append(tensor)
            if type(tensor) is not Distant and any(tensor is each for each in inputs):
                self._changed.add(tensor.untyped_storage()._cdata)  # a call has written into it

    # From stage to stage

    def _reach(self, stage: int) -> None:
        """The code comes to something of this stage."""
        if stage <= self._at:
            return
        self._at = stage
        if self._state == BEFORE and stage >= self._stage:
            self._enter()
        if self._state == INSIDE and stage > self._stage:
            self._leave()

    def _enter(self) -> None:
        """What the stages before have computed takes the place of what was absent."""
        incoming = self._incoming
        assert incoming is not None
        if incoming.digest != self._digest:
            raise UsageError(
                f"the code of the model and the loss has not run alike on stages {self._stage - 1} and {self._stage}; "
                f"it must depend on nothing that differs between workers; {KEEP}"
            )
        with torch._C.DisableTorchFunction():
            for number, value in incoming.values:
                mine = self._values[number]
                if mine.shape != value.shape:
                    raise UsageError(
                        f"a layer's output has the shape {tuple(value.shape)}, and stage {self._stage} expected "
                        f"{tuple(mine.shape)}; {KEEP}"
                    )
                try:
                    torch.utils.swap_tensors(mine, value)
                except RuntimeError:  # views of it, or what autograd has saved, would keep what it was
                    if type(mine) is not Distant:
                        raise UsageError(
                            f"stage {self._stage} would need parts of a tensor into which an earlier stage has "
                            f"written; {KEEP}"
                        ) from None
                    mine.value, self._has_present = value, True
                    self._numbers[id(value)] = number
                    self._values[number] = value
                    self._kept.append(mine)
        self._state = INSIDE

    def _leave(self, *, is_over: bool = False) -> None:
        """The part of this stage is done. In the first pass of its kind the code goes on, to see what is needed."""
        self._state, self._boundary = AFTER, len(self._values)
        self._exit = self._digest
        if self._known is None or self._known.digest != self._digest:
            self._known = None
            return
        self._wanted = set(self._known.labels)
        if not is_over:
            raise _Left

    def _settle(self) -> None:
        if self._known is None:  # it has been found out
            self.needs = Needs(frozenset(self._wanted), self._exit, frozenset(self._random))
        numbers = sorted(number for number in self._wanted if number < self._boundary)
        self.outgoing = Crossing(self._exit, [(number, self._values[number]) for number in numbers])

    def _want(self, tensors: list[Tensor]) -> None:
        if self._state == AFTER:
            for tensor in tensors:
                number = self._numbers.get(id(tensor))
                if number is not None and number < self._boundary:
                    self._wanted.add(number)

    def _want_all(self, frame: FrameType | None) -> None:
        """Everything that the code has in its hands."""
        while frame is not None and frame.f_code is not StagePass.run.__code__:
            for value in list(frame.f_locals.values()):
                if value is not self:
                    self._want(tensors_of(value))
            frame = frame.f_back

    def _out_of_order(self, name: str) -> UsageError:
        return UsageError(
            f"the code comes to {name}, which an earlier stage has, after stage {self._at} has begun, and a pipeline "
            f"goes through its stages once; {KEEP}"
        )


KEEP = "keep that code in one module, or cut elsewhere, --placement pipeline:split=LAYER (the last layer of each stage)"


def shapes_of(plan: StagePlan) -> StagePass:
    """A pass that computes nothing."""
    made = StagePass(plan, plan.stages)
    made._state = SHAPES
    return made
