"""For scripts that are written for DDP: what they import from PyTorch comes from here, and the rest stays.

    from manyhands.adapters.ddp import DistributedDataParallel as DDP, destroy_process_group, init_process_group

The script runs under `manyhands launch`. The wrapped model's backward pass leaves in `param.grad` the gradient of all
workers, and the script's own optimizer makes the step of all. Workers count by their samples, where DDP counts them
alike: that is the same where their batches are equally large.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler as PlainSampler

from manyhands.data.structure import samples_in, tensors_in
from manyhands.engine import habits, worker_process
from manyhands.engine.session import Session, session
from manyhands.errors import UsageError

# Of PyTorch's own settings those that say how gradients travel, which is for the session to know.
_HOW_TO_SEND = frozenset(
    [
        "device_ids",
        "output_device",
        "dim",
        "broadcast_buffers",
        "init_sync",
        "bucket_cap_mb",
        "find_unused_parameters",
        "check_reduction",
        "gradient_as_bucket_view",
        "static_graph",
        "delay_all_reduce_named_params",
        "param_to_hook_all_reduce",
        "skip_all_reduce_unused_params",
    ]
)
_sessions: list["weakref.ref[Session]"] = []  # of wrapped models, in the script's order


class DistributedDataParallel(nn.Module):
    """A model that trains with those of the other workers, as PyTorch's class of this name does.

    Settings of `mh.session` may be given as well. The session, `model.session`, begins when there is an optimizer of
    the model's parameters: here, or with the first forward pass that computes gradients.
    """

    def __init__(
        self, module: nn.Module, device_ids: Any = None, output_device: Any = None, **settings: Any
    ) -> None:
        super().__init__()
        for name in ("process_group", "mixed_precision", "device_mesh"):
            if settings.pop(name, None) is not None:
                raise UsageError(
                    f"DistributedDataParallel({name}=…): all workers of a run train together; leave it out"
                )
        self.module = module
        self.require_backward_grad_sync = True
        """False while gradients of several passes add up on this worker, as inside of `no_sync`."""
        self._settings = {name: value for name, value in settings.items() if name not in _HOW_TO_SEND}
        self._made: list[Session] = []
        self._samples = self._shared = 0  # of this pass; and how many passes went to all workers
        self._is_due = self._is_updating = False
        if optimizers := _optimizers_of(module):
            self._begin(optimizers)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not self._made:
            self._begin(_optimizers_of(self.module))
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            self._await_backward(output, _samples(args, kwargs))
        return output

    @property
    def session(self) -> Session:
        if not self._made:
            raise UsageError("the session begins with the first forward pass that computes gradients")
        return self._made[0]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients of several passes add up on this worker."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, *arguments: Any) -> None:
        raise UsageError(
            "register_comm_hook: how gradients travel is for --strategy to say; leave the hook out"
        )

    def _begin(self, optimizers: list[Optimizer]) -> None:
        if len(optimizers) != 1:
            raise UsageError(
                f"there are {len(optimizers)} optimizers of the wrapped model's parameters, and its session steps one; "
                "make it before the first forward pass, or give all of them to mh.session(model, [one, other], loss)"
            )
        (optimizer,) = optimizers
        made = session(self.module, optimizer, _own_loss, **self._settings)
        if not made.engine.placed.is_whole:
            raise UsageError(
                "DistributedDataParallel needs the whole model on every worker, and --placement "
                f"{made.engine.settings.placement} divides it; use no placement, or let the session have the step"
            )
        if made.engine.has_entered and made.engine.replica.runs_whole:
            raise UsageError(
                f"{type(optimizer).__name__} must update all parameters in one call, which its own step() would then "
                "make twice; use model, optimizer, loader = mh.prepare(model, optimizer, loader) in the place of DDP"
            )
        self._made.append(made)
        _sessions.append(weakref.ref(made))
        own = weakref.proxy(self)  # the garbage collector does not see what a tensor's hooks hold
        habits.update_at_step(made.engine, lambda has_closure: own._update(has_closure))
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(lambda param: own._arrived(param))

    def _await_backward(self, output: Any, samples: int) -> None:
        """A backward pass through what the model gave has its samples, and it may be that no pass comes."""
        syncs, seen = self.require_backward_grad_sync, -1
        generation = self.session.engine.generation

        def begins(gradient: Tensor) -> None:
            nonlocal seen
            if self.session.engine.generation is not generation and not self.session.is_closed:
                raise UsageError(
                    "workers have come or gone between a forward pass of the wrapped model and its backward pass, "
                    "whose memory went with them; start again from the last checkpoint, or let mh.session make the step"
                )
            if seen != self._shared:  # else another tensor of this output; a graph may have several passes
                seen = self._shared
                self._samples += samples
                self._is_due = syncs

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(begins)

    def _arrived(self, param: nn.Parameter) -> None:
        """A backward pass has reached a parameter: when it is over, its gradients go to all workers."""
        if self._is_due and not self.session.is_closed:
            self._is_due = False
            Variable._execution_engine.queue_callback(self._share)  # type: ignore[attr-defined]

    def _share(self) -> None:
        samples, self._samples = self._samples, 0
        self._shared += 1
        self.session.backward(samples=max(1, samples))

    def _update(self, has_closure: bool) -> bool:
        """The script calls its optimizer's `step`: all workers make it, and leave nothing for that call to do."""
        if self._is_updating:
            return True  # the session shows the step to a scheduler
        optimizer = self.session.optimizer
        name = type(optimizer).__name__
        if has_closure:
            raise UsageError(
                f"{name}.step(closure) under DistributedDataParallel: compute the loss before step()"
            )
        if hasattr(optimizer, "grad_scale"):
            raise UsageError(
                f"{name}(fused=True) undoes the scale of a GradScaler itself; leave fused=True out"
            )
        if self.session.engine.pending is None:
            return False
        self._is_updating = True
        try:
            self.session.update()
        finally:
            self._is_updating = False
        return True


