"""Tournament: trainers meet in pairs, both judge both models on their own data, and the better one goes on at both.

LTFB (let a thousand flowers bloom), Jacobs et al. 2017, in LBANN. Every trainer has its own model, its own part of the
data and its own learning rate. Every `every` steps trainers i and j exchange their models, and with L_i(x) the loss
of x on the batch that i has at hand and has not trained on yet

    x_i, x_j ← x_i  if  L_i(x_i) + L_j(x_i) < L_i(x_j) + L_j(x_j),  else x_j.

The winner's settings go on with its parameters. Every trainer keeps its own optimizer's state, so that two with one
model do not do the same; only one whose model has become useless begins afresh. In the paper each side decides for
itself; here both decide alike.

At a pause all trainers judge all models, and the best in sum is evaluated, saved and left at the end. The population
outlives the pause: each trainer keeps its own model aside and goes on with it in its next step (`population.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from manyhands.strategies.extras import Candidate, Numbers
from manyhands.strategies.interface import Asked, Share, Strategy, Traits
from manyhands.strategies.partners import pairs, partner
from manyhands.strategies.population import Trainer, judged_by_both
from manyhands.strategies.refusals import at_least, at_least_one, one_gradient_per_step


@dataclass(frozen=True, kw_only=True)
class Tournament(Strategy):
    """Trainers with their own rates meet in pairs; the better model goes on (LTFB, Jacobs et al. 2017; LBANN)."""

    every: int = 8
    spread: float = 2.0  # the trainers' learning rates reach from 1/spread to spread times the optimizer's
    # Trainers meet before they train: no other one has judged what the step itself makes.
    traits: ClassVar[Traits] = Traits(late=True, same_settings=False, one_piece=True)

    def __post_init__(self) -> None:
        at_least_one(every=self.every)
        at_least(1, "which gives all trainers the same rate", spread=self.spread)

    @property
    def period(self) -> int:
        return self.every

    def check(self, asked: Asked) -> None:
        one_gradient_per_step(asked)

    def who_meets(self, steps: int, hosts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        return pairs(sum(map(len, hosts)), steps // self.every)

    def step(self, replica: Candidate, comm: Numbers, share: Share) -> float:
        trainer = self._trainer(replica, comm)
        trainer.end_pause(replica, comm)
        if share.samples:
            replica.eval_batch = share
        if replica.steps and replica.steps % self.every == 0:
            peer = partner(comm.rank, comm.size, replica.steps // self.every)
            mine = replica.to_flat()
            match = judged_by_both(mine, peer, replica, comm, trainer)
            if match.mine <= match.theirs:
                replica.load_flat(mine)
            else:
                trainer.follow(match, replica)
        loss = replica.backward(share)
        with replica.rate(trainer.rate):
            replica.apply()
        return loss

    def _trainer(self, replica: Candidate, comm: Numbers) -> Trainer:
        """The rates are, at first, evenly spaced on a logarithmic scale."""
        place = 2 * comm.rank / (comm.size - 1) - 1 if comm.size > 1 else 0.0
        return replica.keep(lambda: Trainer(rate=self.spread**place))

    def agree(self, replica: Candidate, comm: Numbers) -> None:
        if comm.size > 1:
            self._trainer(replica, comm).pause(replica, comm)
        replica.eval_batch = None  # a run that goes on from a checkpoint has nothing at hand either

    def regroup(self, replica: Candidate, comm: Numbers, *, is_new: bool) -> None:
        self._trainer(replica, comm).regroup(comm, is_new=is_new)
