"""One step, from top to bottom: take the batches, tell the other workers, compute and exchange, commit.

    take        the batches as parts of at most so many samples, and which samples of the epoch they are
    handshake   every worker says what it brings, and hears how many samples all have
    strategy    gradients, exchange, update
    commit      counters, ledger, records; from here on the step counts, whichever worker dies

Every step is a transaction. If a worker dies in the middle, the others settle with the coordinator whether the step
counts, and make the attempt again in the next generation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.optim import Optimizer

from manyhands import telemetry
from manyhands.cluster.worker.member import Regroup
from manyhands.data.effect import Learners
from manyhands.data.ledger import Ranges
from manyhands.data.loading import parts_of
from manyhands.engine import handshake as handshakes
from manyhands.engine.elastic import can_go_on, recover
from manyhands.engine.engine import Engine, Transaction
from manyhands.engine.handshake import STEP, Handshake
from manyhands.errors import PeerLost, UsageError
from manyhands.replica.optimizer.abilities import HOOKS
from manyhands.replica.part import Share
from manyhands.replica.state.inheritance import Undo

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepInput:
    """What a script gave to one step."""

    parts: list[tuple[Any, int]]
    """Batches, each with its number of samples."""
    samples: int
    batches: int
    places: Ranges
    """Where the samples lie in the order of the epoch."""


NO_WORK = StepInput([], 0, 0, [])


@dataclass(frozen=True, slots=True)
class Safety:
    """Whether what a step has learned survives the death of its worker, and which workers share it (None: all)."""

    is_safe: bool
    groups: Learners | None


def step(engine: Engine, batches: Sequence[Any], answer: Callable[[Engine, int], None]) -> float:
    """Make one step; returns the mean loss of this worker. Then all workers `answer` what one of them asked for."""
    progress, feed = engine.progress, engine.feed
    if feed.data is None and not feed.is_in_own_loop:
        progress.outside += 1
        if progress.outside <= progress.outside_before:
            return progress.last_loss
    work = _take(engine, batches)
    steps, takeovers = progress.steps, progress.takeovers

    def attempt() -> float:
        if not engine.clock.is_running:
            engine.clock.start()
        # The step counted after all, or other workers have used these samples meanwhile.
        if progress.steps > steps or progress.takeovers > takeovers:
            return progress.last_loss
        if progress.commits < progress.alone_until:
            return run(engine, work, None)
        if engine.traits.lockstep:
            handshake = handshakes.begin(engine, STEP, samples=work.samples)
            loss = run(engine, work, handshake)
            asked = handshake.answers.asked
        else:
            loss = _step_alone(engine, work)
            asked = handshakes.wish(engine, STEP, progress.steps)
        if asked > engine.answering:
            answer(engine, asked)
        return loss

    return together(engine, attempt)


def _take(engine: Engine, batches: Sequence[Any]) -> StepInput:
    """Where the batches of fewer workers make a step, each worker has more than fits at a time: cut it."""
    generation, feed = engine.generation, engine.feed
    limit = feed.batch if generation.feeds < engine.progress.full else None
    parts, total = parts_of(batches, limit, generation.device)
    places = feed.audit.find(batches, total) if feed.data is not None else []
    return StepInput(parts, total, len(batches), places)


# What all workers do together


def together(engine: Engine, attempt: Callable[[], T]) -> T:
    """Do something together with the other workers, whichever of them die meanwhile. A worker that fails in it takes
    part in nothing more."""
    if engine.is_closed:
        raise UsageError("the session is closed; make a new one to go on training")
    if engine.failure:
        raise UsageError(
            f"an earlier step failed ({engine.failure}); the other workers could not wait, start again"
        )
    try:
        return survive(engine, attempt)
    except BaseException as error:
        engine.failure = f"{type(error).__name__}: {error}"
        raise


def survive(engine: Engine, attempt: Callable[[], T]) -> T:
    """Make an attempt, and make it again in the next generation if members change in it."""
    while True:
        try:
            return attempt()
        except (PeerLost, Regroup) as cause:
            recover(engine, cause)


# One attempt


def _step_alone(engine: Engine, work: StepInput) -> float:
    """A step that waits for no other worker."""
    look_up(engine)
    loss = run(engine, work, None)
    progress, feed = engine.progress, engine.feed
    if feed.data is not None:
        # A worker that has used some of its batches assumes the same of the others.
        used = work.batches * feed.round_samples
        progress.position = min(len(feed.data), progress.position + used)
    return loss


def look_up(engine: Engine) -> None:
    """Where workers do not wait for each other: raise if this generation is over."""
    member = engine.member
    if member and member.is_over:
        member.check()
    if member and member.wants_change:
        raise Regroup


def run(engine: Engine, work: StepInput, handshake: Handshake | None) -> float:
    """The step itself; without a handshake this worker does not know what the others do."""
    generation, strategy = engine.generation, engine.strategy
    replica = generation.replica
    share = _share(engine, work, handshake)
    meets = exchanges(replica.steps, engine.period, late=engine.traits.late)
    groups = _who_meets(engine) if meets and engine.has_groups and generation.replicas > 1 else None
    if generation.servers:
        generation.servers.used = engine.feed.prospect

    def finish(loss: float) -> None:
        engine.feed.audit.used += work.places
        # What a worker keeps, and the servers do not have, is gone if the worker dies.
        servers, kept = generation.comm.servers, replica.kept
        defers = servers is not None and (servers.defers() or (kept.state is not None and len(kept) > 0))
        commit(engine, work, handshake, loss, Safety(meets and not defers, groups))

    # A worker whose replica is its own needs no other worker between two exchanges.
    is_joint = engine.traits.lockstep and (meets or not generation.is_whole or not generation.is_own)
    with transaction_of(engine, finish, is_joint=is_joint) as transaction:
        transaction.loss = strategy.step(replica, generation.fleet or generation.comm, share)
        replica.settle()
    return transaction.loss


def _share(engine: Engine, work: StepInput, handshake: Handshake | None) -> Share:
    """This worker's part of the step, and how its gradients are weighted."""
    own = float(work.samples)
    if handshake is None:
        return Share(parts=work.parts, samples=work.samples, total=lambda: own)
    pooled, generation = engine.traits.pooled, engine.generation
    # All workers must have answered before anything else is exchanged; only where every worker has data, those of
    # other hosts may answer while the forward pass runs.
    if not handshake.is_answered and not (work.parts and pooled and generation.is_whole):
        handshake.wait()
    total = handshake.total if pooled else handshake.of_replica
    return Share(parts=work.parts, samples=work.samples, total=total)


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
    transaction = Transaction(
        undo=Undo(engine.replica) if guarded else None, finish=finish, loss=engine.progress.last_loss
    )
    engine.transaction = transaction if is_joint else None
    yield transaction
    transaction.is_done = True
    if guarded:
        engine.world.exchange([])  # a worker that passes this barrier knows that all have done their part
    finish(transaction.loss)
    engine.transaction = None


