"""What a server writes down in its host's memory so that a new process can take over when it dies.

Parameters, the optimizer's vectors and the workers' gradients lie in that memory anyway. Workers note there what they
push (`PushNotes`). The server notes what it is about to apply, how far it has come, and its optimizer's settings. A new
server repairs the span that the dead one was changing, finishes the updates that it had begun, and serves.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.replica.layout import Layout, Span
from manyhands.replica.optimizer.hyper_parameters import hyper_parameters, set_hyper_parameters
from manyhands.replica.optimizer.undo_log import UndoLog
from manyhands.replica.optimizer.updates import Updates
from manyhands.servers.protocol.push_notes import PushNotes
from manyhands.servers.transport.host_memory import HostMemory

MOST_NOTED = 62  # workers: one bit of a word for each

# Words of the log. A server writes each after what it stands for.
_BEGUN, _ROUNDS, _GENERATION = 0, 1, 2
_PLANNED, _FINISHED = 3, 4  # serial numbers of plans
_PLAN_ROUNDS, _PLAN_GROUP, _PLAN_WORKERS = 5, 6, 7
_KEEPS_BEFORE = 8  # the round whose parameters before the step are kept
_WORDS = 9


class WriteAheadLog:
    """The log of one server; all servers of a host allocate their logs in the same order."""

    def __init__(
        self,
        memory: HostMemory,
        layout: Layout,
        vectors: Sequence[Tensor],
        numbers: Tensor,
        optimizer: Optimizer,
        *,
        servers: int,
        server: int,
    ) -> None:
        self.notes = PushNotes(memory)
        self._server = server
        self._optimizer = optimizer
        self._undo_log = UndoLog(layout, vectors, numbers, memory.allocate, owners=servers, mine=server)
        count = max(1, len(hyper_parameters(optimizer)))
        self._settings = memory.allocate(servers * count, torch.float64).view(servers, count)[server].numpy()
        self._factor = memory.allocate(servers, torch.float64)[server : server + 1].numpy()
        self._words = memory.allocate(servers * _WORDS, torch.int64).view(servers, _WORDS)[server].numpy()
        # Parameters before a step that a worker may take back.
        self.before = memory.allocate(layout.length, vectors[0].dtype)

    @property
    def has_begun(self) -> bool:
        return bool(self._words[_BEGUN])

    @property
    def rounds(self) -> int:
        """Steps that were gathered from all workers and applied."""
        return int(self._words[_ROUNDS])

    @property
    def generation(self) -> int:
        """Of the workers that the server served last."""
        return int(self._words[_GENERATION])

    @generation.setter
    def generation(self, value: int) -> None:
        self._words[_GENERATION] = value

    def begin(self) -> None:
        self.note_settings()
        self._words[_BEGUN] = 1

    def note_settings(self) -> None:
        values = hyper_parameters(self._optimizer)
        self._settings[: len(values)] = values

    def plan(self, *, rounds: int, workers: Iterable[int], group: int, factor: float) -> None:
        """The server is about to apply a round of these workers, or (`group` ≥ 0) one worker's push of one group."""
        self._factor[0] = factor
        self._words[_PLAN_ROUNDS], self._words[_PLAN_GROUP] = rounds, group
        self._words[_PLAN_WORKERS] = sum(1 << worker for worker in workers)
        self._words[_PLANNED] = self._words[_FINISHED] + 1

    def finish(self, rounds: int) -> None:
        """The server has applied its plan."""
        self._words[_ROUNDS] = rounds
        self._words[_FINISHED] = self._words[_PLANNED]

    def pass_over(self, rounds: int) -> None:
        """A round has nothing to apply."""
        self._factor[0] = 1.0
        self._words[_ROUNDS] = rounds

    def note_before(self) -> None:
        """`before` has the parameters from before the step that is under way."""
        self._words[_KEEPS_BEFORE] = self._words[_ROUNDS] + 1

    @property
    def keeps_before(self) -> bool:
        """Whether `before` has them; only until the step is over."""
        return bool(self._words[_KEEPS_BEFORE] == self._words[_ROUNDS] + 1)

    @property
    def planned(self) -> tuple[int, int, list[int]] | None:
        """The plan that a dead server did not finish: rounds, group, workers."""
        if self._words[_PLANNED] == self._words[_FINISHED]:
            return None
        workers = [one for one in range(MOST_NOTED) if int(self._words[_PLAN_WORKERS]) >> one & 1]
        return int(self._words[_PLAN_ROUNDS]), int(self._words[_PLAN_GROUP]), workers

    @property
    def factor(self) -> float:
        """By what the server multiplies the gradients of its last plan."""
        return float(self._factor[0])

    def has(self, span: Span) -> bool:
        """Whether the plan is applied to this span."""
        return self._undo_log.has(span, int(self._words[_PLANNED]))

    def note(self, span: Span) -> None:
        """Count the plan as applied to a span: if the server dies in the middle, the span stays half changed."""
        self._undo_log.end(span, int(self._words[_PLANNED]))

    def update(self, updates: Updates, span: Span, gradient: Tensor, skipped: frozenset[int]) -> None:
        """Apply the plan to a span."""
        self._undo_log.update(updates, span, gradient, skipped, int(self._words[_PLANNED]))

    def take_over(self, updates: Updates) -> None:
        """Take over the dead server's settings, and put back or finish the span that it was changing."""
        count = len(hyper_parameters(self._optimizer))
        set_hyper_parameters(self._optimizer, self._settings[:count].tolist())
        self._undo_log.repair(updates, self._server, int(self._words[_PLANNED]))
