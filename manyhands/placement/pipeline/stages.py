"""The stages of one worker: microbatches come in, are computed and passed on, as the schedule says."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from manyhands import telemetry
from manyhands.placement.model_parallel import ModelParallelPart, Sliced
from manyhands.placement.pipeline.deferred import Deferred
from manyhands.placement.pipeline.loans import Loans
from manyhands.placement.pipeline.microbatches import microbatches
from manyhands.placement.pipeline.stage_channel import Message, StageChannel
from manyhands.placement.pipeline.stage_graph import Received, StageGraph, forward
from manyhands.placement.pipeline.stage_plan import EVERYWHERE, StageDivision, StagePlan, kind_of
from manyhands.placement.pipeline.timetable import BACKWARD, FORWARD, SCHEDULES, table
from manyhands.placement.process_groups import ProcessGroups
from manyhands.replica.part import Loss, Passing, Share
from manyhands.replica.returned import detached, loss_in, number_in

ACTIVATIONS, GRADIENTS, LOSS = range(3)  # kinds of messages


class Stages(ModelParallelPart):
    """Some stages of a model; a worker that has several has every n-th of them."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        groups: ProcessGroups,
        division: StageDivision,
        *,
        schedule: str,
        micros: int,
        sliced: Sliced | None = None,
    ) -> None:
        mesh, position = groups.mesh, groups.position
        self.division = division.encoded()
        self._schedule, self._micros = schedule, micros
        self._workers, self._stage = mesh.stages, position.stage
        self._chunks = division.stages // mesh.stages
        self._last = division.stages - 1
        self._plan = StagePlan(model, division)
        own = range(position.stage, division.stages, mesh.stages)
        held = self._plan.of_stages(own) - (sliced.elsewhere if sliced else set())
        super().__init__(model, loss, groups, held=held, sliced=sliced)
        self.presence.attach([self._plan])
        self._meet()

    def move(self, groups: ProcessGroups) -> None:
        super().move(groups)
        self._meet()

    def _meet(self) -> None:
        """Whatever was on its way before is not any more."""
        self._channel = StageChannel(self.groups.model_parallel)
        self._deferred = Deferred() if SCHEDULES[self._schedule].divided else None
        self._loans = Loans(
            self._plan, self.presence, self._channel, self._workers, self._stage, self._member
        )

    @staticmethod
    def modules(model: nn.Module, division: StageDivision, groups: ProcessGroups) -> list[nn.Module]:
        """The modules of this worker's stages, and those inside them."""
        found: dict[int, nn.Module] = {}
        for module, stage in zip(model.modules(), division.units, strict=True):
            if stage != EVERYWHERE and stage % groups.mesh.stages == groups.position.stage:
                found |= {id(each): each for each in module.modules()}
        return list(found.values())

    def counts(self, name: str) -> bool:
        """The first stage speaks for what all have."""
        everywhere = self._plan.stage_of.get(self._ids[name], EVERYWHERE) == EVERYWHERE
        return super().counts(name) and (self._stage == 0 or not everywhere)

    def backward(self, share: Share, passing: Passing) -> tuple[float, int]:
        micros = [
            (micro, count, samples)
            for batch, samples in share.parts
            for micro, count in microbatches(batch, samples, self._micros)
        ]
        run = _Run(self, micros, share.total, passing)
        watch, self.watch = self.watch, None
        if watch:
            watch.begin()
        with self.presence.passing(), self._own_numbers():
            if micros:
                self._loans.lend()
            for action in table(self._schedule, self._workers, self._chunks, len(micros))[self._stage]:
                run.take(action.kind, action.chunk, action.micro)
            if micros:
                self._loans.settle()
        if watch:
            watch.end()
        return self._everywhere(run.loss), sum(count for _, count, _ in micros)

    def evaluate(self, measure: Loss, batch: Any, samples: int) -> float:
        micros = [(micro, count, samples) for micro, count in microbatches(batch, samples, self._micros)]
        run = _Run(self, micros, lambda: float(samples), lambda is_last: nullcontext(), measure)
        with self.presence.passing(), self._own_numbers():
            self._loans.lend()
            for chunk in range(self._chunks):
                for micro in range(len(micros)):
                    run.take(FORWARD, chunk, micro)
            self._loans.give_back()
        return self._everywhere(run.loss) / samples

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Each stage draws from a stream of its own; afterwards the workers of a replica go on alike with theirs."""
        seed = int(torch.randint(1 << 62, ()))
        state = torch.get_rng_state()
        # Not `torch.manual_seed`, which also formats the stack for each kind of device that is not there.
        torch.default_generator.manual_seed(seed + self._stage)
        try:
            yield
        finally:
            torch.set_rng_state(state)

    def _everywhere(self, loss: float) -> float:
        """The loss that the last stage knows; it has finished before the others have."""
        number = torch.tensor([loss], dtype=torch.float64)
        source = self.groups.mesh.stages - 1
        if self._stage == source:
            for stage in range(source):
                self._channel.send(self._member(stage), (LOSS, 0, 0), [(number, False)])
        else:
            ((number, _),), _ = self._channel.receive(self._member(source), (LOSS, 0, 0))
        self._channel.flush()
        return float(number)

    def _member(self, stage: int) -> int:
        """The worker of another stage that has the same way: its rank among the replica's workers."""
        return (stage % self._workers) * self.groups.mesh.ways + self.groups.position.way


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
        self._graphs: dict[tuple[int, int], StageGraph] = {}
        self._mode = part._plan.mode(self._measure)
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
        batch, count, _ = self._micros[micro]
        received = None
        if stage:
            message, notes = part._channel.receive(part._member(stage - 1), (ACTIVATIONS, stage, micro))
            received = Received(notes[0], notes[1:], message)
            del message  # the stage's own code is to be the only holder of what it gets
        collecting = self._divided.collecting((chunk, micro)) if self._divided else nullcontext()
        with telemetry.timed("compute"), collecting:
            graph = forward(part._plan, stage, received, kind_of(self._mode, batch), self._measure, batch)
        if torch.is_grad_enabled():
            self._graphs[chunk, micro] = graph
        if stage == part._last:
            self.loss += number_in(detached(graph.result)) * count
        elif graph.sent:
            outs = [(value, value.requires_grad) for _, value in graph.sent.values]
            notes = [graph.sent.digest, *(number for number, _ in graph.sent.values)]
            part._channel.send(part._member(stage + 1), (ACTIVATIONS, stage + 1, micro), outs, notes)

    def _backward(self, chunk: int, micro: int) -> None:
        part = self._part
        stage = chunk * part._workers + part._stage
        graph = self._graphs.pop((chunk, micro))
        self._left[chunk] -= 1
        if stage == part._last:
            _, count, _ = self._micros[micro]
            outputs = [loss_in(graph.result)]
            part.look_at_first(graph.result, count)
            weights = [torch.full_like(outputs[0], count / self._total())]
        elif outputs := graph.outputs:
            message, _ = part._channel.receive(part._member(stage + 1), (GRADIENTS, stage, micro))
            weights = [tensor for tensor, _ in message]
        with telemetry.timed("compute"):
            if outputs:
                is_last = self._left[chunk] == 0 and not self._divided and not part._loans.are_due
                with self._passing(is_last):
                    torch.autograd.backward(outputs, weights)
        if graph.likes:
            gradients: Message = [(gradient, False) for gradient in graph.gradients()]
            part._channel.send(part._member(stage - 1), (GRADIENTS, stage - 1, micro), gradients)
