"""Who may use which tensors of a divided model at the moment: its modules, the session, or the script."""

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from manyhands.errors import UsageError
from manyhands.placement.absent import Lack


class Phase(enum.Enum):
    """What the model is used for."""

    REST = enum.auto()
    """The script has control, between steps."""
    WORK = enum.auto()
    """The session has control."""
    PASS = enum.auto()
    """The model computes, for a step, an evaluation, or the script."""
    WHOLE = enum.auto()
    """The script has the whole model."""


class Attachment(Protocol):
    """What is on a module until the session ends, and is taken off while a script has the whole model."""

    def remove(self) -> None: ...

    def attach(self) -> None: ...


class ModuleHook:
    """A hook on a module."""

    def __init__(self, register: Callable[[], Any]) -> None:
        self._register = register
        self._handle: Any = register()

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def attach(self) -> None:
        if self._handle is None:
            self._handle = self._register()


class Presence:
    """The tensors that are absent, and the hooks by which modules come to what is theirs.

    A tensor in pieces is present for the session, and for the modules that compute with pieces; for the script and for
    the rest of a pass it is absent.
    """

    def __init__(self, model: nn.Module) -> None:
        self.phase = Phase.WORK
        self.lacks: dict[int, Lack] = {}
        self.on_use: Callable[[Any], None] = lambda inputs: None
        """Told of the inputs with which a script uses the model outside of a step, before the model computes."""
        self.on_end: Callable[[], None] = lambda: None
        """Told that it has done so."""
        self.out_of_reach: Lack | None = None
        """A tensor without which no worker can call the model outside of a step."""
        self._model = model
        self._comes: list[Lack] = []  # of which something is here
        self._hooks: list[Attachment] = []
        self._entry: object = None  # where the script has entered the model, outside of a step
        self._constants: list[nn.Parameter] = []  # that have no gradients meanwhile

    def add(self, lack: Lack, *, comes: bool) -> None:
        """A tensor that is not wholly here; if it `comes`, it is present whenever the session has control."""
        self.lacks[id(lack.tensor)] = lack
        if comes:
            self._comes.append(lack)

    def watch(self, module: nn.Module) -> None:
        """Where the script calls the module first, outside of a step, all workers do."""
        enter, leave = partial(self._enter, module), partial(self._leave, module)
        self.hook(lambda: module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        self.hook(lambda: module.register_forward_hook(leave, always_call=True))

    def hook(self, register: Callable[[], Any]) -> None:
        self._hooks.append(ModuleHook(register))

    def attach(self, hooks: Sequence[Attachment]) -> None:
        self._hooks.extend(hooks)

    def take_off(self) -> None:
        """The model as it was before it was divided, but for the values."""
        for hook in self._hooks:
            hook.remove()
        for lack in self.lacks.values():
            lack.end()
        self.phase, self.lacks, self._comes, self._hooks = Phase.WORK, {}, [], []

    # Who has control

    def work(self) -> None:
        """The session has control from here on."""
        if self.phase is Phase.WHOLE:
            raise UsageError(
                "while a script has the whole model, its session makes no step, mean, evaluation or checkpoint; "
                "leave the block `with session.whole_model()` first"
            )
        self.phase = Phase.WORK
        for lack in self._comes:
            lack.come()

    def rest(self) -> None:
        """The script has control from here on."""
        if self.phase is not Phase.WHOLE:
            self.phase = Phase.REST
            for lack in self._comes:
                lack.leave()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """While the model computes."""
        if self.phase is not Phase.WORK:
            yield
            return
        self.phase = Phase.PASS
        for lack in self._comes:
            lack.leave()
        try:
            yield
        finally:
            self.work()

    def enter(self, own: Sequence[Lack], entry: object, inputs: Any) -> None:
        """A pass begins, for which these tensors are present."""
        if self.phase is Phase.REST:
            self._begin_use(entry, inputs)
        if self.phase is Phase.PASS:
            for lack in own:
                lack.come()

    def leave(self, own: Sequence[Lack], entry: object) -> None:
        """It is over, whether well or not."""
        if self.phase is Phase.PASS:
            for lack in own:
                lack.leave()
        if self._entry is entry:
            self._end_use()

    def _enter(self, entry: nn.Module, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.enter((), entry, (args, kwargs))

    def _leave(self, entry: nn.Module, module: nn.Module, args: Any, output: Any) -> None:
        self.leave((), entry)

    def lend(self, tensor: Tensor) -> None:
        """Before the script loads values into a tensor, which is given memory for the whole."""
        if lack := self.lacks.get(id(tensor)):
            lack.come()

    def take_back(self, tensor: Tensor) -> None:
        """The tensor is as it was before it was lent."""
        if lack := self.lacks.get(id(tensor)):
            lack.leave()

    # The script uses the model outside of a step

    def _begin_use(self, entry: object, inputs: Any) -> None:
        """All workers do so, or none. Parameters are constants then, since gradients of them belong to steps; those of
        the inputs pass."""
        if self.out_of_reach:
            self.out_of_reach.refuse()
        self.on_use(inputs)
        self._entry, self.phase = entry, Phase.PASS
        if torch.is_grad_enabled():
            self._constants = [param for param in self._model.parameters() if param.requires_grad]
        for param in self._constants:
            param.requires_grad_(False)

    def _end_use(self) -> None:
        self._entry = None
        for param in self._constants:
            param.requires_grad_(True)
        self._constants = []
        self.on_end()
        self.rest()

    @contextmanager
    def whole(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Tensors of the model with other values, and no hook of ours on it; then all as it was."""
        for lack in self.lacks.values():
            lack.come()
        for hook in self._hooks:
            hook.remove()
        self.phase = Phase.WHOLE
        before = [(tensor, tensor.data) for tensor, _ in pairs]
        for tensor, value in pairs:
            tensor.data = value
        try:
            yield
        finally:
            for tensor, data in before:
                tensor.data, tensor.grad = data, None
            for hook in self._hooks:
                hook.attach()
            self.phase = Phase.REST
            for lack in self.lacks.values():
                lack.leave()
