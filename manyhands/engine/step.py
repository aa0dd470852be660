"""One step, from top to bottom: take the batches, tell the other workers, compute and exchange, commit.

    take        the batches as parts of at most so many samples, and which samples of the epoch they are
    handshake   every worker says what it brings, and hears how many samples all have
    strategy    gradients, exchange, update
    commit      counters, ledger, records; from here on the step counts, whichever worker dies

Every step is a transaction. If a worker dies in the middle, the others settle with the coordinator whether the step
counts, and make the attempt again in the next generation.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.cluster.worker import children
from manyhands.cluster.worker.member import Regroup
from manyhands.data.effect import Learners
from manyhands.engine import handshake as handshakes
from manyhands.engine import pace, sample_count
from manyhands.engine.alike import check_alike
from manyhands.engine.elastic import can_go_on, recover
from manyhands.engine.engine import Engine, Transaction
from manyhands.engine.handshake import BACKWARD, STEP, Handshake
from manyhands.engine.held import is_looked_at, of_update
from manyhands.engine.joint_steps import joint_passes
from manyhands.engine.nonfinite import can_leave_out, keep_buffers, leave_out
from manyhands.engine.onlookers import begin_call, show_step
from manyhands.engine.step_input import NO_WORK, StepInput
from manyhands.errors import PeerLost, UsageError
from manyhands.replica.returned import combined
from manyhands.replica.share import Share
from manyhands.replica.state.inheritance import Undo

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Safety:
    """Whether what a step has learned survives the death of its worker, and which workers share it (None: all); or,
    where it is learned `late`, what the steps before it have."""

    is_safe: bool
    groups: Learners | None
    late: bool


Answer = Callable[[Engine, int], None]


def step(engine: Engine, batches: Sequence[Any], answer: Answer) -> Any:
    """Make one step; returns what the loss function returned. Then all workers `answer` what one of them asked for."""
    if engine.pending is not None:
        raise UsageError(
            "session.step(batch) came between session.backward and session.update(); call session.update() first, or "
            "session.step alone"
        )
    if is_due(engine):
        is_early = engine.progress.is_early
        make(engine, take(engine, batches), answer)
        if is_early:
            engine.spent.begin(engine.generation)
    return last_result(engine)


def last_result(engine: Engine) -> Any:
    """What the last step of this worker with data returned."""
    found = engine.progress.last_result
    return torch.tensor(math.nan) if found is None else found


def is_due(engine: Engine) -> bool:
    """Whether this worker makes the step: one that joined late skips those that a script makes outside of loops and
    the other workers have made."""
    progress = engine.progress
    if engine.feeds.is_in_loop or engine.siblings.is_in_loop:
        return True
    progress.outside += 1
    return progress.outside > progress.outside_before


def make(engine: Engine, work: StepInput, answer: Answer, purpose: int = STEP) -> None:
    """Make one step of what this worker has, with the others."""
    progress = engine.progress
    steps, takeovers = progress.steps, progress.takeovers

    def attempt() -> None:
        if not engine.clock.is_running:
            engine.clock.start()
        # The step counted after all, or other workers have used these samples meanwhile.
        if progress.steps > steps or progress.takeovers > takeovers:
            return
        if progress.commits < progress.alone_until:
            run(engine, work, None)
            return
        engine.siblings.stepping = engine
        if engine.traits.lockstep:
            handshake = meet(engine, purpose, work.samples if purpose == STEP else int(is_looked_at(engine)))
            run(engine, work, handshake)
            asked = handshake.answers.asked
        else:
            _step_alone(engine, work)
            asked = handshakes.wish(engine, STEP, progress.steps)
        if asked > engine.answering and not siblings.puts_off(asked):
            answer(engine, asked)

    siblings = engine.siblings
    if siblings.are_several and siblings.begins_round(engine) and siblings.asked:
        together(engine, lambda: answer(engine, siblings.asked))
        siblings.asked = 0
    together(engine, attempt, trains=True)


def take(engine: Engine, batches: Sequence[Any]) -> StepInput:
    """Where the batches of fewer workers make a step, each worker has more than fits at a time: cut it."""
    generation, feeds = engine.generation, engine.feeds
    # Layers that normalise over the samples of a step want all of them in one pass.
    is_cut = generation.feeds < engine.progress.full and not engine.siblings.joint.has_layers
    limit = engine.siblings.limit if is_cut else None
    parts, total = sample_count.parts(engine, batches, limit)
    places = feeds.take(batches, total) if feeds.open else []
    if engine.twins is not None and total:
        engine.note_batches(batches)
    return StepInput(parts, total, len(batches), places)


def meet(engine: Engine, purpose: int, samples: float) -> Handshake:
    """A handshake for this session; a worker that has just joined takes part in the steps of others first."""
    while True:
        handshake = handshakes.begin(engine, purpose, samples=samples)
        if handshake.engine is engine:
            return handshake
        if BACKWARD in handshake.answers.purposes:
            raise UsageError(
                "a worker has joined while the others are between session.backward and session.update() of another "
                "session; where workers are replaced, step each session of several by session.step(batch)"
            )
        run(handshake.engine, NO_WORK, handshake)


# What all workers do together


def together(engine: Engine, attempt: Callable[[], T], *, trains: bool = False) -> T:
    """Do something together with the other workers, whichever of them die meanwhile. A worker that fails in it takes
    part in nothing more. What `trains` begins with what the script has put into the model."""
    if engine.is_closed:
        raise UsageError("the session is closed; make a new one to go on training")
    children.refuse()
    if engine.spent.watched is not None:
        engine.spent.end()
    if engine.failure:
        raise UsageError(
            f"an earlier step failed ({engine.failure}); the other workers could not wait, start again"
        )
    try:
        if not trains or engine.script.is_touched():
            begin_call(engine, trains)
        return survive(engine, attempt)
    except BaseException as error:
        engine.failure = f"{type(error).__name__}: {error}"
        raise


def survive(engine: Engine, attempt: Callable[[], T]) -> T:
    """Make an attempt, and make it again in the next generation if members change in it."""
    with nullcontext() if engine.placed.is_whole else engine.placed.at_work():
        while True:
            try:
                return attempt()
            except (PeerLost, Regroup) as cause:
                recover(engine, cause)


# One attempt


def _step_alone(engine: Engine, work: StepInput) -> None:
    """A step that waits for no other worker."""
    look_up(engine)
    run(engine, work, None)
    progress, feed = engine.progress, engine.feeds.last
    if any(one is feed for one, _ in work.places):
        # A worker that has used some of its batches assumes the same of the others.
        used = work.batches * feed.round_samples
        progress.position = min(feed.length, progress.position + used)


def look_up(engine: Engine) -> None:
    """Where workers do not wait for each other: raise if this generation is over."""
    member = engine.member
    if member and member.is_over:
        member.check()
    if member and member.wants_change:
        raise Regroup


def run(engine: Engine, work: StepInput, handshake: Handshake | None) -> None:
    """The step itself; without a handshake this worker does not know what the others do."""
    generation, strategy = engine.generation, engine.strategy
    engine.siblings.stepping = engine
    replica = generation.replica
    share = _share(engine, work, handshake)
    work.results.clear()  # of an attempt before
    meets = exchanges(replica.steps, engine.period, late=engine.traits.late)
    groups = _who_meets(engine) if meets and engine.has_groups and generation.replicas > 1 else None
    if generation.servers:
        generation.servers.used = engine.feeds.prospect
    early = engine.progress.is_early
    if generation.copies > 1 and early:
        check_alike(
            engine, share.parts, "give all workers of a replica the same batches (session.batches does)"
        )
    if early:
        replica.part.watch = engine.writes if engine.writes.is_on else None
        replica.part.first_loss = replica.part.first_loss or engine.first_steps.loss

    def finish(loss: float) -> None:
        for feed, places in work.places:
            feed.audit.used += places
        engine.siblings.joint.keep()
        # What a worker keeps, and the servers do not have, is gone if the worker dies.
        servers, kept = generation.comm.servers, replica.kept
        defers = servers is not None and (servers.defers() or (kept.state is not None and len(kept) > 0))
        # Where one replica is in parts that outlive their workers, nothing that it has learned can be lost.
        if generation.part_copies is not None and generation.replicas == 1:
            safety = Safety(is_safe=True, groups=None, late=False)
        else:
            safety = Safety(is_safe=meets and not defers, groups=groups, late=engine.traits.late)
        commit(engine, work, handshake, loss, safety)

    # A worker whose replica is its own needs no other worker between two exchanges.
    is_joint = engine.traits.lockstep and (meets or not generation.is_whole or not generation.is_own)
    passes = joint_passes(engine, handshake, len(work.parts))
    with passes, transaction_of(engine, finish, is_joint=is_joint) as transaction:
        if work.made is None and engine.settings.skip_nonfinite:
            keep_buffers(engine)
        with engine.siblings.untouched(engine) if engine.siblings.are_several else nullcontext():
            transaction.loss = strategy.step(replica, generation.fleet or generation.comm, share)
        engine.script.refuse_moved()
        replica.settle()
        engine.script.look(is_early=early)
        engine.frozen.note(replica.arrived)


def _share(engine: Engine, work: StepInput, handshake: Handshake | None) -> Share:
    """This worker's part of the step, and how its gradients are weighted."""
    own, made = float(work.samples), work.made
    total = of_replica = lambda: own
    if handshake is not None:
        pooled, generation = engine.traits.pooled, engine.generation
        # All workers must have answered before anything else is exchanged; only where every worker has data, those of
        # other hosts may answer while the forward pass runs.
        if not handshake.is_answered and not (work.parts and pooled and generation.is_whole):
            handshake.wait()
        of_replica = handshake.of_replica
        total = handshake.total if pooled else of_replica
        if (made is not None and made.is_weighted) or not work.parts:  # all workers have the same gradient
            made = of_update(engine, made, handshake)
    return Share(
        parts=work.parts,
        samples=work.samples,
        total=total,
        of_replica=of_replica,
        results=work.results,
        made=made,
    )


