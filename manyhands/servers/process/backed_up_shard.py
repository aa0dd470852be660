"""A shard whose updates a server on another host makes too, before workers are told of them.

Primary and backup (Alsberg & Day 1976): the owner of a group applies an update, sends the same gradient and the same
settings to the backup, and answers the workers when the backup has applied it as well.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.replica.optimizer.abilities import is_element_wise
from manyhands.replica.optimizer.hyper_parameters import named_numbers
from manyhands.servers.process.backup import Backup
from manyhands.servers.process.group_update import GroupUpdate
from manyhands.servers.process.handlers import Handler, Reply, Sender
from manyhands.servers.process.shard import PlainShard, WrappedShard
from manyhands.servers.protocol.consistency import OutOfTurn
from manyhands.servers.protocol.messages import (
    AskBackup,
    AskContent,
    BackedUp,
    Begin,
    Content,
    Done,
    Forward,
    Forwarded,
    GiveContent,
    GoBack,
)
from manyhands.servers.protocol.ownership import SpanGroup


class BackedUpShard(WrappedShard):
    """A plain shard that sends its updates to backups; `copied` are the groups for which this server is the backup.

    `number_of` gives the number under which this server reaches another one.
    """

    def __init__(
        self,
        plain: PlainShard,
        backup: Backup,
        copied: Iterable[SpanGroup],
        number_of: Callable[[int], int],
    ) -> None:
        super().__init__(plain)
        self._plain = plain
        self._backup = backup
        self._copied = {group.index: group for group in copied}
        self._number_of = number_of
        self._may_change_gradients = not is_element_wise(plain.optimizer)  # an optimizer of the user's own
        self._numbers = itertools.count(2)  # of messages to other servers, after a greeting
        self._outbox: list[Reply] = []
        self._sent: Counter[int] = Counter()  # by group, updates
        self._confirmed: Counter[int] = Counter()  # of those, the ones that the backup has made
        self.handlers = {
            **self._and_then_put(lambda put: backup.begin(put.group)),
            Forward: Handler(self._forward, self._forward_bytes, Sender.BACKUP),
            AskBackup: Handler(self._holds),
            AskContent: Handler(self._content),
            GiveContent: Handler(self._take, sender=Sender.FIRST_WORKER),
            GoBack: Handler(self._go_back, sender=Sender.FIRST_WORKER),
            Begin: Handler(self._begin, sender=Sender.FIRST_WORKER),
        }

    def make(self, updates: Sequence[GroupUpdate], factor: float, rounds: int) -> None:
        self._plain.set_factor(factor)
        for update in updates:
            with telemetry.timed("update"):
                self._make(update, factor)
            if update.given:
                self._plain.count(update)

    def _make(self, update: GroupUpdate, factor: float) -> None:
        """Here and on the backup: the same gradient, with the same settings."""
        group, optimizer = update.group, self._plain.optimizer
        gradient = self._whole(update, factor) if update.given else None
        sent = gradient if gradient is None or not self._may_change_gradients else gradient.clone()
        used = {w: one.push.used for w, one in zip(update.workers, update.gradients, strict=True)}
        self._backup.apply(group.index, gradient, update.skipped, used)
        if group.copy is not None:
            message = Forward(
                number=next(self._numbers),
                group=group.index,
                is_given=gradient is not None,
                skipped=tuple(sorted(update.skipped)),
                settings=named_numbers(optimizer),
                used=used,
            )
            self._sent[group.index] += 1
            self._outbox.append((self._number_of(group.copy), message, sent))

    def _whole(self, update: GroupUpdate, factor: float) -> Tensor:
        group = update.group
        gradient = torch.empty(group.length, dtype=self._plain.groups.dtype)
        for span in group.spans:
            inside = slice(span.start - group.start, span.stop - group.start)
            gradient[inside] = self._plain.sum.of(update, span, factor)
        return gradient

    def forwards(self) -> Iterator[Reply]:
        outbox, self._outbox = self._outbox, []
        yield from outbox

    def sent(self, group: int) -> int:
        return self._sent[group]

    def is_backed_up(self, group: int, sent: int) -> bool:
        return self._confirmed[group] >= sent

    def confirm(self, group: int) -> None:
        self._confirmed[group] += 1

    # As the backup of others

    def _forward_bytes(self, message: Forward) -> int | None:
        group = self._copied.get(message.group)
        itemsize = self._plain.groups.dtype.itemsize
        return None if group is None else group.length * itemsize * message.is_given

    def _forward(self, server: int, message: Forward, payload: Tensor | None) -> Iterator[Reply]:
        if message.group not in self._backup.counts:
            raise OutOfTurn(f"group {message.group} has not been given to this server")
        gradient, skipped = payload if message.is_given else None, frozenset(message.skipped)
        self._backup.apply_as(message.settings, message.group, gradient, skipped, message.used)
        yield server, Forwarded(number=next(self._numbers), group=message.group), None

    # When a generation begins

    def _holds(self, worker: int, message: AskBackup, payload: Tensor | None) -> Iterator[Reply]:
        backup = self._backup
        yield worker, BackedUp(counts=backup.counts, used=backup.used, used_in=backup.used_in), None

    def _content(self, worker: int, message: AskContent, payload: Tensor | None) -> Iterator[Reply]:
        if message.group not in self._backup.counts:
            raise OutOfTurn(f"group {message.group} is not here")
        yield worker, Content(content=self._backup.content(message.group)), None

    def _take(self, worker: int, message: GiveContent, payload: Tensor | None) -> Iterator[Reply]:
        self._backup.take(message.group, message.content, message.count, message.used, message.used_in)
        yield worker, Done(number=message.number), None

    def _go_back(self, worker: int, message: GoBack, payload: Tensor | None) -> Iterator[Reply]:
        self._backup.go_back(message.count)
        yield worker, Done(number=message.number), None

    def _begin(self, worker: int, message: Begin, payload: Tensor | None) -> Iterator[Reply]:
        self._backup.keep(self._plain.groups.by_index.keys() | self._copied.keys())
        yield worker, Done(number=message.number), None
