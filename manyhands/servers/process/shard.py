"""The groups that one server owns: their values, the optimizer that changes them, and who is told when.

No sockets here: messages go in, answers come out, each with the vector that belongs to it.
"""

import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands import telemetry
from manyhands.replica.layout import Place, Span
from manyhands.replica.optimizer.abilities import is_element_wise
from manyhands.replica.optimizer.hyper_parameters import named_numbers, set_named_numbers
from manyhands.replica.optimizer.updates import Updates
from manyhands.replica.state import packing
from manyhands.servers.process.backup import Backup
from manyhands.servers.process.exchange import Exchange, Reply
from manyhands.servers.process.vectors import Vectors
from manyhands.servers.process.write_ahead_log import WriteAheadLog
from manyhands.servers.protocol.consistency import Clocks, Due, OutOfTurn
from manyhands.servers.protocol.messages import (
    BEFORE,
    GRADIENT,
    Add,
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
    Forward,
    Forwarded,
    Gain,
    GiveContent,
    GiveState,
    GoBack,
    Holds,
    Leave,
    Level,
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
    Request,
    Resolve,
    ScaleGradients,
    ServerReport,
    Status,
    Take,
    Values,
    states,
)
from manyhands.servers.protocol.ownership import SpanGroup
from manyhands.servers.protocol.push_notes import round_key
from manyhands.servers.protocol.rows import News, as_table, gradient_of, pack, touched, unpack

_REMEMBERED = 4096  # updates of a group whose authors are known


@dataclass(frozen=True)
class _Unanswered:
    """A push that is applied, and whose answer has to wait."""

    worker: int
    group: int
    step: float  # how many the worker will have made
    forwarded: int  # updates of the group that the server with the copy must have made by then


@dataclass(frozen=True)
class _Gradient:
    """A push that waits to be applied: a group's vector, or rows of a table; None if there is nothing to add."""

    push: Push
    vector: Tensor | None


class _Update:
    """An update of a group: the gradients of some workers, of which some may be empty."""

    def __init__(
        self, group: SpanGroup, workers: tuple[int, ...], gradients: Sequence[_Gradient], *, weighs: bool
    ) -> None:
        self.group = group
        self.workers = workers
        self.gradients = gradients
        full = [gradient for gradient in gradients if gradient.vector is not None]
        # A parameter that got no gradient from anyone is not updated.
        missing = [frozenset(gradient.push.missing) for gradient in full]
        self.skipped: frozenset[int] = frozenset.intersection(*missing) if missing else frozenset()
        self.given = [gradient.vector for gradient in full if gradient.vector is not None]
        samples = [gradient.push.samples for gradient in full]
        self.weights = [own / sum(samples) if weighs else 1.0 for own in samples]

    def parts(self, span: Span) -> list[Tensor]:
        if self.group.table:
            return self.given  # a block of a table is one span
        inside = slice(span.start - self.group.start, span.stop - self.group.start)
        return [vector[inside] for vector in self.given]


