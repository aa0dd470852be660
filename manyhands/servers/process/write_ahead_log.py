"""What is written down in the memory of a host so that a new process can go on as a server that has died.

Parameters, the optimizer's vectors and the workers' gradients lie in that memory anyway. Workers note there what they
push (`PushNotes`); a server what it is about to apply, how far it has come with it, and the numbers of its optimizer
(`WriteAheadLog`). A new server puts back the span that the dead one was changing, finishes what was begun, and serves.
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


class WriteAheadLog:
    """One server's; all servers of the host ask for their memory in the same order."""

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
        self._words = memory.allocate(servers * 9, torch.int64).view(servers, 9)[server].numpy()
        # Parameters as they were, where a step can be taken back.
        self.before = memory.allocate(layout.length, vectors[0].dtype)

    # By name, the words: each is written after what it stands for.

    @property
    def has_begun(self) -> bool:
        return bool(self._words[0])

    @property
    def rounds(self) -> int:
        """Steps that were gathered from all workers and applied."""
        return int(self._words[1])

    @rounds.setter
    def rounds(self, value: int) -> None:
        self._words[1] = value

    @property
    def generation(self) -> int:
        """Of the workers that were served last."""
        return int(self._words[2])

    @generation.setter
    def generation(self, value: int) -> None:
        self._words[2] = value

    def begin(self) -> None:
        self.note_settings()
        self._words[0] = 1

    def note_settings(self) -> None:
        values = hyper_parameters(self._optimizer)
        self._settings[: len(values)] = values

    def plan(self, *, rounds: int, workers: Iterable[int], group: int, factor: float) -> None:
        """About to apply all groups of a round of some workers, or one worker's push of one group."""
        self._factor[0] = factor
        self._words[5], self._words[6], self._words[7] = rounds, group, sum(1 << one for one in workers)
        self._words[3] = self._words[4] + 1

    def finish(self, rounds: int) -> None:
        """What was planned is applied."""
        self._words[1] = rounds
        self._words[4] = self._words[3]

    def pass_over(self, rounds: int) -> None:
        """There is nothing to apply in a round."""
        self._factor[0] = 1.0
        self._words[1] = rounds

    def note_before(self) -> None:
        """The parameters from before the step that is under way are kept."""
        self._words[8] = self._words[1] + 1

    @property
    def keeps_before(self) -> bool:
        """Whether they are, until the step is over."""
        return bool(self._words[8] == self._words[1] + 1)

    @property
    def planned(self) -> tuple[int, int, list[int]] | None:
        """What a server was about to apply when it died: rounds, group, workers."""
        if self._words[3] == self._words[4]:
            return None
        workers = [one for one in range(MOST_NOTED) if int(self._words[7]) >> one & 1]
        return int(self._words[5]), int(self._words[6]), workers

    @property
    def factor(self) -> float:
        """By what the gradients that are planned, or were applied last, are to be multiplied."""
        return float(self._factor[0])

    def has(self, span: Span) -> bool:
        """Whether what is planned is in this span already."""
        return self._undo_log.has(span, int(self._words[3]))

    def note(self, span: Span) -> None:
        """What is planned counts as applied to a span: if this server dies in the middle of it, that stays as it is."""
        self._undo_log.end(span, int(self._words[3]))

    def update(self, updates: Updates, span: Span, gradient: Tensor, skipped: frozenset[int]) -> None:
        """Apply what is planned to a span."""
        self._undo_log.update(updates, span, gradient, skipped, int(self._words[3]))

    def take_over(self, updates: Updates) -> None:
        """The optimizer's settings of the dead server; and put back, or finish, what it was changing."""
        count = len(hyper_parameters(self._optimizer))
        set_hyper_parameters(self._optimizer, self._settings[:count].tolist())
        self._undo_log.repair(updates, self._server, int(self._words[3]))
