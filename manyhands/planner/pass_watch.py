"""What one forward and backward pass of a model looks like from inside, watched in a worker that is probed.

ready     when each parameter's gradient is complete, and so each span of the flat vector
layers    which part of the forward pass each layer takes, and how much it hands on
memory    of the process, and of the optimizer's state
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.data.structure import samples_in
from manyhands.replica.layout import Layout

Told = dict[str, Any]

_DIVISIBLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding, nn.MultiheadAttention)


class PassWatch:
    """Hooks on a model; a pass begins with its first forward call and ends with its last gradient."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self._layers = [
            (name, layer)
            for name, layer in model.named_modules()
            if not list(layer.children()) and next(layer.parameters(), None) is not None
        ]
        self._handles: list[Any] = []
        self._passes: list[tuple[float, dict[str, float]]] = []
        self._spent: dict[str, float] = {}
        self._output_bytes: dict[str, float] = {}
        self._began_s = self._forward_s = 0.0
        self._ready_s: dict[str, float] = {}
        self._begins: dict[str, float] = {}

    def install(self) -> None:
        add = self._handles.append
        add(self._model.register_forward_pre_hook(self._begin))
        add(self._model.register_forward_hook(self._end_forward))
        for name, param in self._params.items():
            add(param.register_post_accumulate_grad_hook(partial(self._note, name)))
        for name, layer in self._layers:
            add(layer.register_forward_pre_hook(partial(self._enter, name)))
            add(layer.register_forward_hook(partial(self._leave, name)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def end_step(self) -> None:
        """The step that these hooks have seen is over."""
        if self._ready_s:
            whole = max(self._ready_s.values()) - self._began_s
            ready = {name: (at - self._began_s) / whole for name, at in self._ready_s.items()}
            self._passes.append(((self._forward_s - self._began_s) / whole, ready))
        self._began_s, self._ready_s = 0.0, {}

    def told(self, layout: Layout) -> Told:
        """As the facts of a model have it; spans in the order of the flat vector, the last layers first."""
        seen = self._passes[1:] or self._passes
        ready = {
            name: statistics.median([one.get(name, 1.0) for _, one in seen]) if seen else 1.0
            for name in self._params
        }
        latest, spans = 0.0, []
        for span in layout.spans:
            latest = max([latest, *(ready.get(layout.places[place].name, 1.0) for place in span.places)])
            spans.append(min(1.0, latest))
        total = sum(self._spent.values()) or 1.0
        return {
            "parameters": sum(param.numel() for param in self._params.values()),
            "ready": spans,
            "forward_share": statistics.median([forward for forward, _ in seen]) if seen else 1 / 3,
            "layers": [
                {
                    "name": name,
                    "parameters": sum(param.numel() for param in layer.parameters()),
                    "share": self._spent[name] / total,
                    "output_bytes": self._output_bytes.get(name, 0.0),
                    "divisible": isinstance(layer, _DIVISIBLE),
                }
                for name, layer in self._layers
                if name in self._spent
            ],
        }

    def _begin(self, *_: Any) -> None:
        if not self._began_s:
            self._began_s = time.process_time()

    def _end_forward(self, *_: Any) -> None:
        self._forward_s = time.process_time()

    def _note(self, name: str, *_: Any) -> None:
        self._ready_s[name] = time.process_time()

    def _enter(self, name: str, *_: Any) -> None:
        self._begins[name] = time.process_time()

    def _leave(self, name: str, layer: nn.Module, given: Any, made: Any) -> None:
        self._spent[name] = self._spent.get(name, 0.0) + time.process_time() - self._begins.pop(name, 0.0)
        samples = max(1, samples_in(given)) if given else 1
        self._output_bytes[name] = sum(t.numel() * t.element_size() for t in _tensors(made)) / samples


def _tensors(made: Any) -> list[Tensor]:
    if isinstance(made, Tensor):
        return [made]
    if isinstance(made, Mapping):
        made = list(made.values())
    return [one for part in made for one in _tensors(part)] if isinstance(made, tuple | list) else []


def kernels() -> Told:
    """The reference pair, with one thread: a product of matrices in the cache, and a sum of vectors far larger."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        side, length = 192, 1 << 23
        a, b = torch.rand(side, side), torch.rand(side, side)
        x, y = torch.rand(length), torch.rand(length)
        product_s = _undisturbed_s(partial(torch.mm, a, b), 0.1)
        sum_s = _undisturbed_s(partial(x.add_, y), 0.15)
    finally:
        torch.set_num_threads(threads)
    return {"flops_per_s": 2 * side**3 / product_s, "bytes_per_s": 3 * 4 * length / sum_s}


def _undisturbed_s(call: Any, during_s: float) -> float:
    """Processor seconds of a call: the lower quartile, which neighbours disturb least."""
    found: list[float] = []
    end_s = time.process_time() + during_s
    while len(found) < 5 or time.process_time() < end_s:
        began_s = time.process_time()
        call()
        found.append(time.process_time() - began_s)
    return sorted(found)[len(found) // 4]


def forget_peak() -> None:
    """The peak of this process's memory counts from here on."""
    Path("/proc/self/clear_refs").write_text("5")


def memory() -> Told:
    """Bytes of this process: its largest and its present resident memory, and its fair share of what it has now."""
    status = Path("/proc/self/status").read_text()
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return {
        "peak": _bytes(status, "VmHWM:"),
        "resident": _bytes(status, "VmRSS:"),
        "fair": _bytes(rollup, "Pss:"),
    }


def _bytes(text: str, field: str) -> int:
    line = next((line for line in text.splitlines() if line.startswith(field)), "x 0")
    return int(line.split()[1]) * 1024


def state_bytes(state: Mapping[str, Any]) -> int:
    """Of an optimizer's state, as `state_dict` has it."""
    values: Sequence[Any] = [value for one in state.get("state", {}).values() for value in one.values()]
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))