class Shard:
    """Applies what workers push, in the order that the rules give, and answers."""

    def __init__(
        self,
        server: int,
        groups: Sequence[SpanGroup],
        places: Sequence[Place],
        optimizer: Optimizer,
        updates: Updates,
        params: Tensor,
        clocks: Clocks,
        *,
        versions: Tensor,
        near_grads: Callable[[int], Tensor],
        awaits_scale: bool = False,
        copies: Collection[int] = (),
        exchange: Exchange | None = None,
        diary: WriteAheadLog | None = None,
        holding: Backup | None = None,
        copier: Callable[[int], int] = lambda server: server,
        before: "Shard | None" = None,
    ) -> None:
        self._server = server
        self._holding = holding  # where servers come and go, and others have copies of what this one owns
        self._copier = copier  # by which number another server is known to whom updates are forwarded
        self._copied = {group.index: group for group in groups if group.copy == server}
        self._numbers = itertools.count(2)  # of what is said to other servers, after a greeting
        self._outbox: list[Reply] = []
        self._forwarded: Counter[int] = Counter()  # by group, updates
        self._arrived: Counter[int] = Counter()  # of those, the ones that the copy has
        self._diary = diary  # for a server that has to take over from this one
        self._generation = self._generation_before = 0  # of the workers
        self._groups = {group.index: group for group in groups if group.server == server}
        self._places = places
        self._optimizer = optimizer
        self._updates = updates
        self._vectors: Mapping[str, Tensor] = {"params": params, **updates.vectors}
        self._algebra = Vectors(
            {group.index: params[group.slice] for group in self._groups.values()},
            {group.index: diary.before[group.slice] for group in self._groups.values()} if diary else None,
        )
        self._portions = iter(range(0))
        self._clocks = clocks
        self._versions = versions.numpy()
        self._near_grads = near_grads
        self._gradients: dict[tuple[int, int], _Gradient] = {}  # by worker and group
        self._news = News(copies)  # for workers that do not compute on the very memory that is updated here
        self._awaits_scale = awaits_scale  # gathered gradients are limited by the norm over all servers
        self._exchange = exchange  # where there are several server groups
        self._held: defaultdict[int, list[_Update]] = defaultdict(list)  # by team
        self._unanswered: list[_Unanswered] = []
        self._authors: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        longest = max((span.stop - span.start for g in self._groups.values() for span in g.spans), default=0)
        self._sum = torch.empty(longest, dtype=params.dtype)
        # Of the same server in the generation before, where it has one of these for each.
        self._staleness: Counter[int] = before._staleness if before else Counter()
        self._leads: Counter[int] = before._leads if before else Counter()
        self._staleness_told: Counter[int] = before._staleness_told if before else Counter()
        self._leads_told: Counter[int] = before._leads_told if before else Counter()
        self._count: int = before._count if before else 0
        self._before: Clocks | None = (
            None  # of a generation that is over, until it is known what of it counts
        )
        self._begun_held: list[_Update] = []  # of that, complete, and waiting for the norm over all servers
        self._factor = 1.0  # of the last gradients that were limited

    def take_over(self) -> None:
        """Go on where another server died: put right what it was changing, and finish what it had begun."""
        diary = self._diary
        assert diary is not None
        if self._exchange:
            self._exchange.take_over()
        diary.take_over(self._updates)
        self._updates.take_from_others(span for group in self._groups.values() for span in group.spans)
        self._clocks.rounds, self._generation = diary.rounds, diary.generation
        self._factor = diary.factor
        if diary.keeps_before:
            self._algebra.recall(BEFORE)
        if diary.planned is None:
            return
        rounds, group, workers = diary.planned
        if group < 0 and not self._clocks.rule.weighs:
            updates = self._noted(self._generation, rounds)
        else:  # none of them has pushed anything since
            groups = [self._groups[group]] if group >= 0 else list(self._groups.values())
            updates = [
                self._update_of(one, [(worker, diary.notes.last(worker, one)) for worker in workers])
                for one in groups
            ]
        for update in updates:
            self._apply(update, diary.factor)
        self._clocks.rounds = rounds
        diary.finish(rounds)
        self._unanswered.clear()

    def _noted(self, generation: int, rounds: int) -> list[_Update]:
        """The updates of a round, as its workers have noted them."""
        assert self._diary is not None
        key = round_key(generation, rounds)
        found = [(group, list(self._diary.notes.pushes(group, key))) for group in self._groups.values()]
        return [self._update_of(group, pushes) for group, pushes in found if pushes]

    def _update_of(self, group: SpanGroup, pushes: Sequence[tuple[int, Push]]) -> _Update:
        gradients = [
            _Gradient(push, self._pushed(worker, push, None) if push.samples else None)
            for worker, push in pushes
        ]
        workers = tuple(worker for worker, _ in pushes)
        return _Update(group, workers, gradients, weighs=self._clocks.rule.weighs)

    def regroup(self, workers: Sequence[int], generation: int) -> None:
        """Other workers come; what those before had gathered waits until it is known whether it counts."""
        if self._before is None:
            self._before = self._clocks
            self._generation_before = self._generation
            if self._held:
                self._clocks.rounds -= 1  # gathered, but not applied
                self._begun_held = [update for held in self._held.values() for update in held]
                self._held.clear()
        self._unanswered.clear()
        self._news = News(workers if self._news.workers else ())
        self._clocks = self._clocks.regrouped(workers)
        self._generation = generation
        if self._diary:
            self._diary.generation = generation
        if self._exchange:
            self._exchange.regroup()

    def reunite(self, guest: int) -> Iterator[Reply]:
        """A server of another server group is there."""
        if self._exchange:
            yield from self._exchange.reunite(guest)

    def _standing(self) -> Status:
        if self._clocks.rule.teams * self._clocks.rule.server_groups > 1:
            return Status(rounds=0, is_complete=False)  # teams know nothing of each other's steps
        begun = self._before.begun() if self._before else []
        # What waits for a norm that nobody has put together yet is made again.
        complete = bool(begun) and len(begun) == len(self._groups) and not self._awaits_scale
        complete = complete and all(self._before and due.workers == self._before.workers for due in begun)
        return Status(rounds=self._clocks.rounds, is_complete=complete, factor=self._factor)

    def _resolve(self, counts: bool, factor: float) -> None:
        before, self._before = self._before, None
        held, self._begun_held = self._begun_held, []
        begun = before.begun() if before else []
        if before and counts:
            now, self._clocks = self._clocks, before  # it is the work of those workers
            before.rounds += 1
            if not held and (begun or not self._diary):
                held = self._updates_of(begun)
            elif not held:
                held = self._noted(self._generation_before, before.rounds)
            self._perform(held, factor)
            self._clocks = now
            self._clocks.rounds += 1
        self._gradients.clear()
        self._unanswered.clear()
        self._algebra.begin_anew(takes_back=not counts)

    @property
    def dtype(self) -> torch.dtype:
        return self._sum.dtype

    def expects(self, message: Request) -> int | None:
        """How many bytes must come with a message that travels over the network; None: it is not for us."""
        if isinstance(message, Forward):
            copied = self._copied.get(message.group)
            return None if copied is None else copied.length * self.dtype.itemsize * message.is_given
        if isinstance(message, (Push, Put, Pull, Add, Gain, Level)):
            group = self._groups.get(message.group)
            if group is None or getattr(message, "vector", "params") not in self._vectors:
                return None
            if isinstance(message, Pull) or not getattr(message, "samples", 1):
                return 0
            length = group.length
            if isinstance(message, Push) and message.rows is not None:
                numbers = unpack(message.rows, group.table)
                length = len(numbers) * group.table.columns if group.table else 0
            return length * self.dtype.itemsize
        return 0

    def handle(self, worker: int, message: Request, payload: Tensor | None) -> Iterator[Reply]:
        """Deal with a message; `payload` is its vector, None where that lies in common memory."""
        if worker and (
            isinstance(message, (Put, GiveState, GiveContent, GoBack, Begin))
            or (isinstance(message, Push) and message.settings)
        ):
            raise OutOfTurn(f"worker {worker} says what is worker 0's to say")
        if isinstance(message, Push):
            yield from self._push(worker, message, payload)
        elif isinstance(message, Finish):
            yield from self._apply_all(self._clocks.finish(worker, message.step))
            yield from self._tell_norm(worker)
        elif isinstance(message, ScaleGradients):
            yield from self._scale(self._clocks.team(worker), message.factor)
        elif isinstance(message, Leave):
            yield from self._apply_all(self._clocks.leave(worker))
            yield from self._tell_norm(worker)
            yield from self._answer_all(worker)
            yield worker, Done(number=message.number), None
        elif isinstance(message, Pull):
            yield self._values(worker, self._groups[message.group], message.vector, whole=message.whole)
        elif isinstance(message, Put):
            if payload is not None:
                self._vectors[message.vector][self._groups[message.group].slice] = payload
            self._news.note(message.group, None)
            if self._holding:
                self._holding.begin(message.group)
            if self._exchange and message.vector == "params":
                self._exchange.begin(message.group)
            yield worker, Done(number=message.number), None
        elif isinstance(message, (Offer, Take, Add, Combine, Measure)):
            yield from self._evaluate(worker, message, payload)
        elif isinstance(message, (Forward, Forwarded, AskHolding, GoBack, AskContent, GiveContent, Begin)):
            yield from self._hold(worker, message, payload)
        elif isinstance(message, (Gain, Level, Meet)):
            if self._exchange is None:
                raise OutOfTurn("there are no other server groups")
            yield from self._exchange.handle(worker, message, payload)
            if not isinstance(message, Meet):
                self._news.note(message.group, None)
        elif isinstance(message, AskState):
            spans = [span for group in self._groups.values() for span in group.spans]
            yield worker, OptimizerState(states=packing.pack(self._updates.export(spans))), None
        elif isinstance(message, GiveState):
            spans = [span for group in self._groups.values() for span in group.spans]
            self._updates.restore(spans, states(message.states))
            yield worker, Done(number=message.number), None
        elif isinstance(message, AskStatus):
            yield worker, self._standing(), None
        elif isinstance(message, Resolve):
            self._resolve(message.counts, message.factor)
            yield worker, Done(number=message.number), None
        elif isinstance(message, AskReport):
            yield worker, self.report(), None

    def _hold(
        self,
        worker: int,
        message: Forward | Forwarded | AskHolding | GoBack | AskContent | GiveContent | Begin,
        payload: Tensor | None,
    ) -> Iterator[Reply]:
        """What servers have of each other's groups."""
        holding = self._holding
        if holding is None:
            raise OutOfTurn("servers of this run have no copies")
        if isinstance(message, Forward):
            if message.group not in holding.counts:
                raise OutOfTurn(f"group {message.group} has not been given to this server")
            gradient = payload if message.is_given else None
            skipped = frozenset(message.skipped)
            holding.apply_as(message.settings, message.group, gradient, skipped, message.used)
            yield worker, Forwarded(number=next(self._numbers), group=message.group), None
        elif isinstance(message, Forwarded):
            self._arrived[message.group] += 1
            yield from self._answer()
        elif isinstance(message, AskHolding):
            yield worker, Holds(counts=holding.counts, used=holding.used, used_in=holding.used_in), None
        elif isinstance(message, AskContent):
            if message.group not in holding.counts:
                raise OutOfTurn(f"group {message.group} is not here")
            yield worker, Content(content=holding.content(message.group)), None
        else:
            if isinstance(message, GoBack):
                holding.go_back(message.count)
            elif isinstance(message, Begin):
                holding.keep(self._groups.keys() | self._copied.keys())
            else:
                holding.take(message.group, message.content, message.count, message.used, message.used_in)
            yield worker, Done(number=message.number), None

    def _evaluate(
        self, worker: int, message: Offer | Take | Add | Combine | Measure, payload: Tensor | None
    ) -> Iterator[Reply]:
        """Work for an optimizer that runs elsewhere, and whose vectors are here."""
        if isinstance(message, Take):
            yield worker, Portion(index=next(self._portions, None)), None
        elif isinstance(message, Combine):
            self._algebra.forget(message.forgotten)
            self._algebra.combine(message.vector, message.terms)
            if self._diary and message.vector == BEFORE:
                self._diary.note_before()
        elif isinstance(message, Measure):
            value = self._algebra.measure(message.kind, message.one, message.other)
            yield worker, Number(value=value), None
        else:
            if isinstance(message, Offer):
                self._portions = iter(range(message.portions))
                self._algebra.combine(GRADIENT, [])
                if not message.portions:
                    self._algebra.forget([BEFORE])
                    self._clocks.rounds += 1
                    if self._diary:
                        self._diary.rounds = self._clocks.rounds
            else:
                self._algebra.add(message.group, self._sent(worker, self._groups[message.group], payload))
            yield worker, Done(number=message.number), None

    def _push(self, worker: int, push: Push, payload: Tensor | None) -> Iterator[Reply]:
        version = int(self._versions[push.group])
        if not 0 <= push.seen <= version:
            raise OutOfTurn(f"worker {worker} saw version {push.seen} of {version} of group {push.group}")
        due = self._clocks.push(worker, push.step, push.group)
        if push.settings:
            set_named_numbers(self._optimizer, push.settings)
            if self._diary:
                self._diary.note_settings()
        vector = self._pushed(worker, push, payload) if push.samples else None
        self._gradients[worker, push.group] = _Gradient(push, vector)
        yield from self._apply_all(due)

    def _sent(self, worker: int, group: SpanGroup, payload: Tensor | None) -> Tensor:
        """What came with a message, or lies in common memory."""
        return self._near_grads(worker)[group.slice] if payload is None else payload

    def _pushed(self, worker: int, push: Push, payload: Tensor | None) -> Tensor:
        """The gradient of a push; of a table, its rows."""
        group = self._groups[push.group]
        vector, table = self._sent(worker, group, payload), group.table
        if table is None:
            return vector
        if push.rows is None:
            numbers = touched(vector, table)
        else:
            numbers = unpack(push.rows, table)
            if payload is not None:
                return gradient_of(numbers, payload.view(-1, table.columns), table)
        return gradient_of(numbers, as_table(vector, table)[numbers], table)

    def _apply_all(self, due: Sequence[Due]) -> Iterator[Reply]:
        updates = self._updates_of(due)
        if self._awaits_scale:
            for update in updates:
                self._held[self._clocks.team(update.workers[0])].append(update)
        if not self._held:  # else the step is not made before it is known by what to multiply
            self._perform(updates)
        yield from self._answer()

    def _updates_of(self, due: Sequence[Due]) -> list[_Update]:
        return [
            _Update(
                self._groups[one.group],
                one.workers,
                [self._gradients.pop((worker, one.group)) for worker in one.workers],
                weighs=self._clocks.rule.weighs,
            )
            for one in due
        ]

    def _perform(self, updates: Sequence[_Update], factor: float = 1.0) -> None:
        """Apply what has come: all groups of a round, or one worker's push of one group."""
        diary, rounds = self._diary, self._clocks.rounds
        self._factor = factor
        if diary and not updates:
            diary.pass_over(rounds)
        elif diary:
            group = -1 if self._clocks.rule.gathers else updates[0].group.index
            diary.plan(rounds=rounds, workers=updates[0].workers, group=group, factor=factor)
        for update in updates:
            self._apply(update, factor)
        if diary and updates:
            diary.finish(rounds)

    def _tell_norm(self, worker: int) -> Iterator[Reply]:
        """When a team's step has ended, its held gradients are complete: the first of those who pushed them puts the
        norm over all servers together."""
        team = self._clocks.team(worker)
        held = self._held.get(team)
        if held and self._clocks.is_between_steps(team):
            square = sum(self._square(update) for update in held)
            yield held[0].workers[0], Norm(server=self._server, square=square), None

    def _scale(self, team: int, factor: float) -> Iterator[Reply]:
        """The norm over all servers is known: now the gathered gradients of this team can be applied."""
        self._perform(self._held.pop(team, []), factor)
        yield from self._answer()

    def _square(self, update: "_Update") -> float:
        """The square of the norm of an update's gradients together, without those of parameters that got none."""
        square = 0.0
        for span in update.group.spans if update.given else ():
            total = self._added(update, span)
            for index in set(span.places) - update.skipped:
                place = self._places[index]
                start, stop = max(place.start, span.start), min(place.stop, span.stop)
                part = total.values() if total.is_sparse else total[start - span.start : stop - span.start]
                square += float(torch.linalg.vector_norm(part)) ** 2
        return square

    def _answer(self) -> Iterator[Reply]:
        """Tell those who wait for parameters that are fresh enough by now."""
        outbox, self._outbox = self._outbox, []
        yield from outbox
        still = []
        for one in self._unanswered:
            if self._arrived[one.group] >= one.forwarded and self._clocks.may_read(one.step):
                yield self._fresh(one.worker, one.group)
            else:
                still.append(one)
        self._unanswered = still
        if self._exchange:
            yield from self._exchange.messages()

    def _answer_all(self, worker: int) -> Iterator[Reply]:
        """A worker that has left does not go on with what it reads, so it need not be fresh."""
        self._unanswered = [
            replace(one, step=-math.inf) if one.worker == worker else one for one in self._unanswered
        ]
        yield from self._answer()

    def _apply(self, update: "_Update", factor: float = 1.0) -> None:
        """One update of a group by its gradients together, times `factor`."""
        if self._holding:
            with telemetry.timed("update"):
                self._apply_and_forward(self._holding, update, factor)
            if update.given:
                self._note(update)
        elif update.given:
            with telemetry.timed("update"):
                for span in update.group.spans:
                    if self._diary and self._diary.has(span):
                        continue  # a server that died had come as far
                    total = self._scaled(self._added(update, span), factor)
                    if self._diary and self._clocks.rule.gathers:
                        self._diary.update(self._updates, span, total, update.skipped)
                    else:
                        # Without gathering, workers read spans while they change: a half of an update is nothing new.
                        if self._diary:
                            self._diary.note(span)
                        self._updates.apply(span, total, update.skipped)
                    if total.is_sparse:
                        only = self._updates.keeps_to_rows(self._places[span.places[0]].group)
                        self._news.note(update.group.index, total.indices()[0] if only else None)
            self._note(update)
            if self._exchange:
                self._exchange.note(update.group.index)
        for worker, gradient in zip(update.workers, update.gradients, strict=True):
            index = update.group.index
            step, forwarded = gradient.push.step + 1, self._forwarded[index]
            self._unanswered.append(_Unanswered(worker, index, step, forwarded))

    def _apply_and_forward(self, holding: Backup, update: "_Update", factor: float) -> None:
        """Here, and where the copy is: the same gradient, with the same settings."""
        group, gradient = update.group, None
        if update.given:
            gradient = torch.empty(group.length, dtype=self.dtype)
            for span in group.spans:
                inside = slice(span.start - group.start, span.stop - group.start)
                gradient[inside] = self._scaled(self._added(update, span), factor)
        # An optimizer of the user's own may change the gradient that it is given.
        sent = gradient if gradient is None or is_element_wise(self._optimizer) else gradient.clone()
        used = {w: one.push.used for w, one in zip(update.workers, update.gradients, strict=True)}
        holding.apply(group.index, gradient, update.skipped, used)
        if group.copy is not None:
            message = Forward(
                number=next(self._numbers),
                group=group.index,
                is_given=gradient is not None,
                skipped=tuple(sorted(update.skipped)),
                settings=named_numbers(self._optimizer),
                used=used,
            )
            self._forwarded[group.index] += 1
            self._outbox.append((self._copier(group.copy), message, sent))

    def _added(self, update: "_Update", span: Span) -> Tensor:
        """The weighted sum in the order of the workers, made where it fits a cache."""
        first, *others = update.parts(span)
        unit, *weights = update.weights
        if not others:
            return first  # alone, so its weight is 1
        if first.is_sparse:
            total = first if unit == 1.0 else first * unit
            for part, weight in zip(others, weights, strict=True):
                total = torch.add(total, part, alpha=weight)
            return total.coalesce()
        total = torch.add(first, others[0], alpha=weights[0] / unit, out=self._sum[: len(first)])
        for part, weight in zip(others[1:], weights[1:], strict=True):
            total.add_(part, alpha=weight / unit)
        return total if unit == 1.0 else total.mul_(unit)

    def _scaled(self, total: Tensor, factor: float) -> Tensor:
        """Not where the workers have it: another server may have to do it again."""
        if factor == 1.0 or total.is_sparse:
            return total if factor == 1.0 else total * factor
        return torch.mul(total, factor, out=self._sum[: len(total)])

    def _note(self, update: "_Update") -> None:
        """Count the update, and how stale the gradients were on which it rests."""
        group, workers = update.group, update.workers
        version = int(self._versions[group.index])
        authors = self._authors[group.index]
        for worker, gradient in zip(workers, update.gradients, strict=True):
            since = min(version - gradient.push.seen, len(authors))
            others = sum(authors[-1 - back] != self._clocks.team(worker) for back in range(since))
            self._staleness[others] += 1
            self._leads[self._clocks.lead(worker)] += 1
        authors.append(self._clocks.team(workers[0]))
        self._versions[group.index] = version + 1
        self._count += 1

    def _fresh(self, worker: int, group: int) -> Reply:
        """The answer to a push that was applied."""
        if self._clocks.fetches:
            return worker, Applied(group=group), None
        return self._values(worker, self._groups[group], "params", whole=False)

    def _values(self, worker: int, group: SpanGroup, name: str, *, whole: bool) -> Reply:
        """A group of a vector; if not `whole`, of a table of parameters only the rows that are news to the worker."""
        version = int(self._versions[group.index])
        vector = self._vectors[name][group.slice]
        if group.table and name == "params":
            numbers = self._news.tell(worker, group.index, group.table)
            if numbers is not None and not whole:
                values = Values(group=group.index, version=version, rows=pack(numbers))
                return worker, values, as_table(vector, group.table)[numbers].view(-1)
        return worker, Values(group=group.index, version=version, vector=name), vector

    def news(self) -> dict[str, Any]:
        """What was counted since the last time, for the records; empty if nothing was."""
        staleness, self._staleness_told = self._staleness - self._staleness_told, self._staleness.copy()
        leads, self._leads_told = self._leads - self._leads_told, self._leads.copy()
        return {"staleness": dict(staleness), "leads": dict(leads)} if staleness else {}

    def report(self) -> ServerReport:
        totals = telemetry.totals()
        return ServerReport(
            updates=self._count,
            staleness=dict(self._staleness),
            leads=dict(self._leads),
            dropped=int(totals.get("frames_dropped", 0)),
            bytes_sent=int(totals.get("bytes_sent", 0)),
            bytes_received=int(totals.get("bytes_received", 0)),
        )
