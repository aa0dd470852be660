"""What one run of the loss has shown of a model: its calls in order, what lies between, and where it may be cut."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from manyhands.placement.pipeline.stage_plan import EVERYWHERE, StageDivision, tensors_of_model


@dataclass
class Segment:
    """From one use of parameters to the next."""

    name: str
    tensors: list[Tensor]
    """The parameters, and the buffers of the layer that was called."""
    modules: tuple[int, ...]
    """The modules that are under way, the outermost first, by their place in the model."""
    leaf: int | None
    """The layer that was called; None where a parameter is used without one."""
    seconds: float = 0.0


@dataclass
class Value:
    """One that depends on the model: where it comes to be, and where it is used last."""

    made: int
    last: int
    nbytes: int
    storage: int
    can_cross: bool


@dataclass
class Recording:
    """A run on the example; segments are the places where something of the model begins."""

    model: nn.Module
    segments: list[Segment] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    last_of: dict[str, int] = field(default_factory=dict)
    """By the name of a module that was called: the segment in which it ended."""
    looks: list[tuple[int, tuple[int, ...], str]] = field(default_factory=list)
    """Where the code asked for numbers: the segment, the modules under way, and what it called."""
    written: dict[int, int] = field(default_factory=dict)
    """By storage: the last segment that wrote into it."""
    open_only: set[int] = field(default_factory=set)
    """Modules whose results are not made of tensors alone: their code must run on every stage."""
    changed: set[int] = field(default_factory=set)
    """The ids of buffers that the run has changed."""

    def crossing_bytes(self, micros: int) -> list[int]:
        """After each segment: what is still needed, and what would be lent over it once for all microbatches."""
        count = len(self.segments)
        sizes = [0] * count
        for value in self.values:
            for index in range(value.made, min(value.last, count)):
                sizes[index] += value.nbytes
        for first, last, tensor in self._spans_of_tensors():
            for index in range(first, last):
                sizes[index] += tensor.nbytes // micros
        return sizes

    def trained(self) -> list[bool]:
        """Whether a segment is the first to use something that is trained: each stage needs such a thing."""
        firsts: list[set[int]] = [set() for _ in self.segments]
        for first, _, tensor in self._spans_of_tensors():
            firsts[first].add(id(tensor))
        return [
            any(each.requires_grad and id(each) in own for each in segment.tensors)
            for segment, own in zip(self.segments, firsts, strict=True)
        ]

    def objections(self) -> list[str]:
        """After each segment: why the model may not be cut there; nothing where it may."""
        found = [""] * len(self.segments)

        def forbid(first: int, last: int, why: str) -> None:
            for index in range(first, min(last, len(found))):
                found[index] = found[index] or why

        calls: dict[int, int] = {}
        for index, segment in enumerate(self.segments):
            if segment.leaf is not None:
                first = calls.setdefault(segment.leaf, index)
                forbid(first, index, f"{segment.name} is called before and after it")
        known: set[int] = set()
        for index, segment in enumerate(self.segments):
            if segment.leaf is None and known >= {id(each) for each in segment.tensors}:
                forbid(index - 1, index, f"what follows uses {segment.name} again, outside of a layer")
            known |= {id(each) for each in segment.tensors}
        for first, last, tensor in self._spans_of_tensors():
            if id(tensor) in self.changed:
                forbid(first, last, "a buffer that the model changes is used before and after it")
        for where, modules, name in self.looks:
            forbid(*self._extent(where, modules), f"the model's code asks for numbers ({name})")
        self._forbid_values(forbid)
        return found

    def _forbid_values(self, forbid: object) -> None:
        assert callable(forbid)
        by_storage: dict[int, list[Value]] = {}
        for value in self.values:
            by_storage.setdefault(value.storage, []).append(value)
            if not value.can_cross:
                forbid(value.made, value.last, "what would cross is no dense tensor of a usual type")
        for storage, values in by_storage.items():
            until = self.written.get(storage, -1)
            for value in values if len(values) > 1 else ():
                other = min(each.made for each in values if each is not value)
                forbid(
                    max(value.made, other), min(value.last, until), "views of one tensor are written after it"
                )

    def _extent(self, segment: int, modules: Sequence[int]) -> tuple[int, int]:
        """The segments of the smallest module that can be kept whole; of the loss and the model, to the end."""
        whole = (each for each in reversed(modules) if each and each not in self.open_only)
        module = next((each for each in whole if each in self.segments[segment].modules), None)
        if module is None:
            return segment, len(self.segments)
        first = last = segment
        while first > 0 and module in self.segments[first - 1].modules:
            first -= 1
        while last + 1 < len(self.segments) and module in self.segments[last + 1].modules:
            last += 1
        return first, last

    def _spans_of_tensors(self) -> list[tuple[int, int, Tensor]]:
        spans: dict[int, tuple[int, int, Tensor]] = {}
        for index, segment in enumerate(self.segments):
            for tensor in segment.tensors:
                first = spans.get(id(tensor), (index, index, tensor))[0]
                spans[id(tensor)] = (first, index, tensor)
        return list(spans.values())

    # The model in stages

    def divide(self, edges: Sequence[int]) -> StageDivision:
        """Stage s from segment `edges[s]` on."""
        stage_of = [
            max(stage for stage, edge in enumerate(edges) if edge <= index)
            for index in range(len(self.segments))
        ]
        tensors = tensors_of_model(self.model)
        used: dict[int, list[int]] = {}
        for segment, stage in zip(self.segments, stage_of, strict=True):
            for tensor in segment.tensors:
                used.setdefault(id(tensor), []).append(stage)
        owners, lent = [], []
        params = {id(param) for param in self.model.parameters()}
        before = 0
        for number, tensor in enumerate(tensors):
            stages = sorted(set(used.get(id(tensor), ())))
            is_param = id(tensor) in params
            if not is_param and (not stages or (len(stages) > 1 and id(tensor) not in self.changed)):
                owners.append(EVERYWHERE)
                continue
            before = (
                stages[0] if stages else before
            )  # what no call uses is with what was registered before it
            owners.append(before)
            lent += [(number, stage) for stage in stages[1:]]
        return StageDivision(
            stages=len(edges),
            units=self._units(stage_of, dict(zip(map(id, tensors), owners, strict=True))),
            tensors=tuple(owners),
            lent=tuple(lent),
        )

    def _units(self, stage_of: Sequence[int], owner: dict[int, int]) -> tuple[int, ...]:
        """The largest modules that are called by one stage alone, and layers that were not called."""
        modules = list(self.model.modules())
        seen: dict[int, set[int]] = {}
        for segment, stage in zip(self.segments, stage_of, strict=True):
            for module in segment.modules:
                seen.setdefault(module, set()).add(stage)
        units = [EVERYWHERE] * len(modules)
        for segment, stage in zip(self.segments, stage_of, strict=True):
            whole = (
                each
                for each in segment.modules
                if each and len(seen[each]) == 1 and (each not in self.open_only or each == segment.leaf)
            )
            if (first := next(whole, None)) is not None:
                units[first] = stage
        for place, uncalled in enumerate(modules):
            own = [owner[id(each)] for each in uncalled.parameters(recurse=False)]
            if place and own and place not in seen and len(set(own)) == 1:
                units[place] = own[0]
        return tuple(units)
