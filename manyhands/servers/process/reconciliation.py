"""After workers have died: what of the step that they had begun counts."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from manyhands.servers.process.evaluation import Evaluation
from manyhands.servers.process.group_update import GroupUpdate
from manyhands.servers.process.handlers import Handler, Handlers, Reply
from manyhands.servers.process.owned_groups import OwnedGroups
from manyhands.servers.process.pushes import Pushes
from manyhands.servers.process.shard import Shard
from manyhands.servers.protocol.consistency import Clocks
from manyhands.servers.protocol.messages import AskStatus, Done, Resolve, Status


class Reconciliation:
    """Keeps what a generation had gathered until the next one says whether it counts."""

    def __init__(self, shard: Shard, groups: OwnedGroups, pushes: Pushes, evaluation: Evaluation) -> None:
        self._shard = shard
        self._groups = groups
        self._pushes = pushes
        self._evaluation = evaluation
        self._before: Clocks | None = None  # of the generation that is over
        self._deferred: list[GroupUpdate] = []  # of that: complete, without the norm over all servers
        self.handlers: Handlers = {
            AskStatus: Handler(self._status),
            Resolve: Handler(self._reconcile),
        }

    def regroup(self, workers: Sequence[int], generation: int) -> None:
        """Workers of a new generation come, after those of the last one have died."""
        clocks = self._pushes.clocks
        if self._before is None:
            self._before, self._deferred = clocks, self._pushes.gate.withdraw()
            if self._deferred:
                clocks.rounds -= 1  # gathered, but not applied
        self._pushes.regroup(clocks.regrouped(workers, generation))
        self._groups.regroup(workers)
        self._shard.regroup(generation)

    def _status(self, worker: int, message: AskStatus, payload: Tensor | None) -> Iterator[Reply]:
        rule = self._pushes.clocks.rule
        if rule.teams * rule.server_groups > 1:
            # Teams know nothing of each other's steps.
            yield worker, Status(rounds=0, is_complete=False), None
            return
        # A step whose norm no worker has put together yet is made again.
        complete = not self._pushes.gate.defers and self._is_complete()
        status = Status(rounds=self._pushes.clocks.rounds, is_complete=complete, factor=self._shard.factor)
        yield worker, status, None

    def _is_complete(self) -> bool:
        """Whether every worker of the generation before has pushed all of the step that it had begun."""
        before = self._before
        begun = before.begun() if before else []
        return (
            before is not None
            and bool(begun)
            and len(begun) == len(self._groups.by_index)
            and all(due.workers == before.workers for due in begun)
        )

    def _reconcile(self, worker: int, message: Resolve, payload: Tensor | None) -> Iterator[Reply]:
        before, self._before = self._before, None
        deferred, self._deferred = self._deferred, []
        if before and message.counts:
            before.rounds += 1
            updates = (
                deferred
                or self._pushes.updates_of(before.begun(), before)
                or self._shard.noted(before.rounds, before)
            )
            self._shard.make(updates, message.factor, before.rounds)
            self._pushes.clocks.rounds += 1
        self._pushes.clear()
        self._evaluation.begin_anew(takes_back=not message.counts)
        yield worker, Done(number=message.number), None