def exchanges(steps: int, period: int, *, late: bool) -> bool:
    """Whether replicas exchange what they have learned in the step that follows after so many.

    What a worker has used since the last exchange is safe then: some state that has it survives the death of any one
    worker. In other steps a worker with its own replica needs no other worker. With `late` the first step counts as an
    exchange, also where a strategy has nothing to exchange in it, as a tournament: it makes no samples safe.
    """
    return (steps + (not late)) % period == 0


def _who_meets(engine: Engine) -> Learners | None:
    """The workers whose samples the step to come makes safe, in groups that share them; None: all share all."""
    placed = engine.placed
    groups = engine.strategy.who_meets(engine.generation.replica.steps, placed.peers.hosts)
    if groups is None:
        return None
    shards = placed.mesh.shards
    return [
        [first * shards + shard for first in group for shard in range(shards)]
        for group in groups
        if len(group) > 1  # what a replica learns alone is gone if it dies
    ]


@contextmanager
def transaction_of(
    engine: Engine, finish: Callable[[float], None], *, is_joint: bool
) -> Iterator[Transaction]:
    """Something that counts for all workers or for none. `is_joint` is whether the other workers depend on it: then,
    should one of them die in it, all that are left roll it back or all commit it."""
    guarded = is_joint and engine.generation.is_own and can_go_on(engine)
    copies, commits = engine.generation.part_copies, engine.progress.commits
    put_back = (lambda: copies.put_back(commits)) if copies is not None else None
    transaction = Transaction(
        undo=Undo(engine.replica, put_back) if guarded else None,
        finish=finish,
        loss=engine.progress.last_loss,
    )
    engine.transaction = transaction if is_joint else None
    yield transaction
    if is_joint and copies is not None:
        copies.make(commits + 1)
    transaction.is_done = True
    if guarded:
        engine.world.exchange([])  # a worker that passes this barrier knows that all have done their part
    finish(transaction.loss)
    engine.transaction = None