def _own_loss(model: nn.Module, batch: Any) -> Any:
    raise UsageError(
        "this script computes its loss itself: say mh.session(model, optimizer, loss) to evaluate"
    )


def _optimizers_of(model: nn.Module) -> list[Optimizer]:
    """Those that the script has made of the model's parameters."""
    own = {id(param) for param in model.parameters()}
    # By type: some objects answer the question for their class with a warning.
    found: list[Any] = [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]
    return [
        one
        for one in found
        if any(id(param) in own for group in getattr(one, "param_groups", ()) for param in group["params"])
    ]


def _samples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    try:
        return samples_in([*args, *kwargs.values()])
    except UsageError:
        return 1


# What scripts import beside it


class DistributedSampler(PlainSampler[Any]):
    """PyTorch's own, for the workers of the run. `session.batches` divides data so that nothing is lost by a death."""

    def __init__(
        self, dataset: Any, num_replicas: int | None = None, rank: int | None = None, **settings: Any
    ) -> None:
        workers, own = worker_process.workers(), worker_process.rank()
        super().__init__(
            dataset,
            num_replicas=workers if num_replicas is None else num_replicas,
            rank=own if rank is None else rank,
            **settings,
        )


def init_process_group(*arguments: Any, **settings: Any) -> None:
    """Nothing: the launcher has started the workers, and the session connects them."""


def destroy_process_group(*arguments: Any) -> None:
    """Close the sessions of all wrapped models."""
    for made in _open():
        made.close()


def is_initialized() -> bool:
    return True


def get_rank() -> int:
    return worker_process.rank()


def get_world_size() -> int:
    return worker_process.workers()


def barrier(*arguments: Any, **settings: Any) -> None:
    """Return when all workers have come here; before a session has begun they need not wait for each other."""
    for made in _open()[:1]:
        made.barrier()


def _open() -> list[Session]:
    return [made for one in _sessions if (made := one()) is not None and not made.is_closed]
