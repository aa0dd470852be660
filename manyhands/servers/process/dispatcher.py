"""The front of a server: finds the handler of a message in one table."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from manyhands.servers.process.evaluation import Evaluation
from manyhands.servers.process.group_update import GradientReader
from manyhands.servers.process.handlers import Handler, Reply, Sender
from manyhands.servers.process.norm_gate import Gate
from manyhands.servers.process.owned_groups import OwnedGroups
from manyhands.servers.process.pushes import Pushes
from manyhands.servers.process.reconciliation import Reconciliation
from manyhands.servers.process.shard import Shard
from manyhands.servers.process.update_counters import UpdateCounters
from manyhands.servers.process.vectors import Vectors
from manyhands.servers.protocol.consistency import Clocks, OutOfTurn
from manyhands.servers.protocol.messages import AskReport, NotAMessage, Request


class Dispatcher:
    """Everything that a server does with messages; the ports through which they come are the `Server`'s."""

    def __init__(
        self,
        shard: Shard,
        groups: OwnedGroups,
        clocks: Clocks,
        *,
        gate: Gate,
        reader: GradientReader,
        vectors: Vectors,
        counters: UpdateCounters,
    ) -> None:
        self._shard = shard
        self._groups = groups
        self._counters = counters
        self._pushes = Pushes(shard, groups, clocks, reader, gate)
        evaluation = Evaluation(vectors, reader, groups.group_bytes, self._end_step)
        self._reconciliation = Reconciliation(shard, groups, self._pushes, evaluation)
        self._handlers = {
            **shard.handlers,
            **self._pushes.handlers,
            **evaluation.handlers,
            **self._reconciliation.handlers,
            AskReport: Handler(self._report),
        }

    @property
    def dtype(self) -> torch.dtype:
        return self._groups.dtype

    def sender_of(self, message: Request) -> Sender:
        return self._handler(message).sender

    def expects(self, message: Request) -> int | None:
        """How many bytes must come with a message from another host; None: it is about what others own."""
        return self._handler(message).vector_bytes(message)

    def handle(self, worker: int, message: Request, payload: Tensor | None) -> Iterable[Reply]:
        """Handle a message from a process; `payload` is its vector, None where that lies in the host's memory."""
        handler = self._handler(message)
        if worker and handler.sender is Sender.FIRST_WORKER:
            raise OutOfTurn(f"worker {worker} sends {type(message).__name__}, and only worker 0 may")
        return handler.reply(worker, message, payload)

    def regroup(self, workers: Sequence[int], generation: int) -> None:
        """Workers of a new generation come."""
        self._reconciliation.regroup(workers, generation)

    def reunite(self, peer: int) -> Iterable[Reply]:
        """A server of another server group is there, perhaps again: the messages that it may have missed."""
        return self._shard.reunite(peer)

    def unrecorded(self) -> dict[str, Any]:
        """What was counted since the last call, for the run's records."""
        return self._counters.unrecorded()

    def _handler(self, message: Request) -> Handler:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise NotAMessage(f"servers of this run do not take {type(message).__name__}")
        return handler

    def _end_step(self) -> None:
        """A step of an optimizer that runs elsewhere has ended: the shard has no update to make for it."""
        clocks = self._pushes.clocks
        clocks.rounds += 1
        self._shard.make((), 1.0, clocks.rounds)

    def _report(self, worker: int, message: AskReport, payload: Tensor | None) -> Iterator[Reply]:
        yield worker, self._counters.report(), None
