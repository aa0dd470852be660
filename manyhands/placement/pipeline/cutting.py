"""A model cut into stages: where a person says, or where the measured costs balance; worker 0 decides for all."""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from torch import nn

from manyhands.data.structure import samples_in
from manyhands.errors import UsageError
from manyhands.placement.pipeline.balance import Costs, balanced
from manyhands.placement.pipeline.microbatches import copied, microbatches
from manyhands.placement.pipeline.recording import Recording
from manyhands.placement.pipeline.rehearsal import rehearse
from manyhands.placement.pipeline.stage_plan import StageDivision
from manyhands.placement.pipeline.tracer import record
from manyhands.placement.pipeline.whole_batch import check_microbatches, takes_microbatches
from manyhands.replica.part import Loss
from manyhands.replica.returned import loss_in

if TYPE_CHECKING:
    from manyhands.placement.process_groups import ProcessGroups


class _Verdict(msgspec.Struct, array_like=True):
    """What worker 0 has found: a division, or why there is none."""

    problem: str
    division: tuple[int, ...]


def cut(
    model: nn.Module,
    loss: Loss,
    groups: "ProcessGroups",
    example: Any,
    *,
    stages: int,
    names: Sequence[str],
    micros: int,
) -> StageDivision:
    """The same stages on all workers."""
    if groups.division:  # other workers have cut it already
        return StageDivision.decoded(groups.division, model)
    told = _Verdict("", ())
    if groups.world.rank == 0:
        try:
            told = _Verdict(
                "", _cut(model, loss, example, stages, names, micros, groups.mesh.stages).encoded()
            )
        except UsageError as error:
            told = _Verdict(str(error), ())
    told = msgspec.json.decode(groups.world.gather(msgspec.json.encode(told))[0], type=_Verdict)
    if told.problem:
        raise UsageError(told.problem)
    return StageDivision.decoded(told.division, model)


def _cut(
    model: nn.Module,
    loss: Loss,
    example: Any,
    stages: int,
    names: Sequence[str],
    micros: int,
    workers: int,
) -> StageDivision:
    """On worker 0, while the others wait: the example runs through the model."""
    if not samples_in(example):
        raise UsageError("a pipeline is cut by what the first batch shows, and it has no samples")
    samples = samples_in(example)
    batch, micro = microbatches(example, samples, micros)[0]
    with takes_microbatches(model, loss, example, micro):
        recording = record(model, lambda: loss_in(loss(model, copied(batch))))
    objections, costs = recording.objections(), costs_of(recording, micros)
    if names:
        edges = _edges(recording, names, objections)
    else:
        found = balanced(costs, stages)
        if found is None:
            raise UsageError(_no_places(objections, costs, stages))
        edges = found
    edges = [0, *edges]
    print(f"pipeline: {_report(recording, edges, costs)}", file=sys.stderr, flush=True)
    division = recording.divide(edges)
    rehearse(model, division, loss, batch, workers)
    check_microbatches(model, loss, example, samples, micros)
    return division


def costs_of(recording: Recording, micros: int) -> Costs:
    """What balancing has to know of each segment."""
    return Costs(
        seconds=[segment.seconds for segment in recording.segments],
        crossing_bytes=recording.crossing_bytes(micros),
        allowed=[not objection for objection in recording.objections()],
        trained=recording.trained(),
    )


def _edges(recording: Recording, names: Sequence[str], objections: Sequence[str]) -> list[int]:
    """Each stage ends with the layer that a person has named, and what the model does between it and the next one."""
    segments = recording.segments
    edges = [_after(recording, name) for name in names]
    told = f"split={'-'.join(names)}"
    last = len(segments)
    if edges != sorted(edges):
        raise UsageError(f"{told}: every stage needs a layer; name layers in the model's order")
    for stage, (start, stop) in enumerate(zip([0, *edges], [*edges, last], strict=True)):
        if not any(recording.trained()[start:stop]):
            raise UsageError(f"{told}: stage {stage} has no parameters to train; name other layers")
    for name, edge in zip(names, edges, strict=True):
        if objections[edge - 1]:
            raise UsageError(f"split={name}: the model cannot be cut there, {objections[edge - 1]}")
    return edges


def _after(recording: Recording, name: str) -> int:
    """How many segments there are up to the end of a layer, which may contain several of them."""
    inside = [last for each, last in recording.last_of.items() if each == name or each.startswith(f"{name}.")]
    inside += [index for index, segment in enumerate(recording.segments) if segment.name == name]
    if not inside:
        known = ", ".join(each for each in recording.last_of if each)
        raise UsageError(f"split={name}: the model has no such layer; it calls {known}")
    return max(inside) + 1


def _no_places(objections: Sequence[str], costs: Costs, stages: int) -> str:
    layers = sum(costs.trained)
    why = Counter(filter(None, objections[:-1])).most_common(1)
    reason = f" ({why[0][0]})" if why else ""
    return (
        f"the model has no {stages - 1} places to cut it into {stages} stages: it calls {layers} "
        f"{'layer' if layers == 1 else 'layers'} with parameters to train, and may be cut after "
        f"{sum(not each for each in objections[:-1])} of them{reason}; use fewer stages, or another placement"
    )


def _report(recording: Recording, edges: Sequence[int], costs: Costs) -> str:
    """`stage 0: layers conv1 … pool2 (52 %), …; 0.3 MB between them`: shares of the measured time."""
    names = [segment.name for segment in recording.segments]
    total = sum(costs.seconds) or 1.0
    words = []
    for stage, (start, stop) in enumerate(zip(edges, [*edges[1:], len(names)], strict=True)):
        first, last = names[start], names[stop - 1]
        share = sum(costs.seconds[start:stop]) / total
        layers = f"layers {first} … {last}" if first != last else f"layer {first}"
        words.append(f"stage {stage}: {layers} ({share * 100:.0f} %)")
    sizes = [f"{costs.crossing_bytes[edge - 1] / 1e6:.2g}" for edge in edges[1:]]
    between = f"; {' and '.join(sizes)} MB per microbatch between them" if sizes else ""
    return ", ".join(words) + between
