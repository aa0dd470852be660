"""Leave PyTorch's compiler unloaded in workers that compile nothing.

Making any optimizer imports `torch._dynamo`, only to mark four methods as not to be compiled, and so does calling its
`step`, only to tell a compiler where graphs break: 2 s and 70 MB for every worker. Here those methods call what they
wrap for as long as the compiler is not loaded. Where PyTorch is built otherwise, nothing is changed.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

_OPTIMIZERS = "torch.optim.optimizer"
_COMPILER = "torch._dynamo"
_STEPS = "_use_grad_for_differentiable"  # what optimizers decorate `step` with
_MARK = "__dynamo_disable"  # where torch._compile keeps what it has made of a method


class _ImportWatch(MetaPathFinder):
    """Waits for the module of the optimizers to be imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _OPTIMIZERS:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec and spec.loader:
            _call_after(spec.loader, _lighten)
        return spec


def leave_unloaded() -> None:
    """To be called before the first optimizer is made, best before PyTorch is imported."""
    if _OPTIMIZERS in sys.modules:
        _unmark(sys.modules[_OPTIMIZERS])
    else:
        sys.meta_path.insert(0, _ImportWatch())


def _call_after(loader: Loader, action: Callable[[ModuleType], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        action(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]


def _lighten(module: ModuleType) -> None:
    """Before the optimizers themselves are defined."""
    _unmark(module)
    if decorate := getattr(module, _STEPS, None):
        setattr(module, _STEPS, functools.partial(_decorated, decorate))


def _decorated(decorate: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    whole = decorate(step)

    @functools.wraps(step)
    def call(optimizer: Any, *args: Any, **settings: Any) -> Any:
        if _COMPILER in sys.modules:
            return whole(optimizer, *args, **settings)
        with sys.modules["torch"].set_grad_enabled(optimizer.defaults["differentiable"]):
            return step(optimizer, *args, **settings)

    return call


def _unmark(module: ModuleType) -> None:
    for method in vars(getattr(module, "Optimizer", object)).values():
        wrapped = getattr(method, "__wrapped__", None)
        if (
            isinstance(method, FunctionType)
            and wrapped
            and method.__code__.co_filename.endswith("_compile.py")
        ):
            setattr(wrapped, _MARK, _plain(wrapped))


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **settings: Any) -> Any:
        if _COMPILER in sys.modules:
            delattr(method, _MARK)  # from now on as PyTorch does it
        return method(*args, **settings)

    return call
