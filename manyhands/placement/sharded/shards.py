"""A replica in shards: before a layer computes, its parameters are fetched; afterwards they are given up again.

Workers may use different layers in a step, or have no samples in it. So before each exchange every worker says what it
wants; all do what the first worker with a wish has said, and the others say theirs again afterwards. Where all want
the same, as they do in most models, that is one small exchange of numbers before each exchange.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from manyhands.cluster.worker.heap import give_freed_memory_back
from manyhands.comm.comm import Comm
from manyhands.errors import UsageError
from manyhands.placement.absent import Lack
from manyhands.placement.function_transforms import refuse_transforms
from manyhands.placement.model_parallel import ModelParallelPart
from manyhands.placement.process_groups import ProcessGroups
from manyhands.placement.sharded.gathering import Gathered
from manyhands.replica.parameters import trained
from manyhands.replica.part import Loss, Passing, Share
from manyhands.replica.state import buffers
from manyhands.replica.state.slice_of import TensorSlice

WHOLE = (nn.MultiheadAttention,)  # uses the parameters of the modules inside it without calling them

# What a worker wants: a layer's parameters, the sum of gradients; it has finished.
FETCH, REDUCE, NOTHING = range(3)


class Shards(ModelParallelPart):
    """One shard of every trained parameter; what is not trained is whole everywhere."""

    hooked = False
    frugal = True
    gives_up_writes = True

    def __init__(self, model: nn.Module, optimizer: Optimizer, loss: Loss, groups: ProcessGroups) -> None:
        everything = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        super().__init__(model, loss, groups, held=everything)
        give_freed_memory_back()  # what follows comes from the kernel and goes back to it
        self._comm = _comm(groups)
        self._names, params = trained(model, optimizer)
        _refuse_writers(model)
        self._gathered = {}
        for name, param in zip(self._names, params, strict=True):
            lack = Lack(param, name, self)
            self.presence.add(lack, comes=False)
            self._gathered[id(param)] = Gathered(param, self._comm, lack)
        self._in_order = [self._gathered[id(param)] for param in params]
        self._place = {id(param): len(params) - 1 - number for number, param in enumerate(params)}
        self._deliver: Callable[[int, Tensor], None] = lambda index, gradient: None
        self._added: dict[int, Tensor] = {}  # shards of gradients, over the batches of a step
        self._layers: list[list[Gathered]] = []  # the parameters that each layer needs
        self._is_last = False
        for module in model.modules():
            self._watch(module)
        self._singly = {id(param): self._layer([self._gathered[id(param)]]) for param in params}
        self.presence.watch(model)
        self.presence.on_end = self._end_use
        # The garbage collector does not see what a tensor's hooks hold.
        own = weakref.proxy(self)
        for gathered in self._in_order:
            self.presence.hook(partial(_on_gradient, gathered.param, lambda param: own._arrive(param)))
        give_freed_memory_back()  # the whole model was here

    def move(self, groups: ProcessGroups) -> None:
        super().move(groups)
        self._give_up_all()
        self._added.clear()
        self._comm = _comm(groups)
        for gathered in self._in_order:
            gathered.comm = self._comm

    def _watch(self, module: nn.Module) -> None:
        params = module.parameters() if isinstance(module, WHOLE) else module.parameters(recurse=False)
        needed = [self._gathered[id(param)] for param in params if id(param) in self._gathered]
        if needed:
            number = self._layer(needed)
            self.presence.hook(
                lambda: module.register_forward_pre_hook(lambda module, args: self._fetch(number))
            )
            self.presence.hook(lambda: module.register_forward_hook(partial(self._leave, number)))
            self.presence.watch(module)

    def _layer(self, needed: list[Gathered]) -> int:
        """The number under which workers ask for these parameters."""
        self._layers.append(needed)
        return len(self._layers) - 1

    def rest(self) -> None:
        super().rest()
        for gathered in self._in_order:
            gathered.rest()

    def opened(self, values: dict[str, Tensor]) -> AbstractContextManager[None]:
        self.rest()
        return super().opened(values)

    def _end_use(self) -> None:
        """The script has called the model outside of a step; other workers may still compute."""
        self._give_up_all()
        self._take_part(NOTHING)
        self.rest()

    # What is here

    def trained(self, optimizer: Optimizer) -> tuple[list[str], list[nn.Parameter]]:
        return list(self._names), [gathered.shard for gathered in self._in_order]

    def originals(self, params: Any) -> list[nn.Parameter]:
        known = {id(gathered.shard): gathered.param for gathered in self._in_order}
        return [known[id(param)] for param in params]

    def frozen(self, known: set[int]) -> list[nn.Parameter]:
        return [param for param in self.model.parameters() if id(param) not in self._gathered]

    def tensors(self) -> dict[str, Tensor]:
        values = self.model.state_dict(keep_vars=True)
        return buffers.to_saved(
            {
                name: (self._gathered[id(value)].shard if id(value) in self._gathered else value).detach()
                for name, value in values.items()
            }
        )

    def _piece_of(self, name: str) -> TensorSlice:
        gathered = self._gathered.get(self._ids[name])
        return gathered.piece if gathered else super()._piece_of(name)

    def bind(self, deliver: Callable[[int, Tensor], None]) -> None:
        self._deliver = deliver

    # Passes

    def backward(self, share: Share, passing: Passing) -> tuple[float, int]:
        """A worker with fewer batches takes part in the others' exchanges."""
        with self.presence.passing():
            return self._backward(share, passing)

    def _backward(self, share: Share, passing: Passing) -> tuple[float, int]:
        parts = list(share.parts)
        value = 0.0
        for number, part in enumerate(parts, start=1):
            self._is_last = number == len(parts)
            one = replace(share, parts=[part], samples=part[1])
            value += super().backward(one, passing)[0]
            self._give_up_all()
        self._take_part(NOTHING)
        for index in sorted(self._added):
            self._deliver(index, self._added.pop(index))
        return value, sum(samples for _, samples in parts)

    def evaluate(self, measure: Loss, batch: Any, samples: int) -> float:
        value = super().evaluate(measure, batch, samples)
        self._give_up_all()
        self._take_part(NOTHING)
        return value

    def score(self, batches: Iterable[tuple[Any, int]]) -> float:
        """Each worker has samples of its own, and some may have none."""
        total = 0.0
        for batch, samples in batches:
            total += super().evaluate(self.loss, batch, samples) * samples
            self._give_up_all()
        self._take_part(NOTHING)
        return sum(theirs for (theirs,) in self.groups.model_parallel.exchange([total]))

    def _take_part(self, kind: int, number: int = 0, gradient: Tensor | None = None) -> None:
        """Ask for an exchange; the group makes the earlier wishes of other workers on the way."""
        wish = [float(kind), float(number), float(self._is_last)]
        while True:
            wishes = self.groups.model_parallel.exchange(wish)
            granted = next((one for one in wishes if one[0] != NOTHING), wish)
            is_own = granted[:2] == wish[:2]
            if granted[0] == FETCH:
                for gathered in self._layers[int(granted[1])]:
                    gathered.fetch() if is_own else gathered.lend()
            elif granted[0] == REDUCE:
                is_all = bool(granted[2]) and all(one == granted for one in wishes)
                self._collect(int(granted[1]), gradient if is_own else None, is_all=is_all)
            if is_own:
                return

    def _fetch(self, number: int) -> None:
        refuse_transforms("sharded")
        if not all(gathered.is_whole for gathered in self._layers[number]):
            self._take_part(FETCH, number)

    def _leave(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        """After a layer's forward pass: its backward pass will need the parameters again."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda gradient: self._fetch(number))
        for gathered in self._layers[number]:
            gathered.give_up()

    def _reaches(self, lack: Lack) -> bool:
        return True

    def _fetched(self, lack: Lack) -> Tensor:
        """For what the loss computes with a parameter outside of the module that has it."""
        gathered = self._gathered[id(lack.tensor)]
        self._fetch(self._singly[id(lack.tensor)])
        value = gathered.param.clone()
        gathered.give_up()
        return value

    def _arrive(self, param: Tensor) -> None:
        gathered = self._gathered[id(param)]
        gradient, param.grad = param.grad, None
        gathered.give_up()
        self._take_part(REDUCE, self._place[id(param)], gradient)

    def _collect(self, index: int, gradient: Tensor | None, *, is_all: bool) -> None:
        """Add up all workers' gradients of one parameter; `is_all`: no worker will have more of it in this step."""
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        shard = self._in_order[len(self._in_order) - 1 - index].reduced(gradient)
        if index in self._added:
            shard = self._added[index].add_(shard)
        self._added[index] = shard
        if is_all:
            self._deliver(index, self._added.pop(index))

    def _give_up_all(self) -> None:
        for gathered in self._in_order:
            gathered.give_up()


def _on_gradient(param: nn.Parameter, call: Callable[[Tensor], None]) -> Any:
    """A hook that is there when a frozen parameter thaws, too; PyTorch takes none while it is frozen."""
    with torch._C.DisableTorchFunctionSubclass():
        is_trained = param.requires_grad
        param.requires_grad_(True)
        handle = param.register_post_accumulate_grad_hook(call)
        param.requires_grad_(is_trained)
    return handle


def _comm(groups: ProcessGroups) -> Comm:
    """Where all workers have one replica, the world's own comm saves the buffers of another."""
    return groups.world.comm if groups.mesh.replicas == 1 else groups.model_parallel.comm


def _refuse_writers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise UsageError(
                f"{name} limits the norm of its rows while it computes (max_norm), and under sharded what a layer "
                "writes is given up after it; leave max_norm out, or use another placement"
            )
