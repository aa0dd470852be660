"""Parameters that two stages use, as tied weights: the first one has them, the others borrow them for a step.

The stage that has a parameter sends it before the step, and adds the gradients of the borrowers to its own after it;
so the parameter has one value, one gradient and one state of the optimizer.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.placement.pipeline.stage_channel import StageChannel
from manyhands.placement.pipeline.stage_plan import StagePlan
from manyhands.placement.presence import Presence

LOAN, RETURN = 3, 4  # kinds of messages


class Loans:
    """What one worker lends and borrows; stages on the same worker share their parameters without it."""

    def __init__(
        self,
        plan: StagePlan,
        presence: Presence,
        channel: StageChannel,
        workers: int,
        worker: int,
        member: Callable[[int], int],
    ) -> None:
        self._presence, self._channel, self._member, self._worker = presence, channel, member, worker
        # Each parameter that is lent, with its owner and a borrower, once for each pair of workers.
        self._all: list[tuple[Tensor, int, int]] = []
        for owner, tensor in plan.owners():
            borrowers = {stage % workers for stage in range(plan.stages) if (id(tensor), stage) in plan.lent}
            self._all += [(tensor, owner % workers, each) for each in sorted(borrowers - {owner % workers})]
        self.are_due = any(worker in (owner, borrower) for _, owner, borrower in self._all)

    def lend(self) -> None:
        """Borrowers get the values of this step."""
        for number, (tensor, owner, borrower) in enumerate(self._all):
            if self._worker == owner:
                self._channel.send(self._member(borrower), (LOAN, number, 0), [(tensor, False)])
            elif self._worker == borrower:
                ((value, _),), _ = self._channel.receive(self._member(owner), (LOAN, number, 0))
                self._presence.lacks[id(tensor)].come()
                tensor.data = value

    def settle(self) -> None:
        """Owners get the gradients of their borrowers."""
        for number, (tensor, owner, borrower) in enumerate(self._all):
            if self._worker == borrower:
                grad = tensor.grad
                message = [] if grad is None else [(grad.to_dense() if grad.is_sparse else grad, False)]
                self._channel.send(self._member(owner), (RETURN, number, 0), message)
            elif self._worker == owner:
                message, _ = self._channel.receive(self._member(borrower), (RETURN, number, 0))
                with telemetry.timed("compute"), torch.no_grad():
                    for grad, _ in message:
                        tensor.grad = grad if tensor.grad is None else tensor.grad + grad
        self.give_back()

    def give_back(self) -> None:
        """Borrowers keep nothing."""
        for tensor, _, borrower in self._all:
            if self._worker == borrower:
                lack = self._presence.lacks[id(tensor)]
                tensor.grad, tensor.data = None, lack.stand_in
                lack.leave()
