"""What each operation of a model costs: measured, on a microbatch, one operation at a time."""

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from manyhands.placement.pipeline.balance import Costs
from manyhands.placement.pipeline.graph import Row, Values, enter

REPEATS = 3


def measure(row: Row, inputs: Values) -> Costs:
    """Seconds of every operation, forward and backward, the least of some tries; the model stays as it was."""
    buffers = [(buffer, buffer.clone()) for buffer in row.model.buffers()]
    random = torch.get_rng_state()
    tries = []
    for _ in range(REPEATS):
        seconds, crossing, allowed = _sweep(row, dict(inputs))
        tries.append(seconds)
    torch.set_rng_state(random)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    for param in row.model.parameters():
        param.grad = None
    return Costs(
        seconds=[min(each) for each in zip(*tries, strict=True)],
        crossing_bytes=crossing,
        trained=[bool(row.parameters(index, index + 1)) for index in range(len(row.nodes))],
        allowed=[fits and apart for fits, apart in zip(allowed, _apart(row), strict=True)],
    )


def _sweep(row: Row, values: Values) -> tuple[list[float], list[int], list[bool]]:
    needs: set[str] = set()  # the values that need gradients
    seconds, crossing, allowed = [], [], []
    for index, node in enumerate(row.nodes):
        wanted = [each.name for each in node.all_input_nodes if each.name in needs]
        entered, _ = enter([values[name] for name in wanted])
        given = values | dict(zip(wanted, entered, strict=True))
        began = time.thread_time()  # not what other processes took meanwhile
        result = row.run(index, given)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        seconds.append(time.thread_time() - began)
        if outputs and isinstance(result, Tensor):
            needs.add(node.name)
        values[node.name] = _detached(result)
        alive = [values[each.name] for each in row.live(index + 1)]
        allowed.append(all(isinstance(value, Tensor) for value in alive))
        crossing.append(sum(value.nbytes for value in alive if isinstance(value, Tensor)))
    return seconds, crossing, allowed


def _detached(result: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda leaf: leaf.detach(), result)


def _apart(row: Row) -> list[bool]:
    """After which operations no parameter has been used that is used again."""
    last: dict[int, int] = {}
    uses = [[id(tensor) for tensor in row.tensors(index, index + 1)] for index in range(len(row.nodes))]
    for index, used in enumerate(uses):
        last |= dict.fromkeys(used, index)
    open_until, result = -1, []
    for index, used in enumerate(uses):
        open_until = max([open_until, *(last[each] for each in used)])
        result.append(open_until <= index)
    return result
