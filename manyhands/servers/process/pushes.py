"""Gradients that workers push: the server gathers them as the consistency wants, makes updates, and answers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from manyhands.servers.process.group_update import GradientReader, GroupUpdate, PushedGradient
from manyhands.servers.process.handlers import Handler, Handlers, Reply, Sender
from manyhands.servers.process.norm_gate import Gate
from manyhands.servers.process.owned_groups import OwnedGroups
from manyhands.servers.process.shard import Shard
from manyhands.servers.protocol.consistency import Clocks, Due, OutOfTurn
from manyhands.servers.protocol.messages import (
    Applied,
    Done,
    Finish,
    Forwarded,
    Leave,
    Push,
    ScaleGradients,
)
from manyhands.servers.protocol.rows import unpack


@dataclass(frozen=True)
class _Unanswered:
    """A push that is applied, and whose answer has to wait."""

    worker: int
    group: int
    step: float  # how many the worker will have made
    sent: int  # updates of the group that its backup must have made by then


class Pushes:
    """The pushes of one generation of workers, on one server."""

    def __init__(
        self, shard: Shard, groups: OwnedGroups, clocks: Clocks, reader: GradientReader, gate: Gate
    ) -> None:
        self.clocks = clocks
        self.gate = gate
        self._shard = shard
        self._groups = groups
        self._reader = reader
        self._gradients: dict[tuple[int, int], PushedGradient] = {}  # by worker and group, not yet due
        self._unanswered: list[_Unanswered] = []
        self.handlers: Handlers = {
            Push: Handler(self._push, self._push_bytes),
            Finish: Handler(self._finish),
            Leave: Handler(self._leave),
            ScaleGradients: Handler(self._scale),
            Forwarded: Handler(self._confirm, sender=Sender.BACKUP),
        }

    def regroup(self, clocks: Clocks) -> None:
        """Workers of a new generation come; no worker waits for an answer any more."""
        self.clocks = clocks
        self._unanswered.clear()

    def clear(self) -> None:
        """No gradient of the generation before counts any more."""
        self._gradients.clear()
        self._unanswered.clear()

    def updates_of(self, due: Sequence[Due], clocks: Clocks) -> list[GroupUpdate]:
        return [
            GroupUpdate(
                self._groups.by_index[one.group],
                one.workers,
                [self._gradients.pop((worker, one.group)) for worker in one.workers],
                clocks,
            )
            for one in due
        ]

    # Handlers

    def _push_bytes(self, push: Push) -> int | None:
        group = self._groups.by_index.get(push.group)
        if group is None:
            return None
        length = group.length if push.samples else 0
        if push.samples and push.rows is not None:
            numbers = unpack(push.rows, group.table)
            length = len(numbers) * group.table.columns if group.table else 0
        return length * self._groups.dtype.itemsize

    def _push(self, worker: int, push: Push, payload: Tensor | None) -> Iterator[Reply]:
        if push.settings and worker:
            raise OutOfTurn(f"worker {worker} sends the optimizer's settings, and only worker 0 may")
        version = self._groups.version(push.group)
        if not 0 <= push.seen <= version:
            raise OutOfTurn(f"worker {worker} saw version {push.seen} of {version} of group {push.group}")
        due = self.clocks.push(worker, push.step, push.group)
        if push.settings:
            self._shard.set_optimizer(push.settings)
        self._gradients[worker, push.group] = self._reader.gradient(worker, push, payload)
        yield from self._make_due(due)

    def _finish(self, worker: int, message: Finish, payload: Tensor | None) -> Iterator[Reply]:
        yield from self._make_due(self.clocks.finish(worker, message.step))
        yield from self.gate.norms(self.clocks, worker)

    def _leave(self, worker: int, message: Leave, payload: Tensor | None) -> Iterator[Reply]:
        yield from self._make_due(self.clocks.leave(worker))
        yield from self.gate.norms(self.clocks, worker)
        # A worker that has left does not go on with what it reads, so that need not be fresh.
        self._unanswered = [
            replace(one, step=-math.inf) if one.worker == worker else one for one in self._unanswered
        ]
        yield from self._answer()
        yield worker, Done(number=message.number), None

    def _scale(self, worker: int, message: ScaleGradients, payload: Tensor | None) -> Iterator[Reply]:
        """The workers know the norm over all servers: the server applies the gradients of this worker's team."""
        self._make(self.gate.release(self.clocks.team(worker)), message.factor)
        yield from self._answer()

    def _confirm(self, server: int, message: Forwarded, payload: Tensor | None) -> Iterator[Reply]:
        self._shard.confirm(message.group)
        yield from self._answer()

    def _make_due(self, due: Sequence[Due]) -> Iterator[Reply]:
        updates = self.gate.admit(self.updates_of(due, self.clocks))
        if updates is not None:
            self._make(updates)
        yield from self._answer()

    def _make(self, updates: Sequence[GroupUpdate], factor: float = 1.0) -> None:
        self._shard.make(updates, factor, self.clocks.rounds)
        for update in updates:
            index, sent = update.group.index, self._shard.sent(update.group.index)
            for worker, gradient in zip(update.workers, update.gradients, strict=True):
                self._unanswered.append(_Unanswered(worker, index, gradient.push.step + 1, sent))

    def _answer(self) -> Iterator[Reply]:
        """Send updates to backups, answer the workers whose parameters are fresh enough by now, then tell peers."""
        yield from self._shard.forwards()  # before the answers: other workers wait until a backup has made them
        still = []
        for one in self._unanswered:
            if self._shard.is_backed_up(one.group, one.sent) and self.clocks.may_read(one.step):
                yield self._fresh(one.worker, one.group)
            else:
                still.append(one)
        self._unanswered = still
        yield from self._shard.peer_messages()

    def _fresh(self, worker: int, group: int) -> Reply:
        if self.clocks.fetches:
            return worker, Applied(group=group), None
        return self._groups.values(worker, group)
