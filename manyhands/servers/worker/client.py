"""A worker's side of the servers: push gradients, pull parameters, wait."""

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.errors import ManyhandsError, PeerLost, UsageError
from manyhands.replica.layout import Span
from manyhands.replica.optimizer.hyper_parameters import named_numbers
from manyhands.replica.replica import Replica, Share
from manyhands.servers.process.vectors import BEFORE, PARAMS
from manyhands.servers.process.write_ahead_log import Notes, round_key
from manyhands.servers.protocol.consistency import Consistency
from manyhands.servers.protocol.messages import (
    Add,
    Answer,
    Applied,
    AskContent,
    AskHolding,
    AskReport,
    AskState,
    AskStatus,
    Begin,
    Combine,
    Content,
    Done,
    Finish,
    GiveContent,
    GiveState,
    GoBack,
    Hello,
    Holds,
    Leave,
    Measure,
    Meet,
    Norm,
    Number,
    Offer,
    OptimizerState,
    Portion,
    Pull,
    Push,
    Put,
    Refusal,
    Request,
    Resolve,
    ScaleGradients,
    ServerReport,
    Status,
    Take,
    Values,
    WorkerBye,
    answer,
    encode,
)
from manyhands.servers.protocol.ownership import SpanGroup
from manyhands.servers.protocol.rows import as_table, unpack
from manyhands.servers.worker.accumulator import Accumulator
from manyhands.servers.worker.deferral import Deferral
from manyhands.servers.worker.minimizer import Minimizer
from manyhands.servers.worker.outgoing import Outgoing


class Connection(Protocol):
    """The connection with one server."""

    @property
    def secret(self) -> bytes: ...

    def send(self, content: bytes, vector: Tensor | None = None) -> None: ...

    def take(self, *, wait: bool) -> tuple[bytes, Tensor | None] | None: ...

    def fds(self) -> Iterator[int]: ...

    def close(self, *, linger: bool = True) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Reconciled:
    """What servers that come and go have at the beginning of a generation."""

    rounds: int
    """Steps that were gathered from all workers and are in every group."""
    lost: int = 0
    """Elements that no server has any more."""
    used: Mapping[int, int] = field(default_factory=dict)
    """By worker of the generation `used_in`: how far it had come with its data in gradients that every group has."""
    used_in: int = 0