def commit(engine: Engine, work: StepInput, handshake: Handshake | None, loss: float, safety: Safety) -> None:
    """The step is made: from here on it counts."""
    progress, feeds, traits, member = engine.progress, engine.feeds, engine.traits, engine.member
    generation = engine.generation
    if "step" in vars(engine.training.optimizer):
        show_step(engine, loss)
    if handshake and not handshake.is_answered:
        handshake.wait()
    answers = handshake.answers if handshake else None
    total = int(answers.total) if answers else work.samples
    progress.steps += 1
    progress.steps_here += 1
    progress.commits += traits.lockstep
    progress.parted = True
    progress.samples += total
    progress.uncounted += work.samples if answers is None else 0
    if feeds.open and traits.lockstep:
        progress.position += total if is_of_main(engine, work) else 0
        if answers:
            feeds.note_step(answers.drawn, safety.is_safe, safety.groups, late=safety.late)
    if generation.used and safety.is_safe:
        # Where gradients come late, this step makes safe what the worker had used before it.
        generation.used.publish(feeds.progress if traits.late else feeds.prospect)
    feeds.note_used()
    pace.after_step(engine, answers)
    if engine.twins is not None and work.parts:
        engine.look_for_twins(answers.signs if answers else None)
    if engine.first_steps.counting is not None:
        engine.say_once(engine.first_steps.look(work.samples))
    if member:
        member.steps = progress.steps
        if progress.steps_here == 1:
            member.tell()  # the generation works
        engine.change_is_due = answers is not None and answers.change
    # Where the script has computed the loss, it may not be known.
    is_known = work.made is None or work.made.loss is not None
    _record(engine, work.samples, loss if is_known else None)
    if engine.saver.writing:
        engine.saver.look()
    engine.clock.lap(total + work.counted)
    is_left_out = not generation.replica.path.is_finite and can_leave_out(engine, loss)
    if is_left_out:
        leave_out(engine)
    if work.samples and is_known:
        progress.last_loss = loss
        progress.last_result = result_of(engine, work, loss)
        if is_left_out:
            return
        if warning := engine.loss_watch.see(progress.steps, loss):
            engine.warn(warning)


def _record(engine: Engine, samples: int, loss: float | None) -> None:
    """A line for those who look on: of the first session, where there are several."""
    if not engine.siblings.places.get(engine.number):
        progress = engine.progress
        samples *= engine.generation.counts
        telemetry.step(step=progress.steps, epoch=progress.epoch, loss=loss, samples=samples)


def result_of(engine: Engine, work: StepInput, loss: float) -> Any:
    """What the script gets: what its loss function returned, or, where another worker has called it, its loss alone."""
    count = len(work.parts)
    replica = engine.generation.replica
    evaluates = replica.needs_closure or len(work.results) < count
    if work.results and not (evaluates and isinstance(work.results[0][0], Tensor)):
        return combined(work.results[:count]) if count > 1 else work.results[0][0]
    dtype = replica.params.dtype
    return torch.tensor(loss, dtype=dtype if dtype.itemsize > 4 else torch.float32)


def is_of_main(engine: Engine, work: StepInput) -> bool:
    """Whether a step counts in the epoch of the script's own loop."""
    feeds = engine.feeds
    return len(feeds.open) == 1 or any(one is feeds.last for one, _ in work.places)
