"""The sessions of one worker: they share its batches, its generations and its end, and train apart.

All workers run the same script, so a session has the same number on all of them. Where several are open, every message
between workers names the session, and a change of members concerns all of them at once (`elastic.py`).
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from torch import nn

from manyhands.cluster.worker.twin import Twin
from manyhands.cluster.worker.world import World
from manyhands.engine.feeds import Feeds
from manyhands.engine.progress import Progress
from manyhands.engine.roll import Roll, Stage, Told
from manyhands.engine.settings import Training
from manyhands.errors import UsageError
from manyhands.replica.joint_passes import JointPasses


class Sibling(Protocol):
    """What a session shows the others of itself."""

    number: int
    is_closed: bool
    feeds: Feeds
    progress: Progress
    training: Training

    @property
    def has_entered(self) -> bool: ...

    @property
    def holds_state(self) -> bool: ...


S = TypeVar("S", bound=Sibling)

MOST = 12  # in one message between workers, which has a number for each


class Siblings(Generic[S]):
    """The sessions that this worker has made, in this order."""

    def __init__(self, world: World) -> None:
        self.world = world  # of the generation in which this worker is
        self.worlds = [world]  # of which some session still has something
        self.roll: Roll | None = None  # of this generation, if it is not the first
        # Whether it has joined in the middle of a run, and has made no step with the others yet.
        self.is_new = False
        self.stepping: S | None = None  # whose step was made, or begun, last
        self.asked = 0  # what a worker has asked all to do when a round of steps is over
        self.joint = JointPasses()
        self._stepped: set[int] = set()  # the sessions that have made a step in this round
        self._saved_with: dict[int, int] = {}  # by place: steps, as the checkpoint of another session says
        self._engines: list[weakref.ref[S]] = []
        self._models: list[weakref.ref[nn.Module]] = []
        self._progress: list[Progress] = []
        self.places: dict[int, int] = {}  # by open session: which twin of the world it has
        self.are_several = False

    def add(self, engine: S) -> int:
        """One more session; returns its number."""
        self._engines.append(weakref.ref(engine))
        self._models.append(weakref.ref(engine.training.model))
        self._progress.append(engine.progress)
        number, taken = self.made - 1, set(self.places.values())
        free = next(place for place in range(number + 1) if place not in taken)
        self.places[number] = self.roll.rows[number].place if self.roll and self.roll.has(number) else free
        self.are_several = len(self.places) > 1
        return number

    @property
    def made(self) -> int:
        return len(self._engines)

    def place_of(self, engine: S) -> int:
        """0 for a session that is open alone, and for the first of several."""
        return self.places.get(engine.number, 0)

    def name_of(self, engine: S, name: str) -> str:
        """What belongs to one session in the run's directory: that of the first has the plain name."""
        place = self.place_of(engine)
        return f"{name}-{place + 1}" if place else name

    def begins_round(self, engine: S) -> bool:
        """Whether every session has made its step of the round before, since this one comes for its next."""
        begins = engine.number in self._stepped
        self._stepped = {engine.number} if begins else self._stepped | {engine.number}
        return begins

    def puts_off(self, asked: int) -> bool:
        """Whether what is asked waits until all sessions have made as many steps."""
        if self.are_several:
            self.asked = max(self.asked, asked)
        return self.are_several

    def steps_of_others(self, engine: S) -> dict[str, int]:
        """For a checkpoint: how far the other sessions are, by place."""
        return {str(self.place_of(other)): other.progress.steps for other in self.besides(engine)}

    def compare(self, engine: S, steps: int, others: Mapping[str, int]) -> str:
        """Two sessions that resume must have been saved together; returns what is wrong, or nothing."""
        known = self._saved_with.get(self.place_of(engine), steps)
        self._saved_with |= {int(place): count for place, count in others.items()}
        if known == steps:
            return ""
        return (
            f"session {engine.number + 1} goes on from step {steps}, and when the checkpoint of another session was "
            f"made it had made {known}: they were not saved together"
        )

    def end(self, engine: S) -> None:
        """A session is closed; the next one takes its place."""
        self.places.pop(engine.number, None)
        self.are_several = len(self.places) > 1

    def world_of(self, engine: S, world: World) -> World:
        """The world of a session in a generation; all workers must ask."""
        place = self.places[engine.number]
        if place and place not in world.twins:
            world.twins[place] = Twin(world, place)
        return world.twins[place] if place else world

    def told(self) -> list[Told]:
        """What this worker has, for the roll."""
        engines = [reference() for reference in self._engines]
        stages = [_stage(engine) for engine in engines]
        return [
            Told(stage, self.places.get(number, 0), self._progress[number].commits)
            for number, stage in enumerate(stages)
        ]

    def follow(self, roll: Roll) -> None:
        """The roll of a new generation."""
        self.roll = roll
        for number, told in enumerate(roll.rows):
            if number in self.places:
                self.places[number] = told.place

    @property
    def commits(self) -> int:
        """Over all sessions: workers make their steps in one order, so one number says how far a worker has come."""
        return sum(progress.commits for progress in self._progress)

    @property
    def holds_state(self) -> bool:
        """Whether the next generation may go on from what this worker has: all sessions that there are."""
        engines = [reference() for reference in self._engines]
        has = [engine is None or engine.is_closed or engine.holds_state for engine in engines]
        known = len(self.roll.rows) if self.roll else 0
        entered = [_stage(engine) != Stage.MADE for engine in engines]
        return any(entered) and len(has) >= known and all(has[:known]) and (known > 0 or any(has))

    def closed(self, number: int) -> tuple[Progress, nn.Module | None]:
        """What is left of a session that is over."""
        return self._progress[number], self._models[number]()

    @property
    def is_joining(self) -> bool:
        """Whether the other workers wait for this one, whose script has yet to make all sessions that they have."""
        return self.roll is not None and self.made < len(self.roll.rows)

    @property
    def open(self) -> list[S]:
        """The sessions that are not closed, in order; without those that no part of the script knows any more."""
        engines = [reference() for reference in self._engines]
        return [engine for engine in engines if engine is not None and not engine.is_closed]

    def listed(self) -> list[S | None]:
        """The sessions made last, of which every message says how far a worker has come with their data."""
        return [self._engines[number]() for number in sorted(self.places)[-MOST:]]

    def place_in_used(self, engine: S) -> int:
        return sorted(self.places)[-MOST:].index(engine.number)

    def get(self, number: int) -> S | None:
        """A session, if this worker has made it and its script still knows it."""
        return self._engines[number]() if number < self.made else None

    def by_number(self, number: int) -> S:
        engine = self._engines[number]()
        if engine is None:
            raise UsageError(
                f"this worker has dropped session {number + 1}, and another one makes a step of it"
            )
        return engine

    def besides(self, engine: S) -> list[S]:
        """The other open sessions."""
        return [other for other in self.open if other is not engine]

    @property
    def is_in_loop(self) -> bool:
        """Whether the script is in a loop over the data of one of them: the others, too, use its batches."""
        return any(engine.feeds.is_in_loop for engine in self.open)

    @property
    def is_looping(self) -> bool:
        """The same, loops that the script makes over the batches of one loop included."""
        return any(engine.feeds.outermost is not None for engine in self.open)

    @property
    def limit(self) -> int | None:
        """How many samples a worker should have at a time."""
        return next((engine.feeds.limit for engine in self.open if engine.feeds.open), None)

    @property
    def given(self) -> int | None:
        """How many samples the script got last, for whichever of them; None where it is in no loop, or in several."""
        loops = [feed for engine in self.open for feed in engine.feeds.open]
        return loops[0].audit.given if len(loops) == 1 else None

    @contextmanager
    def untouched(self, engine: S) -> Iterator[None]:
        """While a session computes gradients: those that reach what other sessions train are dropped, as `zero_grad` of
        the other optimizer would do it."""
        before = [(param, param.grad) for param in _params(self.besides(engine))]
        own = {id(param) for param in _params([engine])}
        try:
            yield
        finally:
            for param, grad in before:
                if id(param) not in own:
                    param.grad = grad

    def trained_before(self, engine: S) -> set[int]:
        """The ids of the parameters that sessions made before this one train."""
        return _trained(other for other in self.open if other.number < engine.number)

    def trained_besides(self, engine: S) -> set[int]:
        """The ids of the parameters that the other sessions train."""
        return _trained(self.besides(engine))


def _trained(engines: Iterable[Sibling]) -> set[int]:
    return {id(param) for param in _params(engines)}


def _params(engines: Iterable[Sibling]) -> list[nn.Parameter]:
    groups = [group for engine in engines for group in engine.training.optimizer.param_groups]
    return [param for group in groups for param in group["params"]]


def _stage(engine: Sibling | None) -> Stage:
    if engine is None or engine.is_closed:
        return Stage.OVER
    return Stage.ENTERED if engine.has_entered else Stage.MADE


def siblings_of(world: World) -> Siblings[Any]:
    """The sessions of the worker that is in this world."""
    if world.siblings is None:
        world.siblings = Siblings(world)
    found: Siblings[Any] = world.siblings
    return found
