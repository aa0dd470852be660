"""A worker's side of the servers: push gradients, pull parameters, wait."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from manyhands import telemetry
from manyhands.replica.layout import Span
from manyhands.replica.optimizer.hyper_parameters import NamedNumbers, named_numbers
from manyhands.replica.replica import Replica, Share
from manyhands.servers.protocol.messages import Done, ExchangeNow, Leave, Push, Used
from manyhands.servers.protocol.ownership import SpanGroup
from manyhands.servers.protocol.push_notes import NoNotes, PushNotes, round_key
from manyhands.servers.worker.deferral import Deferral, Deferrals
from manyhands.servers.worker.push_clipping import Unclipped
from manyhands.servers.worker.reconcile import Reconciled
from manyhands.servers.worker.server_connections import ServerConnections
from manyhands.servers.worker.shared_evaluation import SharedEvaluation
from manyhands.servers.worker.worker_vectors import OutgoingGradients, ServedParameters

_PLAIN = (float, int, bool, str, type(None))


@dataclass(frozen=True, kw_only=True)
class Speaker:
    """A worker as the servers know it."""

    number: int
    """Among the workers that these servers serve."""
    generation: int = 0
    server_groups: int = 1
    """In the run; each has workers of its own."""
    speaks_for: int = 1
    """Workers of its host whose gradients are in its own."""
    notes: PushNotes | NoNotes
    """For a new server that goes on for a dead one."""


class Servers:
    """All servers of the run, or of one server group among several, as one of their workers sees them.

    The variants below differ in when a worker waits: for nothing, for a bound, for all.
    """

    is_elastic = False
    """Whether servers come and go with their hosts."""

    def __init__(
        self,
        speaker: Speaker,
        groups: Sequence[SpanGroup],
        connections: ServerConnections,
        replica: Replica,
        parameters: ServedParameters,
        gradients: OutgoingGradients,
        deferrals: Deferrals,
        clipping: Unclipped,
    ) -> None:
        self.worker = speaker.number
        self.server_groups = speaker.server_groups
        self.groups = tuple(groups)
        self.connections = connections
        self.parameters = parameters
        self.deferrals = deferrals
        self.orphaned: Sequence[
            ServerConnections
        ] = ()  # server groups without workers: this one sees to them
        self.reconciled = Reconciled(
            rounds=0, used_in=-1
        )  # what elastic servers had as this generation began
        self.used: Used = ()  # how far this worker will have come with its data, when the step in flight is made
        self.evaluation = SharedEvaluation(connections, groups, replica, clipping.clip_norm)
        self._speaker = speaker
        self._replica = replica
        self._gradients = gradients
        self._clipping = clipping
        self._last_span = {group.spans[-1].index: group for group in groups}
        self._group_of = {span.index: group for group in groups for span in group.spans}
        self._steps = 0  # since all workers last paused
        self._pushed: set[int] = set()  # the servers to which something was pushed in this step
        self._late: list[SpanGroup] = []  # complete, and not yet pushed
        self._samples = 1  # of the step in flight
        self._given: Sequence[int] = replica.arrived  # by parameter: whether the push has a gradient of it
        self._settings: NamedNumbers = []
        self._values: list[Any] | None = None  # of the optimizer's settings, where none can change in place
        self._told: list[NamedNumbers] = [[] for _ in connections.servers]
        self._rounds = 0  # steps that were gathered from all workers and applied
        self._rounds_before = 0  # of those, in generations before this one
        self._flushes = 0  # of those, in this one, without a step of the session
        replica.write_after(self._free, connections.in_flight)

    @property
    def leads(self) -> bool:
        """Whether this worker speaks for all that these servers serve, where one must."""
        return self.worker == 0

    @property
    def params(self) -> Tensor:
        return self.parameters.vector

    @property
    def grads(self) -> Tensor:
        return self._gradients.vector

    # One step

    def wait(self) -> None:
        """Put in place what has come; return when the parameters are as fresh as the consistency wants them."""
        raise NotImplementedError

    def begin(self, share: Share) -> Share:
        """The share of a step that is to be pushed."""
        self._samples = share.samples
        self._given = self._replica.arrived
        self._read_settings()
        return share

    def _read_settings(self) -> None:
        """The optimizer's settings, which seldom change; servers hear them from worker 0."""
        groups = self._replica.optimizer.param_groups if self.leads else ()
        values = [value for group in groups for name, value in group.items() if name != "params"]
        if values != self._values:
            self._settings = named_numbers(self._replica.optimizer)
            self._values = values if all(type(value) in _PLAIN for value in values) else None

    def _free(self, span: Span) -> None:
        """Before gradients of a span are written where those of the last step were: wait until these are applied.

        Servers apply groups in the order in which they come, and the next backward pass begins where the last one
        did. So it need not wait for the end of the queue.
        """
        self.connections.wait_for(self._group_of[span.index])

    def push(self, span: Span) -> None:
        """Send a span's gradients: for `on_ready` of a backward pass. They leave when their group is complete."""
        group = self._last_span.get(span.index)
        if group is None:
            return
        # Where neighbours add to the gradients, what is missing here may have come from them: known at the end.
        if self._clipping.needs_all or (self._speaker.speaks_for > 1 and _missing(group, self._given)):
            self._late.append(group)
        else:
            self._send(group, self._given)

    def finish(self) -> None:
        """All gradients of this step are pushed; with gathered gradients, the step ends when all have its result."""
        self._finish(self._replica.used.tolist())

    def push_gradient(self, gradient: Tensor, used: Tensor) -> None:
        """A step without a backward pass: push a gradient of the strategy's own, with a flag for each parameter."""
        self.settle()
        self._gradients.load(gradient)
        self._given = used.tolist()
        self._samples = int(any(self._given))
        self._read_settings()
        for span in self._replica.spans:
            self.push(span)
        self._finish(self._given)

    def _finish(self, used: Sequence[int]) -> None:
        if self._speaker.speaks_for > 1:
            self._samples = max(1, self._samples) if any(used) else 0  # neighbours may have had some
        if self._late:
            self._clipping.clip(self.grads, used)
        for group in self._late:
            self._send(group, used)
        self._late.clear()
        self._end_step()

    def _send(self, group: SpanGroup, arrived: Sequence[int]) -> None:
        missing, seen = _missing(group, arrived), self.parameters.seen[group.index]
        deferral = self.deferrals.by_group.get(group.index)
        if deferral is None:
            self._send_push(group, missing, seen, self._samples)
            return
        deferral.add(self._gradients.of(group) if self._samples else None, missing, seen)
        if deferral.steps == group.every:
            self._send_mean(group, deferral)

    def _send_mean(self, group: SpanGroup, deferral: Deferral) -> None:
        mean = deferral.take()
        if mean.gradient is None:
            self._send_push(group, mean.missing, mean.seen, 0)
            return
        self._gradients.put(group, mean.gradient)
        self._send_push(group, mean.missing, mean.seen, max(1, self._samples))

    def _send_push(self, group: SpanGroup, missing: set[int], seen: int, samples: int) -> None:
        settings = self._news(group.server)
        vector, rows = self._gradients.packed(group) if samples else (None, None)
        push = Push(
            number=next(self.connections.numbers),
            group=group.index,
            step=self._steps,
            seen=seen,
            samples=samples,
            missing=tuple(sorted(missing)),
            rows=rows,
            settings=settings,
            used=self.used,
        )
        key = round_key(self._speaker.generation, self._rounds + 1)
        self._speaker.notes.write(self.worker, group, key=key, samples=samples, missing=missing)
        self.connections.push(group, push, vector)
        self._pushed.add(group.server)

    def _news(self, server: int) -> NamedNumbers | None:
        """The optimizer's settings, if this server has not heard them yet: worker 0's hold for all."""
        if not self.leads or self._settings == self._told[server]:
            return None
        self._told[server] = self._settings
        return self._settings

    def _end_step(self) -> None:
        if self.deferrals.groups:
            self.deferrals.end_step()
        self.connections.finish(self._steps)
        self._steps += 1
        self._pushed.clear()
        self._await_step()
        if self.deferrals.groups:
            self.deferrals.settle()

    def _await_step(self) -> None:
        """Return when the step that was just pushed counts as made."""

    def settle(self) -> None:
        """Return when the servers have applied all that this worker has pushed."""
        self.connections.settle()

    # Deferred gradients

    def flush(self) -> bool:
        """Push what was deferred, as a step of its own: nothing is left behind at a pause. Says whether any was."""
        waiting = self.deferrals.waiting
        if waiting:
            self.settle()
            for group, deferral in waiting:
                self._send_mean(group, deferral)
            self._end_step()
        return bool(waiting)

    def defers(self) -> bool:
        """Whether gradients of some layers wait here for a later push."""
        return any(one.steps for one in self.deferrals.by_group.values())

    def recall(self, serial: int) -> None:
        """Go on with what the worker that spoke for this host deferred, after so many steps and flushes."""
        self.deferrals.recall(serial)

    # What is not a step

    def pull(self, *, whole: bool = True) -> None:
        """All parameters as the servers have them now; of tables only what is news, if not `whole`."""
        self.connections.arrived += self.connections.fetch("params", whole=whole)
        self.parameters.place(self.connections.arrived)
        telemetry.count("pulls", 1)

    def vector(self, name: str) -> Tensor:
        """An optimizer state as the servers have it; in common memory where all servers are here."""
        return self.parameters.collected(name, self.connections.fetch(name))

    def put(self, name: str, source: Tensor) -> None:
        """Give the servers a vector's values."""
        self.parameters.share(name, source)
        self.connections.put(name, source)

    def meet(self) -> None:
        """Have the servers tell those of other server groups all that they have not told yet, and hear from them."""
        for connections in (self.connections, *self.orphaned) if self.leads else self.orphaned:
            connections.ask(lambda number: ExchangeNow(number=number), Done)

    def leave(self, take_part: Callable[[Share], object]) -> None:
        """No worker need wait for this one until all workers have paused."""
        self.flush()
        self.connections.ask(lambda number: Leave(number=number), Done)
        # What this worker still waited for, to go on, has been answered by now.
        self.connections.listen()
        self.parameters.place(self.connections.arrived)
        self._steps = 0

    def go_on(self, rounds: int) -> None:
        """A generation begins; so many steps were made in those before."""
        self._rounds = self._rounds_before = rounds
        self.pull()

    def made(self, steps: int) -> int:
        """How many steps all servers must have applied for this worker to have made so many in this generation."""
        return self._rounds_before + self._flushes + steps

    def take_over(self, before: "Servers", *, counts: bool) -> None:
        """Go on with what this worker deferred in the generation before; `counts` is whether the step that it was
        making, if any, is not made again."""
        self.deferrals.take_over(before.deferrals, counts=counts)

    def align(self, everyone: Sequence[Sequence[float]]) -> None:
        """All workers say how many steps they have deferred."""

    def close(self) -> None:
        """Say goodbye; the servers end when all workers have."""
        for connections in (self.connections, *self.orphaned):
            connections.close()

    def drop(self) -> None:
        """Leave without goodbye: the generation is over, and another one comes."""
        for connections in (self.connections, *self.orphaned):
            connections.drop()


