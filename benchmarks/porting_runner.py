"""Runs a script as `python script.py` would, with what a comparison needs: the same samples, no noise, the state after
so many steps. A plain run of a port goes without this, but where the script itself would take hours.

python benchmarks/porting_runner.py script.py --its --options
"""

import importlib
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

STEPS = 20
EPOCHS, STATE, TIMES, PARTS, DOUBLE, SAME = (
    f"PORTING_{name}" for name in ("EPOCHS", "STATE", "TIMES", "PARTS", "DOUBLE", "SAME")
)


def number(name: str) -> int:
    return int(os.environ.get(name) or 0)


# The same samples, and no noise


def make_comparable() -> None:
    """One seed, no dropout, no shuffling, the same noise for every sample and, if asked for, double precision."""
    torch.manual_seed(0)
    if number(DOUBLE):
        torch.set_default_dtype(torch.float64)
    for name in ("dropout", "dropout1d", "dropout2d"):
        setattr(F, name, lambda input, *rest, **settings: input)
    torch.randn = _row  # type: ignore[assignment]
    torch.randn_like = lambda input, **settings: _row(*input.shape)  # type: ignore[assignment]
    torch.randint = _numbers(torch.randint)  # type: ignore[assignment]
    loader = torch.utils.data.DataLoader
    plain = loader.__init__

    def ordered(self: Any, dataset: Any, batch_size: int = 1, *rest: Any, **settings: Any) -> None:
        settings.update(num_workers=0, shuffle=False, sampler=None)
        plain(self, dataset, batch_size * (number(TIMES) or 1), *rest, **settings)

    loader.__init__ = ordered  # type: ignore[method-assign]
    if number(PARTS) > 1:
        normalize = F.batch_norm

        def in_parts(input: Tensor, *rest: Any, **settings: Any) -> Tensor:
            return torch.cat([normalize(part, *rest, **settings) for part in input.chunk(number(PARTS))])

        F.batch_norm = lambda *all, **settings: (
            in_parts(*all, **settings) if _trains(all, settings) else normalize(*all, **settings)
        )


def _numbers(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Always the same; what has a generator of its own is the same as it is."""

    def numbers(*given: Any, **settings: Any) -> Tensor:
        if "generator" in settings:
            return draw(*given, **settings)
        *limits, size = given
        return (torch.arange(torch.Size(size).numel()) * 7 % limits[-1]).reshape(size)

    return numbers


def _trains(given: tuple[Any, ...], settings: dict[str, Any]) -> bool:
    return bool(settings.get("training", given[5] if len(given) > 5 else False))


def _row(*shape: Any, **settings: Any) -> Tensor:
    sizes = tuple(shape[0]) if shape and not isinstance(shape[0], int) else shape
    row = torch.sin(torch.arange(1.0, 1.0 + torch.Size(sizes[1:]).numel())).reshape(sizes[1:])
    return row.expand(sizes).clone()


# The state after so many steps

OPTIMIZERS: list[Any] = []  # in the order in which the script has made them


def list_optimizers() -> None:
    begin = torch.optim.Optimizer.__init__

    def made(self: Any, *rest: Any, **settings: Any) -> None:
        begin(self, *rest, **settings)
        OPTIMIZERS.append(self)

    torch.optim.Optimizer.__init__ = made  # type: ignore[method-assign]


def place(optimizer: Any) -> int:
    return next(index for index, each in enumerate(OPTIMIZERS) if each is optimizer)


def keep_state(folder: Path) -> None:
    """Of every optimizer in the script's order, what it has trained after so many steps."""
    import manyhands as mh
    from manyhands.engine.session import Session

    begin, ours = mh.session, {}

    def session(model: Any, optimizer: Any, *rest: Any, **settings: Any) -> Any:
        names = {param: name for name, param in model.named_parameters()}
        order = [names[param] for group in optimizer.param_groups for param in group["params"]]
        made = begin(model, optimizer, *rest, **{**settings, "same_random": True})
        ours[made] = place(optimizer), order
        return made

    def then_keep(step: Callable[..., Any]) -> Callable[..., Any]:
        def made(self: Any, *rest: Any, **settings: Any) -> Any:
            result = step(self, *rest, **settings)
            if self.steps == STEPS:
                state, (index, order) = self.model_state(), ours[self]
                if mh.rank() == 0:
                    torch.save([state[name] for name in order], folder / f"{index}.pt")
            return result

        return made

    Session.step, Session.update = then_keep(Session.step), then_keep(Session.update)  # type: ignore[method-assign]
    mh.session = session
    for adapter in ("prepare", "ddp"):  # `mh.prepare` is a function; its module has the name too
        importlib.import_module(f"manyhands.adapters.{adapter}").session = session  # type: ignore[attr-defined]


def keep_plain_state(folder: Path) -> None:
    """The same in a script of plain PyTorch."""
    counts: dict[int, int] = {}

    def stepped(optimizer: Any, *rest: Any) -> None:
        counts[id(optimizer)] = counts.get(id(optimizer), 0) + 1
        if counts[id(optimizer)] == STEPS:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            torch.save(
                [param.detach() for param in params], folder / f"{list(counts).index(id(optimizer))}.pt"
            )

    register_optimizer_step_post_hook(stepped)


def end_after(epochs: int) -> None:
    """A schedule is stepped once per epoch; the first step is its own."""
    schedule, done = torch.optim.lr_scheduler.CosineAnnealingLR, [0]
    step = schedule.step

    def counted(self: Any, *rest: Any) -> None:
        step(self, *rest)
        done[0] += 1
        if done[0] > epochs:
            sys.exit(0)

    schedule.step = counted  # type: ignore[method-assign]


def main() -> None:
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    if number(SAME):
        make_comparable()
    if STATE in os.environ:
        list_optimizers()
        keep = keep_state if "manyhands" in Path(script).read_text() or _is_ported() else keep_plain_state
        keep(Path(os.environ[STATE]))
    if number(EPOCHS):
        end_after(number(EPOCHS))
    runpy.run_path(script, run_name="__main__")


def _is_ported() -> bool:
    return bool(number("PORTING_IS_OURS"))


if __name__ == "__main__":
    main()
