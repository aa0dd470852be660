"""The population of a tournament: how two trainers judge their models, and how each model outlives a pause."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyhands.strategies.extras import Candidate, Numbers

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Match:
    """The losses of two models, each summed over the data of both trainers, and what goes with the other model."""

    mine: float
    theirs: float
    is_useless: bool
    """Whether the loss of this trainer's model is no finite number on its own data."""
    their_rate: float
    their_settings: list[float]


@dataclass
class Trainer:
    """What a trainer keeps: the factor of its learning rate, and during a pause its own model."""

    rate: float
    own: "Tensor | None" = None  # parameters
    statistics: "Tensor | None" = None  # running statistics
    place: tuple[float, ...] = ()  # whose model it is: the trainer's rank, and how many there are

    def follow(self, match: Match, replica: Candidate) -> None:
        """The other trainer's model has won, and is here: its settings go on with it."""
        self.rate, replica.settings = match.their_rate, match.their_settings
        if match.is_useless:
            replica.forget()  # what this trainer's own model has made of its optimizer's state is no use

    def pause(self, replica: Candidate, comm: Numbers) -> None:
        """The best model by the judgement of all trainers is in every trainer's place until the next step."""
        mine = replica.to_flat()
        losses = _crown_best(mine, replica, comm)
        if not math.isfinite(losses[comm.rank]):
            replica.forget()
            return
        own, statistics = mine.tensor_split([len(replica.params)])
        self.own, self.place = own.clone(), (comm.rank, comm.size)
        # A checkpoint holds vectors as long as the parameters in parts, and other vectors whole: of a spread replica
        # the statistics of the best model stay.
        if len(statistics) and not replica.part.spread:
            self.statistics = statistics.clone()

    def end_pause(self, replica: Candidate, comm: Numbers) -> None:
        """Go on with this trainer's own model. From a checkpoint of another number of trainers it has worker 0's, and
        goes on with the best one instead."""
        own, statistics, place = self.own, self.statistics, self.place
        self.own, self.statistics, self.place = None, None, ()
        if own is None or place != (comm.rank, comm.size):
            return
        model = replica.to_flat()
        model[: len(own)] = own
        if statistics is not None and not replica.part.spread:
            model[len(own) :] = statistics
        replica.load_flat(model)

    def regroup(self, comm: Numbers, *, is_new: bool) -> None:
        """A trainer that comes in a pause has another one's model: it goes on with the best one instead."""
        if is_new:
            self.own = None
        if self.own is not None:
            self.place = (comm.rank, comm.size)


def judged_by_both(mine: "Tensor", peer: int, replica: Candidate, comm: Numbers, trainer: Trainer) -> Match:
    """Both trainers judge both models; the other one's is in this replica afterwards. A trainer without a partner, as
    one is where the number is odd, ties with itself."""
    theirs = comm.swap(peer, mine)
    if peer == comm.rank:
        return Match(mine=0.0, theirs=0.0, is_useless=False, their_rate=trainer.rate, their_settings=[])
    mine_here = replica.score()
    replica.load_flat(theirs)
    theirs_here = replica.score()
    news = comm.swap_numbers(peer, [mine_here, theirs_here, trainer.rate, *replica.settings])
    theirs_there, mine_there, their_rate, *their_settings = news
    return Match(
        mine=mine_here + mine_there,
        theirs=theirs_here + theirs_there,
        is_useless=not math.isfinite(mine_here),
        their_rate=their_rate,
        their_settings=their_settings,
    )


def _crown_best(mine: "Tensor", replica: Candidate, comm: Numbers) -> list[float]:
    """All trainers judge all models, and the best in sum is here afterwards; returns the sums of losses."""
    losses = []
    for rank in range(comm.size):
        replica.load_flat(_model_of(rank, mine, comm))
        losses.append(comm.sum_of(replica.score()))
    replica.load_flat(_model_of(losses.index(min(losses)), mine, comm))
    return losses


def _model_of(rank: int, mine: "Tensor", comm: Numbers) -> "Tensor":
    model = mine.clone()
    comm.copy_(model, rank)
    return model
