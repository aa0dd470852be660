"""A model cut into stages: where a person says, or where the measured costs balance; worker 0 decides for all."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from manyhands.data.loading import samples_in
from manyhands.errors import UsageError
from manyhands.placement.pipeline.balance import Costs, balanced
from manyhands.placement.pipeline.cost import measure
from manyhands.placement.pipeline.graph import Row, row
from manyhands.placement.pipeline.loss_adapter import called_with
from manyhands.placement.pipeline.microbatches import microbatches
from manyhands.replica.part import Loss

if TYPE_CHECKING:
    from manyhands.placement.process_groups import ProcessGroups


@dataclass(frozen=True)
class Cuts:
    """A model's operations, and where each stage of them begins and ends."""

    row: Row
    edges: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.edges) - 1

    def span(self, stage: int) -> range:
        return range(self.edges[stage], self.edges[stage + 1])

    def __str__(self) -> str:
        lines = []
        for stage in range(self.stages):
            first, last = (self.row.name(index) for index in (self.span(stage)[0], self.span(stage)[-1]))
            lines.append(f"stage {stage} {first}" + (f" … {last}" if first != last else ""))
        return ", ".join(lines)


def cut(
    model: nn.Module,
    loss: Loss,
    groups: "ProcessGroups",
    example: Any,
    *,
    stages: int,
    names: Sequence[str],
    micros: int,
) -> Cuts:
    """The same cuts on all workers; worker 0 measures where no names are given, and says what came of it."""
    model_row = row(model)
    if groups.division:  # other workers have cut it already
        return Cuts(model_row, groups.division)
    if names:
        cuts = Cuts(model_row, (0, *(_after(model_row, name) for name in names), len(model_row.nodes)))
        if list(cuts.edges) != sorted(set(cuts.edges)):
            raise UsageError(
                f"split={'-'.join(names)}: every stage needs a layer; name layers in the model's order"
            )
        _refuse_parts(cuts)
        if groups.world.rank == 0:
            print(f"pipeline: {cuts}", file=sys.stderr, flush=True)
        return cuts
    if example is None:
        raise UsageError(
            "stages are balanced by measuring the model on a batch; give one, mh.session(…, "
            "example=batch), or name the last "
            "layer of each stage, --placement pipeline:split=…"
        )
    edges: list[int] = []
    groups.world.host.barrier()  # no worker runs a model while another thread of the process traces its own
    if groups.world.rank == 0:
        batch, _ = microbatches(example, samples_in(example), micros)[0]
        args, kwargs = called_with(loss, batch)
        costs = measure(model_row, model_row.bind(args, kwargs))
        edges = balanced(costs, stages) or []
        if edges or stages == 1:
            print(
                f"pipeline: {_report(Cuts(model_row, (0, *edges, len(model_row.nodes))), costs)}",
                file=sys.stderr,
            )
    told = groups.world.exchange([float(edge) for edge in edges] or [-1.0] * (stages - 1))[0]
    if any(edge < 0 for edge in told):
        raise UsageError(
            f"the model has no {stages - 1} places to cut it into {stages} stages (only tensors may "
            f"cross, and a parameter "
            "that is used twice stays with one stage); use fewer stages"
        )
    return Cuts(model_row, (0, *(int(edge) for edge in told), len(model_row.nodes)))


def _after(model_row: Row, name: str) -> int:
    """How many operations there are up to a layer, which may contain several of them."""
    found = [
        index
        for index in range(len(model_row.nodes))
        if model_row.name(index) == name or model_row.name(index).startswith(f"{name}.")
    ]
    if not found:
        known = ", ".join(model_row.name(index) for index in range(len(model_row.nodes)))
        raise UsageError(f"split={name}: the model has no such layer; it has {known}")
    return found[-1] + 1


def _refuse_parts(cuts: Cuts) -> None:
    """Every stage has parameters, and none has those of another."""
    owner: dict[int, int] = {}
    for stage in range(cuts.stages):
        if not cuts.row.parameters(cuts.span(stage).start, cuts.span(stage).stop):
            raise UsageError(f"stage {stage} has no parameters ({cuts}); name other layers")
        for tensor in cuts.row.tensors(cuts.span(stage).start, cuts.span(stage).stop):
            if owner.setdefault(id(tensor), stage) != stage:
                raise UsageError(
                    f"a parameter is used by stages {owner[id(tensor)]} and {stage}; cut where both uses are in one"
                )


def _report(cuts: Cuts, costs: Costs) -> str:
    """`stage 0 conv1 … pool2 52 %, stage 1 …; 0.3 MB between them`: shares of the measured time."""
    total = sum(costs.seconds) or 1.0
    words = str(cuts).split(", ")
    shares = [sum(costs.seconds[index] for index in cuts.span(stage)) / total for stage in range(cuts.stages)]
    sizes = [f"{costs.crossing_bytes[edge - 1] / 1e6:.2g}" for edge in cuts.edges[1:-1]]
    between = f"; {' and '.join(sizes)} MB per microbatch between them" if sizes else ""
    return ", ".join(f"{word} {share:.0%}" for word, share in zip(words, shares, strict=True)) + between
