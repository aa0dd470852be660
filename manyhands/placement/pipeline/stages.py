"""The stages of one worker: microbatches come in, are computed and passed on, as the schedule says."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from manyhands import telemetry
from manyhands.placement.model_parallel import ModelParallelPart, Sliced
from manyhands.placement.pipeline.cutting import Cuts
from manyhands.placement.pipeline.deferred import Deferred
from manyhands.placement.pipeline.graph import Values, enter
from manyhands.placement.pipeline.loss_adapter import answered, called_with
from manyhands.placement.pipeline.microbatches import microbatches
from manyhands.placement.pipeline.stage_channel import Message, StageChannel
from manyhands.placement.pipeline.timetable import BACKWARD, FORWARD, SCHEDULES, table
from manyhands.placement.process_groups import ProcessGroups
from manyhands.replica.part import Loss, Passing, Share

ACTIVATIONS, GRADIENTS, LOSS = range(3)  # kinds of messages


class Stages(ModelParallelPart):
    """Some stages of a model; a worker that has several has every n-th of them."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        groups: ProcessGroups,
        cuts: Cuts,
        *,
        schedule: str,
        micros: int,
        sliced: Sliced | None = None,
    ) -> None:
        mesh, position = groups.mesh, groups.position
        self._row = cuts.row
        self.division = cuts.edges
        self._schedule, self._micros = schedule, micros
        self._workers, self._stage = mesh.stages, position.stage
        self._chunks = cuts.stages // mesh.stages
        self._last = cuts.stages - 1
        self._spans = _spans(cuts, groups)
        self._ins = [[node.name for node in cuts.row.live(span.start)] for span in self._spans]
        self._outs = [[node.name for node in cuts.row.live(span.stop)] for span in self._spans]
        held = {id(tensor) for span in self._spans for tensor in cuts.row.tensors(span.start, span.stop)}
        if position.stage == 0:  # what no operation uses is somewhere all the same
            used = {id(tensor) for tensor in cuts.row.tensors(0, len(cuts.row.nodes))}
            held |= {
                id(tensor) for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in used
            }
        held -= sliced.elsewhere if sliced else set()
        super().__init__(model, loss, groups, held=held, sliced=sliced)
        self._meet()

    def move(self, groups: ProcessGroups) -> None:
        super().move(groups)
        self._meet()

    def _meet(self) -> None:
        """Whatever was on its way before is not any more."""
        self._channel = StageChannel(self.groups.model_parallel)
        self._deferred = Deferred() if SCHEDULES[self._schedule].divided else None

    @staticmethod
    def modules(cuts: Cuts, groups: ProcessGroups) -> list[nn.Module]:
        """The modules of this worker's stages, and those inside them."""
        found: dict[int, nn.Module] = {}
        for span in _spans(cuts, groups):
            for index in span:
                node = cuts.row.nodes[index]
                if node.op == "call_module":
                    inside = cuts.row.model.get_submodule(str(node.target)).modules()
                    found |= {id(module): module for module in inside}
        return list(found.values())

    def backward(self, share: Share, passing: Passing) -> tuple[float, int]:
        micros = [
            (micro, count, samples)
            for batch, samples in share.parts
            for micro, count in microbatches(batch, samples, self._micros)
        ]
        run = _Run(self, micros, share.total, passing)
        for action in table(self._schedule, self._workers, self._chunks, len(micros))[self._stage]:
            run.take(action.kind, action.chunk, action.micro)
        return self._everywhere(run.loss), sum(count for _, count, _ in micros)

    def evaluate(self, measure: Loss, batch: Any, samples: int) -> float:
        micros = [(micro, count, samples) for micro, count in microbatches(batch, samples, self._micros)]
        run = _Run(self, micros, lambda: float(samples), lambda is_last: nullcontext(), measure)
        for chunk in range(self._chunks):
            for micro in range(len(micros)):
                run.take(FORWARD, chunk, micro)
        return self._everywhere(run.loss) / samples

    def _everywhere(self, loss: float) -> float:
        """The loss that the last stage knows; it has finished before the others have."""
        number = torch.tensor([loss], dtype=torch.float64)
        source = self.groups.mesh.stages - 1
        if self._stage == source:
            for stage in range(source):
                self._channel.send(self._member(stage), (LOSS, 0, 0), [(number, False)])
        else:
            number = self._channel.receive(self._member(source), (LOSS, 0, 0))[0][0]
        self._channel.flush()
        return float(number)

    def _member(self, stage: int) -> int:
        """The worker of another stage that has the same way: its rank among the replica's workers."""
        return (stage % self._workers) * self.groups.mesh.ways + self.groups.position.way