class AsynchronousServers(Servers):
    """Servers apply each push as it comes, and workers wait for nothing."""

    def wait(self) -> None:
        self.connections.listen()
        self.parameters.place(self.connections.arrived)


class BoundedServers(Servers):
    """Servers apply each push as it comes, and answer one that is too far ahead when the others have caught up."""

    def wait(self) -> None:
        self.settle()
        self.parameters.place(self.connections.arrived)

    def _end_step(self) -> None:
        # Only a push is answered, and only by its answers does a server hold a worker to the bound.
        for group in self.groups:
            if group.server not in self._pushed:
                self._send_push(group, set(), self.parameters.seen[group.index], 0)
        super()._end_step()


class ConfirmedServers(AsynchronousServers):
    """Elastic servers: a step is made when it is on every host that must have it."""

    is_elastic = True

    def _await_step(self) -> None:
        self.settle()


class ConfirmedBoundedServers(BoundedServers):
    """The same with a bound."""

    is_elastic = True

    def _await_step(self) -> None:
        self.settle()


class GatheredServers(Servers):
    """Servers put the gradients of all workers together; a step ends when every worker has its result."""

    def wait(self) -> None:
        self.settle()
        self.parameters.place(self.connections.arrived)

    def _await_step(self) -> None:
        self.wait()
        self._rounds += 1

    def flush(self) -> bool:
        has_flushed = super().flush()
        self._flushes += has_flushed
        return has_flushed

    def align(self, everyone: Sequence[Sequence[float]]) -> None:
        self.deferrals.align(everyone)


class ElasticGatheredServers(GatheredServers):
    """The same where servers come and go."""

    is_elastic = True


def _missing(group: SpanGroup, arrived: Sequence[int]) -> set[int]:
    return {place for place in group.places if not arrived[place]}
