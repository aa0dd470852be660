"""For scripts that keep their own `loss.backward()` and `optimizer.step()`, as with Accelerate.

    model, optimizer, loader = mh.prepare(model, optimizer, loader)

Then `loss.backward()` leaves in `param.grad` the gradient of all workers, weighted by samples and ready to be limited,
and `optimizer.step()` makes the update that all workers make. The script says nothing of workers.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.autograd import Variable
from torch.optim import Optimizer

from manyhands.data.structure import samples_in
from manyhands.engine.session import Session, session
from manyhands.errors import UsageError
from manyhands.replica.part import Loss


def prepare(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loader: Any,
    *,
    loss: Loss | None = None,
    **settings: Any,
) -> tuple[nn.Module, "PreparedOptimizer", "PreparedLoader"]:
    """The model, and an optimizer and a loader that take the places of those given.

    The loader is a `torch.utils.data.DataLoader`; each worker gets its share of it. The session is
    `optimizer.session`; with a `loss(model, batch)` it can also evaluate. `settings` are those of `mh.session`.
    """
    made = session(model, optimizer, loss or _own_loss, **settings)
    return model, PreparedOptimizer(made.optimizer, made), PreparedLoader(loader, made)


def _own_loss(model: nn.Module, batch: Any) -> Any:
    raise UsageError(
        "this script computes its loss itself, so the session does not know it; call loss.backward() and "
        "optimizer.step() to train, and say mh.prepare(…, loss=loss) to evaluate"
    )


class PreparedOptimizer(Optimizer):
    """The user's optimizer, whose step all workers make together."""

    def __init__(self, optimizer: Optimizer, made: Session) -> None:
        self.optimizer, self.session = optimizer, made
        self.loss: float | None = None
        """The loss of the step to come, where the script says it: it is shown and watched."""
        self._is_due = False
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, param: nn.Parameter) -> None:
        """A backward pass of the script has reached a parameter: when it is over, its gradients go to all workers."""
        if not self._is_due and not self.session.is_closed:
            self._is_due = True
            Variable._execution_engine.queue_callback(self._share)  # type: ignore[attr-defined]

    def _share(self) -> None:
        self._is_due = False
        self.session.backward()

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Make the update; a `closure`, which computes the loss and its gradients, is called once before."""
        found = closure() if closure is not None else self.loss
        self.loss = None
        self.session.update(loss=found)
        return found if closure is not None else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UsageError("add parameters before mh.prepare: the session has to know all of them")

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


class PreparedLoader:
    """This worker's share of a loader, anew in every loop over it."""

    def __init__(self, loader: Any, made: Session) -> None:
        self.loader, self.session = loader, made

    def __iter__(self) -> Iterator[Any]:
        for batch in self.session.batches(self.loader):
            if samples_in(batch):  # at the end of an epoch some workers may have nothing left
                yield batch

    def __len__(self) -> int:
        return len(self.session.batches(self.loader))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)
