"""Tournament: trainers meet in pairs, both judge both models on their own data, and the better one goes on at both.

LTFB (let a thousand flowers bloom), Jacobs et al. 2017, in LBANN. Every trainer has its own model, its own part of the
data and its own learning rate. Every `every` steps trainers i and j exchange their models, and with L_i(x) the loss
of x on the batch that i has at hand and has not trained on yet

    x_i, x_j ← x_i  if  L_i(x_i) + L_j(x_i) < L_i(x_j) + L_j(x_j),  else x_j.

The winner's settings go on with its parameters. Every trainer keeps its own optimizer's state, so that two with one
model do not do the same; only one whose model has become useless begins afresh. In the paper each side decides for
itself; here both decide alike.

At a pause all trainers judge all models, and the best in sum is what is evaluated, saved and left at the end. The
population outlives the pause: each trainer keeps its own model aside and goes on with it in its next step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from manyhands.errors import UsageError
from manyhands.strategies.interface import Asked, Strategy
from manyhands.strategies.partners import pairs, partner
from manyhands.strategies.refusals import at_least_one, one_gradient_per_step

if TYPE_CHECKING:
    from torch import Tensor

    from manyhands.comm.comm import Comm
    from manyhands.replica.replica import Replica, Share


OWN = "own"  # at a pause: the parameters of this trainer's own model
STATISTICS = "statistics"  # its running statistics
PLACE = "place"  # and whose it is: the trainer's rank, and how many there are


@dataclass(frozen=True, kw_only=True)
class Tournament(Strategy):
    """Trainers with their own rates meet in pairs; the better model goes on (LTFB, Jacobs et al. 2017; LBANN)."""

    every: int = 8
    spread: float = 2.0  # the trainers' learning rates reach from 1/spread to spread times the optimizer's

    same_settings: ClassVar[bool] = False
    late: ClassVar[bool] = (
        True  # trainers meet before they train: nobody has judged what the step itself makes
    )

    def __post_init__(self) -> None:
        at_least_one(every=self.every)
        if not self.spread >= 1:
            raise UsageError(
                f"spread={self.spread:g}: it must be at least 1, which gives all trainers the same rate"
            )

    def check(self, asked: Asked) -> None:
        one_gradient_per_step(asked)

    def meets(self, steps: int) -> bool:
        return steps > 0 and steps % self.every == 0

    def who_meets(self, steps: int, hosts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        return pairs(sum(map(len, hosts)), steps // self.every)

    def step(self, replica: "Replica", comm: "Comm", share: "Share") -> float:
        self._end_pause(replica, comm)
        rate = self._rate(replica, comm)
        if share.samples:
            replica.eval_batch = share
        if replica.steps and replica.steps % self.every == 0:
            self._meet(replica, comm, rate)
        loss = replica.backward(share)
        with replica.rate(float(rate)):
            replica.apply()
        return loss

    def _rate(self, replica: "Replica", comm: "Comm") -> "Tensor":
        """What this trainer multiplies the learning rate by: at first evenly spaced, on a logarithmic scale."""
        place = 2 * comm.rank / (comm.size - 1) - 1 if comm.size > 1 else 0.0
        return replica.keep("rate", replica.params.new_zeros(1).double() + self.spread**place)

    def _meet(self, replica: "Replica", comm: "Comm", rate: "Tensor") -> None:
        peer = partner(comm.rank, comm.size, replica.steps // self.every)
        mine = replica.to_flat()
        theirs = comm.swap(peer, mine)
        if peer == comm.rank:
            return
        mine_here = replica.score()
        replica.load_flat(theirs)
        theirs_here = replica.score()
        news = comm.swap_numbers(peer, [mine_here, theirs_here, float(rate), *replica.settings])
        theirs_there, mine_there, their_rate, *their_settings = news
        if mine_here + mine_there <= theirs_here + theirs_there:
            replica.load_flat(mine)
        else:
            rate.fill_(their_rate)
            replica.settings = their_settings
            if not math.isfinite(mine_here):
                replica.forget()  # what this trainer's own model has made of its optimizer's state is no use

    def agree(self, replica: "Replica", comm: "Comm") -> None:
        """The best model by the judgement of all trainers is in everyone's place until the next step."""
        if comm.size > 1:
            mine = replica.to_flat()
            losses = []
            for rank in range(comm.size):
                candidate = mine.clone()
                comm.copy_(candidate, rank)
                replica.load_flat(candidate)
                losses.append(comm.sum_of(replica.score()))
            best = losses.index(min(losses))
            crowned = mine.clone()
            comm.copy_(crowned, best)
            replica.load_flat(crowned)
            if math.isfinite(losses[comm.rank]):
                self._put_aside(mine, replica, comm)
            else:
                replica.forget()
        replica.eval_batch = None  # a run that goes on from a checkpoint has nothing at hand either

    def regroup(self, replica: "Replica", comm: "Comm", *, is_new: bool) -> None:
        """A trainer that comes in a pause has got another one's model: it goes on with the best one instead."""
        if is_new:
            replica.kept.pop(OWN, None)
        if OWN in replica.kept:
            replica.kept[PLACE] = self._place(replica, comm)

    def _put_aside(self, mine: "Tensor", replica: "Replica", comm: "Comm") -> None:
        own, statistics = mine.tensor_split([len(replica.params)])
        replica.kept[OWN] = own.clone()
        # A checkpoint holds what is as long as the parameters in parts, and other vectors whole: of a spread
        # replica the statistics of the best model stay.
        if len(statistics) and not replica.part.spread:
            replica.kept[STATISTICS] = statistics.clone()
        replica.kept[PLACE] = self._place(replica, comm)

    def _end_pause(self, replica: "Replica", comm: "Comm") -> None:
        """Go on with this trainer's own model. From a checkpoint of another number of trainers it has worker 0's, and
        goes on with the best one instead."""
        own, statistics, place = (replica.kept.pop(name, None) for name in (OWN, STATISTICS, PLACE))
        if own is None or place is None or not place.equal(self._place(replica, comm)):
            return
        whole = replica.to_flat()
        whole[: len(own)] = own
        if statistics is not None and not replica.part.spread:
            whole[len(own) :] = statistics
        replica.load_flat(whole)

    def _place(self, replica: "Replica", comm: "Comm") -> "Tensor":
        return replica.params.new_tensor([comm.rank, comm.size]).double()