class Servers:
    """All servers of the run, or of one server group among several, as one of their workers sees them.

    `params` and `grads` are the worker's flat vectors. What servers of this host own lies in common memory, the very
    vectors that they update; where all servers are here, these are `params` itself and a pull moves nothing.
    """

    def __init__(
        self,
        worker: int,
        lines: Sequence[Connection],
        groups: Sequence[SpanGroup],
        rule: Consistency,
        *,
        params: Tensor,
        grads: Tensor,
        common: Callable[[str], Tensor] | None,
        versions: Tensor | None,
        near: Collection[int],
        in_place: bool,
        clip_norm: float | None,
        digest: int,
        generation: int = 0,
        workers: int = 0,
        notes: Notes | None = None,
        roam: bool = False,
        cupboard: Accumulator | None = None,
    ) -> None:
        self.worker = worker  # its number among those that these servers serve
        self.server_groups = rule.server_groups
        self.groups = tuple(groups)
        self.params = params
        self.grads = grads
        self._lines = lines
        self._rule = rule
        self._common = common
        self._near = near
        self.in_place = in_place
        self._clip_norm = clip_norm
        self._versions = versions.numpy() if versions is not None else None
        self._last_span = {group.spans[-1].index: group for group in groups}
        self._group_of = {span.index: group for group in groups for span in group.spans}
        self._numbers = itertools.count(1)
        self._steps = 0  # since all workers last paused
        self._pushed: set[int] = set()  # the servers to which something was pushed in this step
        self._kept_back = {group.index: Deferral() for group in groups if group.every > 1}
        self._samples = 1  # of the step that is under way
        self._given: Sequence[int] = ()  # by parameter: whether what is pushed has a gradient of it
        self.speaks_for = 1  # workers
        self._late: list[SpanGroup] = []  # complete, and not yet pushed
        self._seen = [0] * len(groups)
        self._unanswered: set[int] = set()  # groups pushed and not yet applied
        self._norms: dict[int, float] = {}  # by server: squares, of gathered gradients that are to be limited
        self._arrived: list[tuple[Values, Tensor | None]] = []  # and not yet put in place
        self._told: list[list[dict[str, list[float]]]] = [[] for _ in lines]
        self._minimizer: Minimizer | None = None
        self._closed = False
        # Those of server groups that have no worker left, where this one speaks for them.
        self.orphaned: Sequence[Servers] = ()
        self.rounds = 0  # steps that were gathered from all workers and applied
        self._rounds_before = 0  # of those, in generations before this one
        self._flushes = 0  # of those, in this one, without a step of the session
        self._generation = generation
        self._cupboard = cupboard  # for a neighbour that has to speak for the host in this worker's place
        self._serial = 0  # steps and flushes, as the cupboard counts them
        self._notes = notes  # for a server that has to take over from one that died
        self.roam = roam  # whether servers come and go with their hosts
        self.levelled: Reconciled | None = None  # and what they had as this generation began
        self.used = 0  # how far this worker will have come with its data, when the step under way is made
        for line in lines:
            hello = Hello(
                number=self._number(),
                worker=worker,
                digest=digest,
                secret=line.secret,
                generation=generation,
                workers=workers,
            )
            line.send(encode(hello))
        try:
            for line in lines:
                self._answer_of(line, Done)
        except ManyhandsError:
            for line in lines:
                line.close(linger=False)
            raise

    @property
    def leads(self) -> bool:
        """Whether this worker speaks for all that these servers serve, where one must."""
        return self.worker == 0

    def bind(self, replica: Replica) -> None:
        """The replica whose gradients are pushed; its optimizer says with which settings."""
        self._replica = replica
        self._outgoing = Outgoing(self.grads, replica.tables)
        self._given = replica.arrived
        self._settings = named_numbers(replica.optimizer)
        replica.write_after(self._free)

    # One step

    def wait(self) -> None:
        """Put in place what has come; return when the parameters are as fresh as the consistency wants them."""
        if self._rule.bound is None and not self._rule.gathers:
            self._listen()
        else:
            self.settle()  # an answer comes when all is gathered and the bound allows to go on with it
        self._put_in_place()

    def _put_in_place(self) -> None:
        if self.in_place and self._versions is not None:
            self._arrived.clear()
            self._seen = self._versions.tolist()
            return
        for values, vector in self._arrived:
            self._place(values, self.params, vector)
            self._seen[values.group] = values.version
        self._arrived.clear()

    def _place(self, values: Values, target: Tensor, vector: Tensor | None) -> None:
        """What a server sent, or what it has in common memory; of a table it may be some rows."""
        group = self.groups[values.group]
        home = target[group.slice]
        if vector is not None:
            source = vector.view(target.dtype)
        elif self._common is not None and not self.in_place:
            source = self._common(values.vector)[group.slice]
        else:
            return
        if values.rows is None:
            home.copy_(source)
            return
        numbers = unpack(values.rows, group.table)
        assert group.table is not None
        rows = (
            source.view(-1, group.table.columns)
            if vector is not None
            else as_table(source, group.table)[numbers]
        )
        as_table(home, group.table)[numbers] = rows

    def held(self, share: Share) -> Share:
        """The share of a step that is to be pushed."""
        self._samples = share.samples
        self._given = self._replica.arrived
        self._settings = named_numbers(self._replica.optimizer)
        return share

    def _free(self, span: Span) -> None:
        """Before gradients of a span are written where those of the last step were: wait until these are applied.

        Servers apply groups in the order in which they come, and the next backward pass begins where the last one
        did. So it need not wait for the end of the queue.
        """
        self._await(self._group_of[span.index])

    def push(self, span: Span) -> None:
        """Send a span's gradients: for `on_ready` of a backward pass. They leave when their group is complete."""
        group = self._last_span.get(span.index)
        if group is None:
            return
        # Where neighbours add to the gradients, what is missing here may have come from them: known at the end.
        if self._clips_itself or (self.speaks_for > 1 and self._missing(group, self._given)):
            self._late.append(group)
        else:
            self._send(group, self._given)

    def give(self, gradient: Tensor, used: Tensor) -> None:
        """A step without a backward pass: push a gradient of the strategy's own, with a flag for each parameter."""
        self.settle()
        self._outgoing.become(gradient)
        given = self._given = used.tolist()
        self._samples = int(any(given))
        self._settings = named_numbers(self._replica.optimizer)
        for span in self._replica.spans:
            self.push(span)
        self.finish(given)

    def _missing(self, group: SpanGroup, arrived: Sequence[int]) -> set[int]:
        return {place for span in group.spans for place in span.places if not arrived[place]}

    def _send(self, group: SpanGroup, arrived: Sequence[int]) -> None:
        missing, seen = self._missing(group, arrived), self._seen[group.index]
        kept_back = self._kept_back.get(group.index)
        if kept_back is None:
            self._send_push(group, missing, seen, self._samples)
            return
        kept_back.add(self._outgoing.of(group) if self._samples else None, missing, seen)
        if kept_back.steps == group.every:
            self._send_mean(group, kept_back)

    def _send_mean(self, group: SpanGroup, kept_back: Deferral) -> None:
        mean = kept_back.take()
        if mean.gradient is None:
            self._send_push(group, mean.missing, mean.seen, 0)
            return
        self._outgoing.put(group, mean.gradient)
        self._send_push(group, mean.missing, mean.seen, max(1, self._samples))

    def _send_push(self, group: SpanGroup, missing: set[int], seen: int, samples: int) -> None:
        vector: Tensor | None = None
        rows: bytes | None = None
        if samples:
            vector, rows = self._outgoing.packed(group, travels=group.server not in self._near)
        push = Push(
            number=self._number(),
            group=group.index,
            step=self._steps,
            seen=seen,
            samples=samples,
            missing=tuple(sorted(missing)),
            rows=rows,
            settings=self._news(group.server),
            used=self.used,
        )
        if self._notes:
            key = round_key(self._generation, self.rounds + 1)
            self._notes.push(self.worker, group, round_key=key, samples=samples, missing=missing)
        self._await(group)  # an answer says only which group it is about
        self._unanswered.add(group.index)
        self._lines[group.server].send(encode(push), vector)
        self._pushed.add(group.server)
        telemetry.count("pushes", 1)
        self._listen()

    def _news(self, server: int) -> list[dict[str, list[float]]] | None:
        """The optimizer's settings, if this server has not heard them yet: worker 0's hold for all."""
        if not self.leads:
            return None
        if self._settings == self._told[server]:
            return None
        self._told[server] = self._settings
        return self._settings

    def finish(self, used: Sequence[int] | None = None) -> None:
        """All gradients of this step are pushed; with gathered gradients, the step ends when all have its result."""
        used = self._replica.used.tolist() if used is None else used
        if self.speaks_for > 1:
            self._samples = max(1, self._samples) if any(used) else 0  # neighbours may have had some
        if self._clips_itself:
            self._clip(used)
        for group in self._late:
            self._send(group, used)
        self._late.clear()
        self._end_step()

    def flush(self) -> bool:
        """Push what was kept back, as a step of its own: nothing is left behind at a pause. Says whether any was."""
        waiting = [group for group in self.groups if group.every > 1 and self._kept_back[group.index].steps]
        if waiting:
            self.settle()
            for group in waiting:
                self._send_mean(group, self._kept_back[group.index])
            self._end_step()
            self._flushes += self._rule.gathers
        return bool(waiting)

    def recall(self, serial: int) -> None:
        """Go on with what the worker that spoke for this host kept back, after so many steps and flushes."""
        if self._cupboard:
            self._serial = serial
            self._kept_back = self._cupboard.found(serial)

    @property
    def keeps_back(self) -> bool:
        """Whether gradients of some layers wait here for a later push."""
        return any(one.steps for one in self._kept_back.values())

    def go_on(self, rounds: int) -> None:
        """A generation begins; so many steps were made in those before."""
        self.rounds = self._rounds_before = rounds
        self.pull()

    def made(self, steps: int) -> int:
        """How many steps all servers must have applied for this worker to have made so many in this generation."""
        return self._rounds_before + self._flushes + steps

    def take_over(self, before: "Servers", *, counts: bool) -> None:
        """Go on with what this worker kept back in the generation before; `counts` is whether the step that it was
        making, if any, is not made again."""
        for index, kept_back in before._kept_back.items():
            if not counts:
                kept_back.take_back()
            kept_back.settle()
            self._kept_back[index] = kept_back

    @property
    def steps_kept(self) -> list[float]:
        """How many steps are kept back, of groups by how often they are pushed."""
        every = {group.every: self._kept_back[group.index] for group in self.groups if group.every > 1}
        return [float(every[number].steps) for number in sorted(every)]

    def keep_step(self, everyone: Sequence[Sequence[float]]) -> None:
        """Where gradients are gathered all push the same groups in a step: whoever is new waits with the others."""
        numbers = sorted({group.every for group in self.groups if group.every > 1})
        for group in self.groups:
            if group.every > 1 and self._rule.gathers:
                steps = max(row[numbers.index(group.every)] for row in everyone)
                self._kept_back[group.index].wait_for(int(steps))

    def _end_step(self) -> None:
        if self._rule.bound is not None and not self._rule.gathers:
            # Only a push is answered, and only by its answers does a server hold a worker to the bound.
            for group in self.groups:
                if group.server not in self._pushed:
                    self._send_push(group, set(), self._seen[group.index], 0)
        if self._cupboard:
            self._serial += 1
            self._cupboard.put(self._serial, self._kept_back)
        for line in self._lines:
            line.send(encode(Finish(number=self._number(), step=self._steps)))
        self._steps += 1
        self._pushed.clear()
        if self._rule.gathers:
            self.wait()
            self.rounds += 1
        elif self.roam:
            self.settle()  # what a worker takes for made is on every host that must have it
        for kept_back in self._kept_back.values():
            kept_back.settle()

    # The norm of gathered gradients is known to the servers together. They tell one of those who pushed them, who puts
    # it together while it waits. Without gathering each worker limits its own gradient, before it is pushed.

    @property
    def _clips_itself(self) -> bool:
        return self._clip_norm is not None and not self._rule.gathers

    def _clip(self, used: Sequence[int]) -> None:
        """As `clip_grad_norm_` does, in the model's order: the same bits."""
        places = zip(self._replica.layout.places, used, strict=True)
        norms = [
            torch.linalg.vector_norm(self.grads[place.start : place.stop])
            for place, arrived in reversed(list(places))
            if arrived
        ]
        if norms:
            norm = torch.linalg.vector_norm(torch.stack(norms))
            self.grads.mul_(torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0))

    def _tell_scale(self) -> None:
        """One server has told this worker, so all will."""
        assert self._clip_norm is not None
        owners = sorted({self.groups[index].server for index in self._unanswered})
        for server in owners:
            while server not in self._norms:
                self._hear(self._lines[server])
        norm = math.sqrt(sum(self._norms[server] for server in owners))
        self._norms.clear()
        factor = min(1.0, self._clip_norm / (norm + 1e-6))
        for server in owners:
            self._lines[server].send(encode(ScaleGradients(number=self._number(), factor=factor)))

    def settle(self) -> None:
        """Return when the servers have applied all that this worker has pushed."""
        for index in sorted(self._unanswered):
            self._await(self.groups[index])

    def _await(self, group: SpanGroup) -> None:
        """Return when what this worker has pushed of a group is applied."""
        if group.index in self._unanswered:
            with telemetry.timed("wait"):
                while group.index in self._unanswered:
                    if self._norms:
                        self._tell_scale()
                    self._hear(self._lines[group.server])

    # An evaluation of the loss that the workers divide among them, for an optimizer that only one of them runs

    def minimize(self, gradient: Callable[[], float]) -> float:
        """One step of the user's L-BFGS; `gradient` has all workers evaluate the loss where the parameters are now."""
        self._minimizer = self._minimizer or Minimizer(self._replica.optimizer, self, self._clip_norm)
        self.combine(BEFORE, [(PARAMS, 1.0)], [])
        return self._minimizer.minimize(gradient)

    def offer(self, portions: int) -> None:
        """Begin an evaluation of so many portions, or end the step with none; all that was asked before is done."""
        if not portions:  # no server may have the step if one of them has not changed its parameters yet
            self._ask(lambda: AskStatus(number=self._number()))
        self._ask(lambda: Offer(number=self._number(), portions=portions))

    def take(self) -> int | None:
        """The next portion; None when there is none left."""
        self._lines[0].send(encode(Take(number=self._number())))
        said = self._answer_of(self._lines[0], Portion)
        assert isinstance(said, Portion)
        return said.index

    def add(self) -> None:
        """Add this worker's gradient to that of the evaluation; returns when it is there."""
        grads = self._replica.grads
        for group in self.groups:
            message = Add(number=self._number(), group=group.index)
            self._lines[group.server].send(encode(message), grads[group.slice])
            telemetry.count("pushes", 1)
        for group in self.groups:
            self._answer_of(self._lines[group.server], Done)

    def combine(self, vector: str, terms: list[tuple[str, float]], forgotten: list[str]) -> None:
        """A vector on the servers becomes a sum of multiples of vectors."""
        for line in self._lines:
            message = Combine(number=self._number(), vector=vector, terms=terms, forgotten=forgotten)
            line.send(encode(message))

    def measure(self, kind: str, one: str, other: str) -> list[float]:
        """A number of two vectors, from every server."""
        said = self._ask(lambda: Measure(number=self._number(), kind=kind, one=one, other=other))
        return [number.value for number in said if isinstance(number, Number)]

    # What is not a step

    def meet(self) -> None:
        """Have the servers tell those of other server groups all that they have not told yet, and hear from them."""
        if self.leads:
            self._ask(lambda: Meet(number=self._number()))
        for other in self.orphaned:
            other.meet()

    def leave(self, take_part: Callable[[Share], object]) -> None:
        """Nobody need wait for this worker until all workers have paused."""
        self.flush()
        self._ask(lambda: Leave(number=self._number()))
        # What this worker still waited for, to go on, has been answered by now.
        self._listen()
        self._put_in_place()
        self._steps = 0

    def pull(self, *, whole: bool = True) -> None:
        """All parameters as the servers have them now; of tables only what is news, if not `whole`."""
        self._arrived += self._fetch("params", whole)
        self._put_in_place()
        telemetry.count("pulls", 1)

    def vector(self, name: str) -> Tensor:
        """An optimizer state as the servers have it; in common memory where all servers are here."""
        target = self._common(name) if self._common and self.in_place else torch.zeros_like(self.params)
        for values, vector in self._fetch(name):
            self._place(values, target, vector)
        return target

    def _fetch(self, name: str, whole: bool = True) -> list[tuple[Values, Tensor | None]]:
        for group in self.groups:
            message = Pull(number=self._number(), group=group.index, vector=name, whole=whole)
            self._lines[group.server].send(encode(message))
        wanted = {group.index for group in self.groups}
        found: list[tuple[Values, Tensor | None]] = []
        while wanted:
            said, vector = self._next(self._lines[self.groups[min(wanted)].server])
            late = isinstance(said, Values) and said.group in self._unanswered  # the answer to a push
            if isinstance(said, Values) and said.vector == name and said.group in wanted and not late:
                wanted.remove(said.group)
                found.append((said, vector))
            else:
                self._note(said, vector)
        return found

    def put(self, name: str, source: Tensor) -> None:
        """Give the servers a vector's values."""
        if self._common is not None:
            home = self._common(name)
            if home.data_ptr() != source.data_ptr():
                home.copy_(source)
        for group in self.groups:
            message = Put(number=self._number(), group=group.index, vector=name)
            self._lines[group.server].send(encode(message), source[group.slice])
        for group in self.groups:
            self._answer_of(self._lines[group.server], Done)

    def resolve(self) -> int:
        """At the beginning of a generation, by one worker: see to it that all servers have made the same steps.

        If any of them has applied a step, all have got all of it; and if all have got all, it may as well count.
        Returns how many steps that are.
        """
        found = self._ask(lambda: AskStatus(number=self._number()))
        standings = [said for said in found if isinstance(said, Status)]
        rounds = max(one.rounds for one in standings)
        behind = [one.rounds < rounds for one in standings]
        counts = not any(behind) and all(one.is_complete for one in standings)
        factor = min(one.factor for one in standings if one.rounds == rounds)  # of one that had nothing: 1
        for line, is_behind in zip(self._lines, behind, strict=True):
            line.send(encode(Resolve(number=self._number(), counts=counts or is_behind, factor=factor)))
        for line in self._lines:
            self._answer_of(line, Done)
        for other in self.orphaned:
            other.resolve()
        return rounds + counts

    # Servers that come and go with their hosts: at the beginning of a generation one worker sees to them

    def level(self) -> "Reconciled":
        """Every server gets what it is to have, from one that has it, and all have made the same steps.

        Where gradients are gathered, no group is more than one step ahead of another, and one that is goes back: if any
        worker was told of a step, every group has it somewhere.
        """
        holds = self._holds()
        rounds = min(self._newest(holds)) if self._rule.gathers else 0
        if rounds >= 0 and self._rule.gathers:
            self._ask(lambda: GoBack(number=self._number(), count=rounds))
            holds = self._holds()
        newest = self._newest(holds)
        lost = sum(group.length for group, most in zip(self.groups, newest, strict=True) if most < 0)
        if lost:
            return Reconciled(rounds=0, lost=lost)
        used_in = max(one.used_in for one in holds)
        used: list[dict[int, int]] = []
        for group in self.groups:
            counts = [one.counts.get(group.index, -1) for one in holds]
            source = counts.index(max(counts))
            is_newest = holds[source].used_in == used_in
            used.append(holds[source].used.get(group.index, {}) if is_newest else {})
            for target in {group.server, group.copy} - {None}:
                if target is not None and counts[target] < counts[source]:
                    self._transfer(group, source, target, holds[source])
        self._ask(lambda: Begin(number=self._number()))
        workers = {worker for row in used for worker in row}
        least = {worker: min(row.get(worker, 0) for row in used) for worker in workers}
        return Reconciled(rounds=rounds, used=least, used_in=used_in)

    def copy(self) -> None:
        """The servers have been given other values: the copies get them from the owners."""
        holds = self._holds()
        for group in self.groups:
            if group.copy is not None:
                self._transfer(group, group.server, group.copy, holds[group.server])
        self._ask(lambda: Begin(number=self._number()))

    def _holds(self) -> list[Holds]:
        return [one for one in self._ask(lambda: AskHolding(number=self._number())) if isinstance(one, Holds)]

    def _newest(self, holds: Sequence[Holds]) -> list[int]:
        """By group: the most updates that any server has of it; -1: none has it."""
        return [max(one.counts.get(group.index, -1) for one in holds) for group in self.groups]

    def _transfer(self, group: SpanGroup, source: int, target: int, held: Holds) -> None:
        self._lines[source].send(encode(AskContent(number=self._number(), group=group.index)))
        said = self._answer_of(self._lines[source], Content)
        assert isinstance(said, Content)
        message = GiveContent(
            number=self._number(),
            group=group.index,
            content=said.content,
            count=held.counts[group.index],
            used=held.used.get(group.index, {}),
            used_in=held.used_in,
        )
        self._lines[target].send(encode(message))
        self._answer_of(self._lines[target], Done)

    def drop(self) -> None:
        """Leave without goodbye: the generation is over, and another one comes."""
        if self._closed:
            return
        self._closed = True
        for line in self._lines:
            line.close(linger=False)
        for other in self.orphaned:
            other.drop()

    def states(self) -> list[bytes]:
        """What the optimizer knows besides vectors, from every server."""
        found = self._ask(lambda: AskState(number=self._number()))
        return [said.states for said in found if isinstance(said, OptimizerState)]

    def restore(self, states: bytes) -> None:
        self._ask(lambda: GiveState(number=self._number(), states=states))

    def reports(self) -> list[ServerReport]:
        return [
            said
            for said in self._ask(lambda: AskReport(number=self._number()))
            if isinstance(said, ServerReport)
        ]

    def close(self) -> None:
        """Say goodbye; the servers end when all workers have."""
        if self._closed:
            return
        self._closed = True
        for line in self._lines:
            with contextlib.suppress(PeerLost):  # nothing is wanted of it any more
                line.send(encode(WorkerBye(number=self._number())))
            line.close()
        for other in self.orphaned:
            other.close()

    # Talking

    def _number(self) -> int:
        return next(self._numbers)

    def _ask(self, question: Callable[[], Request]) -> list[Answer]:
        for line in self._lines:
            line.send(encode(question()))
        return [
            self._answer_of(line, (Done, Number, OptimizerState, Status, Holds, ServerReport))
            for line in self._lines
        ]

    def _answer_of(self, line: Connection, kind: type | tuple[type, ...]) -> Answer:
        while True:
            said, vector = self._next(line)
            if isinstance(said, kind):
                return said
            self._note(said, vector)

    def _hear(self, line: Connection) -> None:
        self._note(*self._next(line))

    def _next(self, line: Connection) -> tuple[Answer, Tensor | None]:
        found = line.take(wait=True)
        assert found is not None
        return answer(found[0]), found[1]

    def _listen(self) -> None:
        """Take what has come without waiting."""
        for line in self._lines:
            while (found := line.take(wait=False)) is not None:
                self._note(answer(found[0]), found[1])

    def _note(self, said: Answer, vector: Tensor | None) -> None:
        if isinstance(said, Applied):
            self._unanswered.discard(said.group)
        elif isinstance(said, Values):
            self._unanswered.discard(said.group)
            self._arrived.append((said, vector))
        elif isinstance(said, Norm):
            self._norms[said.server] = said.square
        elif isinstance(said, Refusal):
            raise UsageError(said.reason)