def commit(engine: Engine, work: StepInput, handshake: Handshake | None, loss: float, safety: Safety) -> None:
    """The step is made: from here on it counts."""
    progress, feed, traits, member = engine.progress, engine.feed, engine.traits, engine.member
    generation, training = engine.generation, engine.training
    if _is_watched(training.optimizer):
        _show_step(engine, loss)
    if training.scheduler is not None:
        training.scheduler.step()
    if handshake and not handshake.is_answered:
        handshake.wait()
    answers = handshake.answers if handshake else None
    total = int(answers.total) if answers else work.samples
    progress.steps += 1
    progress.steps_here += 1
    progress.commits += traits.lockstep
    progress.parted = True
    progress.samples += total
    if answers is None:
        progress.uncounted += work.samples
    if feed.data is not None and traits.lockstep:
        progress.position += total
        if answers:
            feed.note_step(answers.drawn, safety.is_safe, safety.groups, late=traits.late)
    if generation.used and safety.is_safe:
        # Where gradients come late, this step makes safe what the worker had used before it.
        generation.used.publish(feed.progress if traits.late else feed.prospect)
    feed.used = feed.drawn
    if member:
        member.steps = progress.steps
        if progress.steps_here == 1:
            member.tell()  # the generation works
        engine.change_is_due = answers is not None and answers.change
    telemetry.step(
        step=progress.steps, epoch=progress.epoch, loss=loss, samples=work.samples * generation.counts
    )
    if engine.saver.writing:
        engine.saver.look()
    engine.clock.lap(total)
    if work.parts:
        progress.last_loss = loss
        if warning := engine.loss_watch.see(progress.steps, loss):
            engine.warn(warning)


def publish(engine: Engine) -> None:
    """Where workers do not wait for each other: what this worker has used so far survives its death."""
    if engine.generation.used:
        engine.generation.used.publish(engine.feed.progress)


def _is_watched(optimizer: Optimizer) -> bool:
    """Whether hooks, or a scheduler that replaced the method, want to see `step` called on the user's optimizer."""
    state = vars(optimizer)
    return "step" in state or any(state.get(name) for name in HOOKS)


def _show_step(engine: Engine, loss: float) -> None:
    """Call `step` also where servers or a shared replica make the update; without gradients it changes nothing."""
    evaluates = engine.replica.needs_closure
    if engine.served or not evaluates:
        engine.training.optimizer.step(*[lambda: loss] * evaluates)
