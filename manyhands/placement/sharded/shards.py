"""A replica in shards: before a layer computes, its parameters are fetched; afterwards they are given up again.

Workers may use different layers in a step, or have no samples in it. So before each exchange every worker says what it
wants; all do what the first worker with a wish has said, and the others say theirs again afterwards. Where all want
the same, as they do in most models, that is one small exchange of numbers before each exchange.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from manyhands.cluster.worker.heap import give_freed_memory_back
from manyhands.comm.comm import Comm
from manyhands.placement.model_parallel import ModelParallelPart
from manyhands.placement.process_groups import ProcessGroups
from manyhands.placement.sharded.gathering import Gathered
from manyhands.replica.parameters import trained
from manyhands.replica.part import Loss, Passing, Share
from manyhands.replica.state.slice_of import TensorSlice

WHOLE = (nn.MultiheadAttention,)  # uses the parameters of the modules inside it without calling them

# What a worker wants: a layer's parameters, the sum of gradients; it has finished.
FETCH, REDUCE, NOTHING = range(3)


class Shards(ModelParallelPart):
    """One shard of every trained parameter; what is not trained is whole everywhere."""

    hooked = False
    frugal = True

    def __init__(self, model: nn.Module, optimizer: Optimizer, loss: Loss, groups: ProcessGroups) -> None:
        everything = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        super().__init__(model, loss, groups, held=everything)
        give_freed_memory_back()  # what follows comes from the kernel and goes back to it
        self._comm = _comm(groups)
        self._names, params = trained(model, optimizer)
        self._gathered = {id(param): Gathered(param, self._comm) for param in params}
        self._in_order = [self._gathered[id(param)] for param in params]
        self._place = {id(param): len(params) - 1 - number for number, param in enumerate(params)}
        self._deliver: Callable[[int, Tensor], None] = lambda index, gradient: None
        self._added: dict[int, Tensor] = {}  # shards of gradients, over the batches of a step
        self._layers: list[list[Gathered]] = []  # the parameters that each layer needs
        self._is_last = False
        for module in model.modules():
            self._watch(module)
        self._hooks += [
            gathered.param.register_post_accumulate_grad_hook(self._arrive) for gathered in self._in_order
        ]
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
            number = len(self._layers)
            self._layers.append(needed)
            self._hooks += [
                module.register_forward_pre_hook(lambda module, args: self._fetch(number)),
                module.register_forward_hook(partial(self._leave, number)),
            ]

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
        return {
            name: (self._gathered[id(value)].shard if id(value) in self._gathered else value).detach()
            for name, value in values.items()
        }

    def _piece_of(self, name: str) -> TensorSlice:
        gathered = self._gathered.get(self._ids[name])
        return gathered.piece if gathered else super()._piece_of(name)

    def bind(self, deliver: Callable[[int, Tensor], None]) -> None:
        self._deliver = deliver

    # Passes

    def backward(self, share: Share, passing: Passing) -> tuple[float, int]:
        """A worker with fewer batches takes part in the others' exchanges."""
        parts = list(share.parts)
        value = 0.0
        for number, part in enumerate(parts, start=1):
            self._is_last = number == len(parts)
            value += super().backward(Share(parts=[part], samples=part[1], total=share.total), passing)[0]
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
        if not all(gathered.is_whole for gathered in self._layers[number]):
            self._take_part(FETCH, number)

    def _leave(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        """After a layer's forward pass: its backward pass will need the parameters again."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda gradient: self._fetch(number))
        for gathered in self._layers[number]:
            gathered.give_up()

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


def _comm(groups: ProcessGroups) -> Comm:
    """Where all workers have one replica, the world's own comm saves the buffers of another."""
    return groups.world.comm if groups.mesh.replicas == 1 else groups.model_parallel.comm
