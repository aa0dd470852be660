"""How far the whole run is, in steps of the workers that it began with: schedules go by this, on every worker.

    pace = Σ over epochs of ⌈samples in steps ÷ (batch × first workers)⌉

While no worker dies or joins, that is the number of steps. A death without replacement leaves fewer samples for a step
where each worker has its own batch, and workers that do not step together have made different numbers of them: the
schedule of each takes no step then, one, or several, and all end where one process ends. Steps of other data than that
of the script's own loop over a data set count one by one.
"""

from collections.abc import Sequence

from manyhands.engine.engine import Engine
from manyhands.engine.handshake import Answers


def after_step(engine: Engine, answers: Answers | None) -> None:
    """A step is made; without answers this worker knows only of its own host how far the others are."""
    progress, feeds = engine.progress, engine.feeds
    if engine.traits.lockstep and answers is None:
        return  # the others had made it when the generation began, and their pace is this worker's
    if progress.has_regrouped:
        _look_for_other_rates(engine)
    feed = feeds.last
    if not feed.goes_on:
        _advance(engine, 1)
    elif answers is not None:
        _advance(engine, feed.pace.step(answers.drawn[feeds.slots.index(feed)]))
    else:
        _advance(engine, feed.pace.step(_known_of(engine), engine.placed.feed))
    if progress.has_regrouped:
        progress.rates = _rates(engine)


def _known_of(engine: Engine) -> list[int]:
    """By worker, the rounds that it has used; those of other hosts are taken to be as far as this one."""
    feeds, generation, feed = engine.feeds, engine.generation, engine.feeds.last
    if generation.used is None or not generation.one_host:
        return feed.pace.as_far(feed.used)
    reached = generation.used.column(feeds.slots.index(feed))[:: generation.copies]
    known = feed.rounds_at(reached)
    known[engine.placed.feed] = feed.used
    return known


def _advance(engine: Engine, steps: int) -> None:
    engine.progress.pace += steps
    if engine.training.scheduler is not None:
        for _ in range(steps):
            engine.training.scheduler.step()


# Where workers meet


def row(engine: Engine) -> list[float]:
    """How far this worker's schedule is."""
    pace = engine.feeds.last.pace
    return [float(engine.progress.pace), float(pace.counted), float(pace.owed)]


def catch_up(engine: Engine, answers: Answers) -> None:
    """Workers that do not step together have met, and know how far each of them is."""
    feeds = engine.feeds
    if feeds.last.goes_on:
        _advance(engine, feeds.last.pace.catch_up(answers.drawn[feeds.slots.index(feeds.last)]))


def level(engine: Engine, rows: Sequence[Sequence[float]]) -> None:
    """All workers go on from where the furthest is: a schedule cannot go back."""
    pace, counted, owed = map(int, max(map(tuple, rows)))
    _advance(engine, pace - engine.progress.pace)
    engine.feeds.last.pace.counted, engine.feeds.last.pace.owed = counted, owed


# Schedules of the script


def _rates(engine: Engine) -> tuple[int, list[float]]:
    """The optimizer's rates, in this loop of the script and since its last call."""
    groups = engine.training.optimizer.param_groups
    place = engine.progress.calls + engine.feeds.turns
    return place, [float(group.get("lr", 0.0)) for group in groups]


def _look_for_other_rates(engine: Engine) -> None:
    """Members have changed: the script may go on changing rates by the steps that it counts itself."""
    last = engine.progress.rates
    if last is None or engine.replica.runs_whole:
        return
    (place, rates), (now, found) = last, _rates(engine)
    if place == now and rates != found:
        engine.say_once(
            "the script changes the learning rate from step to step, and workers have died or joined: a rate by the "
            "steps of one worker does not follow the samples of the whole run; give the scheduler to "
            "mh.session(scheduler=…), or make the rate a function of session.pace"
        )
