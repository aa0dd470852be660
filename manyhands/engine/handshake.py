"""What all workers tell each other before a step, or before a call that is not a step."""

from collections.abc import Callable
from dataclasses import dataclass

from manyhands.cluster.worker import leaving
from manyhands.cluster.worker.member import Regroup
from manyhands.engine import feeds, same_order, same_settings
from manyhands.engine.engine import Engine
from manyhands.engine.feed import Feed
from manyhands.engine.same_data import Signs
from manyhands.errors import UsageError

# What a worker has come for.
(
    STEP,
    END_OF_DATA,
    EVALUATE,
    SAVE,
    RESUME,
    LOAD,
    STATE,
    FINISH,
    COLLECT,
    WHOLE,
    BACKWARD,
    UPDATE,
    BEGIN,
    USE,
    LEAVE_WHOLE,
) = range(15)
WORDS = (
    "called step()",
    "reached the end of its data",
    "called evaluate()",
    "called save()",
    "called resume()",
    "loaded a state (load_state_dict, or param.data = …)",
    "called optimizer_state()",
    "finished",
    "called gather(), mean() or barrier()",
    "asked for the whole model",
    "called backward()",
    "called update()",
    "began a loop over its data",
    "used the model outside of a step",
    "left whole_model()",
)

# What a worker asks all workers to do, once the step is made; the later includes the earlier.
NOTHING, SAVE_NOW, LEAVE = range(3)

_STEPS = (STEP, UPDATE)  # at the end of which the optimizer runs

OWN_LOOP = feeds.MOST  # in place of a slot: the end of a loop over batches that only this worker has

