"""Optimizers as people write them, small: each is of a kind that cannot be divided, or can, for a reason of its own."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def _of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


class Lion(Optimizer):
    """Element by element."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                moment = self.state[param].setdefault("moment", torch.zeros_like(param))
                param.add_(torch.sign(0.9 * moment + 0.1 * param.grad), alpha=-group["lr"])
                moment.lerp_(param.grad, 0.01)


class Lars(Optimizer):
    """Tensor by tensor."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    ratio = (param.norm() + 0.1) / (param.grad.norm() + 1e-9)
                    param.add_(param.grad * ratio, alpha=-group["lr"])


class GlobalNorm(Optimizer):
    """All gradients at once, as global-norm clipping inside."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = _of(self)
        total = (
            torch.stack([param.grad.norm() for param in params if param.grad is not None]).norm()
            if params
            else 1
        )
        for param in params:
            param.add_(param.grad / total, alpha=-self.param_groups[0]["lr"])  # type: ignore[operator]


class Counting(Optimizer):
    """A number in its groups decides the rate, as in schedule-free optimizers and Prodigy."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "longest": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    group["longest"] = max(group["longest"], float(param.grad.norm()))
                    param.add_(param.grad, alpha=-group["lr"] / (group["k"] * group["longest"]))


class Beside(Optimizer):
    """The same number beside its groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.made = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.made += 1
        for param in _of(self):
            param.add_(param.grad, alpha=-self.param_groups[0]["lr"] / self.made)  # type: ignore[arg-type]


class Averaged(Optimizer):
    """Other parameters for training than for evaluation: steps go to y, and x is their mean (schedule-free)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": False})

    def train(self) -> None:
        self._move("y", is_training=True)

    def eval(self) -> None:
        self._move("x", is_training=False)

    @torch.no_grad()
    def _move(self, name: str, *, is_training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != is_training:
                group["train_mode"] = is_training
                for param in group["params"]:
                    if name in self.state[param]:
                        self.state[param]["x" if is_training else "y"].copy_(param)
                        param.copy_(self.state[param][name])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() before step()")
            group["k"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= {"x": param.clone(), "y": param.clone()}
                param.add_(param.grad, alpha=-group["lr"])
                state["x"].lerp_(param, 1 / group["k"])


class Both(Optimizer):
    """A wrapper around two."""

    def __init__(self, *inside: Optimizer) -> None:
        self.inside = inside
        super().__init__([group for one in inside for group in one.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.inside:
            one.step()


class Lookahead:
    """A wrapper that is no `Optimizer`: every third step it goes half the way back to slow parameters of its own."""

    def __init__(self, inside: Optimizer) -> None:
        self.inside, self.made = inside, 0
        self.slow = [p.detach().clone() for group in inside.param_groups for p in group["params"]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inside.param_groups

    @property
    def state(self) -> Any:
        return self.inside.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inside.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.inside.step()
        self.made += 1
        if self.made % 3 == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            with torch.no_grad():
                for param, slow in zip(fast, self.slow, strict=True):
                    param.copy_(slow.lerp_(param, 0.5))


class SAM(Optimizer):
    """Two passes: up by the gradient that is there, then a closure, and the step by the gradient found there."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "SAM needs a closure"
        params = _of(self)
        norm = torch.stack([param.grad.norm() for param in params if param.grad is not None]).norm()
        moves = [param.grad * (0.05 / norm) for param in params]  # type: ignore[operator]
        for param, move in zip(params, moves, strict=True):
            param.add_(move)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for param, move in zip(params, moves, strict=True):
            param.sub_(move)
        self.base.step()


class Tilted(Optimizer):
    """SAM without a norm, and so one that also takes a step in which it has found no gradient."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "needs a closure"
        params = [p for group in self.param_groups for p in group["params"]]
        moves = [torch.zeros_like(p) if p.grad is None else 0.05 * p.grad for p in params]
        for param, move in zip(params, moves, strict=True):
            param.add_(move)
        with torch.enable_grad():
            closure()
        for param, move in zip(params, moves, strict=True):
            param.sub_(move)
            if param.grad is not None:
                param.sub_(param.grad, alpha=self.param_groups[0]["lr"])


class Bare(Optimizer):
    """A wrapper that is an `Optimizer` by name: it never calls the constructor of that."""

    def __init__(self, inside: Optimizer) -> None:
        self.inside, self.defaults = inside, inside.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inside.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inside.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inside.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inside.step()


class Noisy(Optimizer):
    """Langevin noise, the same on all workers or each would have parameters of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in _of(self):
            param.add_(param.grad + torch.randn_like(param), alpha=-self.param_groups[0]["lr"])  # type: ignore[operator]


def hooked(net: nn.Module) -> Optimizer:
    """A hook that limits the gradient before every step."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(net.parameters(), 0.05) and None)
    return optimizer


def by_shape(net: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Matrices, and everything else."""
    params: Iterable[Tensor] = list(net.parameters())
    return [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]


def muon_and_adamw(net: nn.Module) -> list[Optimizer]:
    matrices, others = by_shape(net)
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def averaged(net: nn.Module) -> Optimizer:
    optimizer = Averaged(net.parameters())
    optimizer.train()
    return optimizer


WHOLE: dict[str, Callable[[nn.Module], Any]] = {
    "global norm": lambda net: GlobalNorm(net.parameters()),
    "numbers in groups": lambda net: Counting(net.parameters()),
    "numbers beside": lambda net: Beside(net.parameters()),
    "schedule-free": averaged,
    "wrapper of two": lambda net: Both(*muon_and_adamw(net)),
    "no Optimizer": lambda net: Lookahead(torch.optim.SGD(net.parameters(), lr=0.1)),
    "no constructor": lambda net: Bare(torch.optim.Adam(net.parameters(), lr=0.01)),
    "sam": lambda net: SAM(net.parameters()),
    "sam without a norm": lambda net: Tilted(net.parameters()),
    "hooked": hooked,
}
"""Those that cannot be divided."""

DIVIDED: dict[str, Callable[[nn.Module], Any]] = {
    "lion": lambda net: Lion(net.parameters()),
    "lars": lambda net: Lars(net.parameters()),
}
