"""When a server applies a gradient and when a worker may read: rules alone, without sockets and tensors.

sync    the gradients of all workers are added up, then one update: x ← x − η Σ g_i, one big batch
async   each gradient is applied as it comes (Dean et al. 2012, Downpour)
stale   as async, but no worker computes on parameters that lack a step of any worker from over `bound` steps ago
        (stale synchronous parallel: Ho et al. 2013; Petuum, Xing et al. 2015)
teams   sync inside a team of workers, async or stale between teams (worker groups of SINGA: Ooi et al. 2015)

`sync` is not `stale` with a bound of 0: with that, too, a worker waits for all others, but
the server makes n small updates instead of one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Consistency:
    """What distinguishes the consistencies."""

    gathers: bool = False
    """Whether the server adds up the gradients of all workers of a team before it makes one update."""
    bound: int | None = None
    """How many steps a worker may be ahead of the slowest; None for any number."""
    teams: int = 1
    """The number of teams; each has equally many workers, with consecutive numbers."""
    fetches: bool = False
    """Whether workers compute on copies of their own and fetch parameters when they like; otherwise the server answers
    every push with the parameters, and workers of its host read its memory."""

    server_groups: int = 1
    """How many server groups there are, each with all parameters and with `teams` of its own."""
    exchange_every: int = 1
    """Updates of a group of spans after which a server group tells the others."""

    @property
    def weighs(self) -> bool:
        """Whether servers weight gathered gradients by samples: teams do not meet, so members know only their own."""
        return self.gathers and self.teams * self.server_groups > 1


SYNC = Consistency(gathers=True, bound=0)
ASYNC = Consistency()


def stale(bound: int) -> Consistency:
    return Consistency(bound=bound)


class OutOfTurn(Exception):
    """A message that cannot follow those before it."""


@dataclass(frozen=True)
class Due:
    """An update to make now: the sum of these workers' gradients of one group, in this order."""

    group: int
    workers: tuple[int, ...]


class Clocks:
    """What one server knows of the workers: their steps, and which gradients wait for others.

    Steps count from the last time that all workers had paused. A worker that is out of data leaves, and no worker waits
    for it; once all have left, all are back, at step 0.

    With `in_place`, workers compute on the very memory that an update changes: gathered gradients are then not due
    before all workers have finished the step, since a backward pass may still read what the update would change.
    """

    def __init__(self, rule: Consistency, workers: Iterable[int], *, in_place: bool = False) -> None:
        self.rule = rule
        self._workers = tuple(workers)
        self._in_place = in_place
        self.rounds = 0  # steps that were gathered from all
        self.generation = 0  # of the workers
        self._gathered: dict[
            tuple[int, int], set[int]
        ] = {}  # by team and group: the workers that have pushed
        self._begin()

    def _begin(self) -> None:
        self._steps = dict.fromkeys(self._workers, 0)
        self._pushed: dict[int, set[int]] = {worker: set() for worker in self._workers}
        self._left: set[int] = set()

    def team(self, worker: int) -> int:
        """The team of a worker; without gathering each worker is a team by itself."""
        if not self.rule.gathers:
            return worker
        return self._workers.index(worker) * self.rule.teams // len(self._workers)

    @property
    def fetches(self) -> bool:
        return self.rule.fetches

    @property
    def floor(self) -> int:
        """Steps that every worker which has not left has finished."""
        return min(self._steps[worker] for worker in self._active())

    def lead(self, worker: int) -> int:
        """How many steps a worker is ahead of the slowest."""
        return self._steps[worker] - self.floor

    def push(self, worker: int, step: int, group: int) -> list[Due]:
        """A worker's gradient of a group has come; returns the updates that are due now."""
        if worker in self._left or step != self._steps[worker] or group in self._pushed[worker]:
            raise OutOfTurn(
                f"group {group} of step {step} from worker {worker}, which is at step {self._steps[worker]}"
            )
        self._pushed[worker].add(group)
        if not self.rule.gathers:
            return [Due(group, (worker,))]
        team = self.team(worker)
        self._gathered.setdefault((team, group), set()).add(worker)
        return [] if self._in_place else list(self._complete(team))

    def finish(self, worker: int, step: int) -> list[Due]:
        """A worker has pushed all that it has in this step."""
        if worker in self._left or step != self._steps[worker]:
            raise OutOfTurn(
                f"end of step {step} from worker {worker}, which is at step {self._steps[worker]}"
            )
        self._steps[worker] += 1
        self._pushed[worker].clear()
        team = self.team(worker)
        if not all(self._steps[one] > step for one in self._active(team)):
            return []
        self.rounds += 1
        return list(self._complete(team))

    def begun(self) -> list[Due]:
        """The pushed groups of a step that not all workers have finished, with the workers that pushed them."""
        return [Due(group, tuple(sorted(workers))) for (_, group), workers in sorted(self._gathered.items())]

    def regrouped(self, workers: Iterable[int], generation: int) -> "Clocks":
        """The same for the workers of a new generation, who begin anew."""
        clocks = Clocks(self.rule, workers, in_place=self._in_place)
        clocks.rounds, clocks.generation = self.rounds, generation
        return clocks

    @property
    def workers(self) -> tuple[int, ...]:
        return self._workers

    def leave(self, worker: int) -> list[Due]:
        """A worker is out of data until all pause; updates that waited only for it are due now."""
        self._left.add(worker)
        if len(self._left) < len(self._workers):
            team = self.team(worker)
            return list(self._complete(team)) if not self._in_place or self._is_round_over(team) else []
        # No worker is left to wait for, so no more gradients will come.
        due = [Due(group, tuple(sorted(workers))) for (_, group), workers in sorted(self._gathered.items())]
        self._gathered.clear()
        self._begin()
        return due

    def is_between_steps(self, team: int) -> bool:
        """Whether all workers of a team that have not left have ended the same step."""
        return len({self._steps[worker] for worker in self._active(team)}) == 1 and self._is_round_over(team)

    def may_read(self, step: float) -> bool:
        """Whether parameters to which a push was applied are fresh enough to compute with after `step` steps."""
        # What was gathered from all is the same for all.
        from_all = self.rule.gathers and self.rule.teams == 1
        return from_all or self.rule.bound is None or self.floor >= step - self.rule.bound

    def _active(self, team: int | None = None) -> Iterator[int]:
        """The workers that have not left, of all or of one team."""
        for worker in self._workers:
            if worker not in self._left and team in (None, self.team(worker)):
                yield worker

    def _is_round_over(self, team: int) -> bool:
        return not any(self._pushed[worker] for worker in self._active(team))

    def _complete(self, team: int) -> Iterator[Due]:
        """Groups for which all workers of the team have pushed."""
        active = set(self._active(team))
        for key in [key for key, pushed in self._gathered.items() if key[0] == team and pushed >= active]:
            yield Due(key[1], tuple(sorted(self._gathered.pop(key))))