def _spans(cuts: Cuts, groups: ProcessGroups) -> list[range]:
    """The operations of this worker's stages."""
    workers = groups.mesh.stages
    return [cuts.span(stage) for stage in range(groups.position.stage, cuts.stages, workers)]


class _Run:
    """One step's microbatches on this worker."""

    def __init__(
        self,
        part: Stages,
        micros: Sequence[tuple[Any, int, int]],
        total: Callable[[], float],
        passing: Passing,
        measure: Loss | None = None,
    ) -> None:
        self.loss = 0.0
        self._part = part
        self._micros = micros
        self._total = total
        self._passing = passing
        self._measure = measure or part.loss
        self._graphs: dict[tuple[int, int], tuple[list[Tensor], list[Any], int]] = {}
        self._left: defaultdict[int, int] = defaultdict(lambda: len(micros))
        self._divided = part._deferred if measure is None else None

    def take(self, kind: str, chunk: int, micro: int) -> None:
        if kind == FORWARD:
            self._forward(chunk, micro)
        elif kind == BACKWARD:
            self._backward(chunk, micro)
        elif self._divided:
            with telemetry.timed("compute"):
                self._divided.finish((chunk, micro))

    def _forward(self, chunk: int, micro: int) -> None:
        part = self._part
        stage = chunk * part._workers + part._stage
        batch, _, _ = self._micros[micro]
        values, box, wanted = self._inputs(stage, chunk, micro)
        with telemetry.timed("compute"):
            if self._divided:
                with self._divided.collecting((chunk, micro)):
                    self._compute(chunk, values)
            else:
                self._compute(chunk, values)
            if stage == part._last:
                loss = answered(self._measure, batch, part._row.result(values))
                self.loss += loss.item() * self._micros[micro][1]
                self._graphs[chunk, micro] = ([loss], box, wanted)
                return
        outs = [(values[name], values[name].requires_grad) for name in part._outs[chunk]]
        part._channel.send(part._member(stage + 1), (ACTIVATIONS, stage + 1, micro), outs)
        self._graphs[chunk, micro] = ([value for value, needs in outs if needs], box, wanted)

    def _compute(self, chunk: int, values: Values) -> None:
        row = self._part._row
        for index in self._part._spans[chunk]:
            values[row.nodes[index].name] = row.run(index, values)

    def _inputs(self, stage: int, chunk: int, micro: int) -> tuple[Values, list[Any], int]:
        """What the stage begins with, where gradients for the stage before will be, and how many it wants."""
        part = self._part
        if stage == 0:
            args, kwargs = called_with(self._measure, self._micros[micro][0])
            return part._row.bind(args, kwargs), [], 0
        message = part._channel.receive(part._member(stage - 1), (ACTIVATIONS, stage, micro))
        wanted = [tensor for tensor, needs in message if needs] if torch.is_grad_enabled() else []
        entered, box = enter(wanted)
        gates = iter(entered)
        values = {
            name: next(gates) if needs and wanted else tensor
            for name, (tensor, needs) in zip(part._ins[chunk], message, strict=True)
        }
        return values, box, len(wanted)

    def _backward(self, chunk: int, micro: int) -> None:
        part = self._part
        stage = chunk * part._workers + part._stage
        outputs, box, wanted = self._graphs.pop((chunk, micro))
        self._left[chunk] -= 1
        if stage == part._last:
            _, count, _ = self._micros[micro]
            weights = [torch.full_like(outputs[0], count / self._total())]
        else:
            message = (
                part._channel.receive(part._member(stage + 1), (GRADIENTS, stage, micro)) if outputs else []
            )
            weights = [tensor for tensor, _ in message]
        with telemetry.timed("compute"):
            if outputs:
                with self._passing(self._left[chunk] == 0 and not self._divided):
                    torch.autograd.backward(outputs, weights)
        if wanted:
            gradients: Message = [(gradient, False) for gradient in box]
            part._channel.send(part._member(stage - 1), (GRADIENTS, stage - 1, micro), gradients)