# By rank: purpose, samples (of an update: whether the script has looked at the gradient), digest of the settings,
# rounds used of the first stream, change, what the worker asks for, the slot of the stream whose end has come, a sign
# of the data set, rounds used of the other streams, signs of the first batches; and, where several sessions are open:
# which one, whether the worker has just joined, and the rounds used of all streams of each.
_FIXED = 8
_NO_SIGNS = (0.0, 0.0)
_ONE_STREAM = [0.0] * (feeds.MOST - 1)
_SIGNS = _FIXED + len(_ONE_STREAM)
_SESSION = _SIGNS + len(_NO_SIGNS)
_IS_NEW, _USED = _SESSION + 1, _SESSION + 2
Rows = list[list[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What all workers said."""

    purposes: list[int]
    total: float
    """Samples of all workers; those that several workers compute together count once."""
    of_replica: float
    """Samples of the workers of this replica."""
    drawn: list[list[int]]
    """Rounds of each stream of data that each worker has used, this step's included; of workers with the
    same data, one is named."""
    signs: list[Signs] | None
    """In the first steps, what shows whether workers have the same batches."""
    slots: list[int]
    """The stream whose end each worker has reached; of workers with the same data, one is named."""
    change: bool
    """Whether some worker has heard that the members of the run are to change."""
    looked: bool
    """Whether a script has looked at the gradients of an update, and may have changed them."""
    asked: int
    """The most that a worker asks for."""
    sessions: list[int]
    """For which session each worker has come; none where only one is open."""

    def who(self, purpose: int) -> list[int]:
        """The workers that have come for this."""
        return [rank for rank, one in enumerate(self.purposes) if one == purpose]

    def are_only(self, *purposes: int) -> bool:
        """Whether all workers have come for one of these."""
        return len(set(self.sessions)) <= 1 and all(purpose in purposes for purpose in self.purposes)

    def agree(self) -> bool:
        """Whether all workers have come for the same thing.

        Where some have come because they ask for something, the others need not have known: then
        all come again.
        """
        first = self.purposes[0]
        if len(set(self.sessions)) > 1:
            said = (f"worker {rank} in session {number + 1}" for rank, number in enumerate(self.sessions))
            raise UsageError(
                f"workers disagree: {', '.join(said)}; "
                "evaluate, save and leave loops of the same session at the same points on every worker"
            )
        for rank, purpose in enumerate(self.purposes):
            if purpose != first and self.asked == NOTHING:
                raise disagreement(0, first, rank, purpose)
        return all(purpose == first for purpose in self.purposes)


def disagreement(one: int, purpose: int, other: int, others: int) -> UsageError:
    """Two workers have come for different things."""
    return UsageError(
        f"workers disagree: worker {one} {WORDS[purpose]}, worker {other} {WORDS[others]}; "
        "evaluate, save and leave loops at the same points on every worker"
    )


class Handshake:
    """One exchange of all workers. Those of this host have answered when it begins; `wait` returns when those of other
    hosts have answered too."""

    answers: Answers

    def __init__(self, answer: Callable[[], Rows], engine: Engine) -> None:
        self._answer = answer
        self.engine = engine  # whose step it is, when all have answered
        self.is_answered = False

    def wait(self) -> Answers:
        if not self.is_answered:
            rows = self._answer()
            if len(rows[0]) > _SESSION:
                self.engine = _stepping(rows, self.engine)
            engine = self.engine
            if len(rows) > 1 and engine.traits.same_settings:
                stepping = [row[0] in _STEPS and _is_of(row, engine) for row in rows]
                same_settings.follow(engine, [row[2] for row in rows], stepping)
            self.answers = self._sum_up(rows)
            self.is_answered = True
        return self.answers

    def total(self) -> float:
        return self.wait().total

    def of_replica(self) -> float:
        return self.wait().of_replica

    def _sum_up(self, rows: Rows) -> Answers:
        engine, generation = self.engine, self.engine.generation
        copies, members = generation.copies, generation.members
        purposes = [int(row[0]) for row in rows]
        if max(purposes) >= USE:
            _check_all_use(purposes)
        _check_loads(purposes)
        if any(row[7] != rows[0][7] for row in rows):
            same_order.check([row[7] if _is_of(row, engine) else 0.0 for row in rows])
        own = [purpose if _is_of(row, engine) else -1 for row, purpose in zip(rows, purposes, strict=True)]
        if max(own) >= BACKWARD and STEP in own:
            half = max(own)
            raise disagreement(own.index(STEP), STEP, own.index(half), half)
        if copies > 1:
            _check_same_samples(rows, copies)
        first = generation.world.rank // members * members
        samples = [row[1] if _is_of(row, engine) and row[0] != UPDATE else 0.0 for row in rows]
        slots = range(len(engine.feeds.slots))
        return Answers(
            purposes=purposes,
            total=sum(samples[::copies]),
            of_replica=sum(samples[first : first + members : copies]),
            drawn=[[int(_drawn(row, engine, slot)) for row in rows[::copies]] for slot in slots],
            signs=_signs(rows[::copies], engine) if engine.twins is not None else None,
            slots=[int(row[6]) for row in rows[::copies]],
            change=any(row[4] for row in rows),
            looked=any(row[1] and row[0] == UPDATE for row in rows),
            asked=int(max(row[5] for row in rows)),
            sessions=[int(row[_SESSION]) for row in rows if len(row) > _SESSION],
        )


def _is_of(row: list[float], engine: Engine) -> bool:
    """Whether a worker has come for this session."""
    return len(row) <= _SESSION or row[_SESSION] == engine.number


def _drawn(row: list[float], engine: Engine, slot: int) -> float:
    """The rounds of a stream that a worker has used."""
    if _is_of(row, engine):
        return row[_FIXED + slot - 1] if slot else row[3]
    return row[_USED + engine.siblings.place_in_used(engine) * feeds.MOST + slot]


def _signs(rows: Rows, engine: Engine) -> list[Signs]:
    """What shows whether workers have the same batches; nothing of those that have come for another session."""
    return [(row[_SIGNS], row[_SIGNS + 1]) if _is_of(row, engine) else _NO_SIGNS for row in rows]


def _stepping(rows: Rows, engine: Engine) -> Engine:
    """The session whose step is next: a worker that has just joined may be elsewhere in its loop than the others, and
    takes part in their steps without data until they come to where it is."""
    steps = [row for row in rows if row[0] in (STEP, BACKWARD, UPDATE)]
    known = [row for row in steps if not row[_IS_NEW]] or steps
    numbers = {int(row[_SESSION]) for row in known}
    if len(numbers) > 1:
        who = [(rank, int(row[_SESSION])) for rank, row in enumerate(rows) if row in known]
        said = ", ".join(f"worker {rank} of session {number + 1}" for rank, number in who)
        raise UsageError(
            f"workers disagree on whose step is next: {said}; step the sessions in one order on all"
        )
    found = engine.siblings.by_number(numbers.pop()) if numbers else engine
    if all(_is_of(row, found) for row in steps):
        engine.siblings.is_new = False
    return found


def begin(engine: Engine, purpose: int, *, samples: float = 0, ends: Feed | None = None) -> Handshake:
    """Tell all workers what this worker has come for, and what it brings; if it is the end of a stream, which."""
    _keep_gradients(engine, purpose)
    if engine.change_is_due:
        raise Regroup
    optimizer, generation, member = engine.training.optimizer, engine.generation, engine.member
    change = member is not None and member.wants_change
    used, *others = _used(engine, purpose, ends)
    slot = engine.feeds.slots.index(ends) if ends is not None else OWN_LOOP
    asks = wish(engine, purpose, engine.progress.steps + 1)
    siblings = engine.siblings
    if siblings.roll and siblings.is_joining:
        raise UsageError(
            f"a worker has joined a run with {len(siblings.roll.rows)} sessions, and its script uses one when it has "
            f"made {siblings.made}: make all sessions before the first loop, evaluation or checkpoint"
        )
    world = siblings.world
    follows = world.size > 1 and engine.traits.same_settings
    digest = same_settings.sign(engine, optimizer.param_groups) if follows else 0
    row = [float(purpose), float(samples), float(digest), used, float(change), float(asks), float(slot)]
    row.append(_sign_of_data(engine) if world.size > 1 else 0.0)
    row += others or _ONE_STREAM
    row += engine.twins.signs if engine.twins is not None and purpose in (STEP, BACKWARD) else _NO_SIGNS
    if siblings.are_several:
        row += _of_session(engine)
    if world.size > 1 and not generation.one_host:
        handshake = Handshake(world.start_exchange(row), engine)
        if siblings.are_several:
            handshake.wait()  # else it is not known whose step it is
        return handshake
    rows = world.host.exchange(row) if world.size > 1 else [row]
    handshake = Handshake(lambda: rows, engine)
    handshake.wait()
    return handshake


def _keep_gradients(engine: Engine, purpose: int) -> None:
    """Once the workers have met, others may write to the memory of sums that wait for an update; not of the one whose
    update this is."""
    if engine.pending is not None and purpose != UPDATE:
        engine.pending.keep()
    if engine.siblings.are_several:
        for other in engine.siblings.open:
            if other is not engine and other.pending is not None:
                other.pending.keep()


def _sign_of_data(engine: Engine) -> float:
    told, sign = engine.told_data
    return sign if engine.feeds.last.stream is told else same_order.sign(engine)


def _used(engine: Engine, purpose: int, ends: Feed | None) -> list[float]:
    """The rounds of each stream that count as used, for all slots that there may be."""
    every = engine.feeds
    counts = [float(every.drawn(feed, steps=purpose in (STEP, BACKWARD), ends=ends)) for feed in every.slots]
    return counts if len(counts) == 1 else counts + [0.0] * (feeds.MOST - len(counts))


def _of_session(engine: Engine) -> list[float]:
    """Which of several sessions it is, and how far this worker has come with the data of each."""
    siblings = engine.siblings
    row = [float(engine.number), float(siblings.is_new)]
    for other in siblings.listed():
        used = _used(other, END_OF_DATA, None) if other else []
        row += used + [0.0] * (feeds.MOST - len(used))
    return row


def wish(engine: Engine, purpose: int, steps: int) -> int:
    """What this worker asks all workers to do, after so many steps."""
    if leaving.is_asked and purpose not in (RESUME, FINISH):
        return LEAVE
    interval = engine.save_every
    if purpose in _STEPS and interval and interval.is_due(engine.progress, steps=steps):
        return max(engine.answering, SAVE_NOW)
    return engine.answering


def _check_loads(purposes: list[int]) -> None:
    """A worker that loads cannot wait for the others: they would train on with what it has given up."""
    for rank, purpose in enumerate(purposes):
        if LOAD in purposes and purpose != LOAD:
            first = purposes.index(LOAD)
            raise UsageError(
                f"worker {first} {WORDS[LOAD]} and worker {rank} {WORDS[purpose]}; load the same on every worker, at "
                "the same point of the script"
            )


def _check_same_samples(rows: Rows, copies: int) -> None:
    for rank, row in enumerate(rows):
        lead = rank // copies * copies
        if row[0] != rows[lead][0]:
            raise disagreement(lead, int(rows[lead][0]), rank, int(row[0]))
        if row[1] != rows[lead][1]:
            raise UsageError(
                f"workers {lead} and {rank} compute the same samples and were given "
                f"{rows[lead][1]:g} and {row[1]:g}; give workers of one replica the same batches"
            )


def _check_all_use(purposes: list[int]) -> None:
    """What a model in parts computes outside of a step, it computes on all workers."""
    for rank, purpose in enumerate(purposes):
        if purpose != purposes[0]:
            raise UsageError(
                f"workers disagree: worker 0 {WORDS[purposes[0]]}, worker {rank} {WORDS[purpose]}; the model lies in "
                "parts on several workers: use it on all of them at the same point, or let one worker use it alone "
                "inside `with session.whole_model() as model:`, which all workers enter"
            )
