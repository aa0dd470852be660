"""What a training script holds: the user keeps the loop, the session owns the step."""

import atexit
import contextlib
import os
import struct
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import msgspec
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from manyhands import evaluating, intervals, recovery, resuming, served, strategies, telemetry
from manyhands import placement as placements
from manyhands.checkpoint import background
from manyhands.checkpoint.putting import KEEP
from manyhands.cluster import leaving, worker
from manyhands.cluster.heap import keep_freed_memory
from manyhands.cluster.launchers import local
from manyhands.cluster.member import Member, Regroup
from manyhands.cluster.seat import Seat
from manyhands.cluster.world import Station, World, join
from manyhands.comm.comm import Comm
from manyhands.comm.transports.host import Progress
from manyhands.data.ledger import Dealing, Range, Ranges
from manyhands.data.loading import prefetch, samples_in, split
from manyhands.divergence import LossWatch, Suspects
from manyhands.errors import CheckpointError, ManyhandsError, PeerLost, UsageError
from manyhands.evaluating import Measure
from manyhands.feeding import Feed
from manyhands.intervals import Cadence
from manyhands.meeting import (
    END_OF_DATA,
    EVALUATE,
    FINISH,
    LEAVE,
    NOTHING,
    RESUME,
    SAVE,
    SAVE_NOW,
    STEP,
    Meeting,
    Rows,
    follow_settings,
)
from manyhands.placing import Placing
from manyhands.replica.inheritance import Undo
from manyhands.replica.replica import Loss, Replica, Share
from manyhands.replica.state import States, average_buffers, collect
from manyhands.replica.updates import hyper_parameters, is_watched
from manyhands.saving import Saver
from manyhands.servers.client import Servers
from manyhands.stopwatch import Stopwatch
from manyhands.strategies import Asked

T = TypeVar("T")


def session(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    *,
    scheduler: Any = None,
    clip_norm: float | None = None,
    seed: int = 0,
    save_every: str = intervals.NEVER,
    keep: int = KEEP,
    strategy: str | None = None,
    placement: str | None = None,
    example: Any = None,
) -> "Session":
    """Make this process a worker of the run that it was started in; alone, a world of one.

    A process that was started as a server serves, and ends with the run: it does not return from this call.

    `loss(model, batch)` is the mean over the batch. A `scheduler` given here is stepped after every step and saved with
    the session. `clip_norm` limits the global norm of the gradient. With `save_every` the session saves by itself, as
    `10 min`, `500 steps` or `epoch`, into the run's directory or where checkpoints were last saved or looked for; the
    `keep` newest remain. `strategy` and `placement` are for scripts that insist on one; normally the launcher chooses.
    `example` is a batch on which a placement may measure the model.
    """
    text = strategy or os.environ.get(local.STRATEGY) or strategies.DEFAULT
    leaving.listen()
    made = Session(
        model,
        optimizer,
        loss,
        world=_world(),
        strategy=text,
        placement=placement or os.environ.get(local.PLACEMENT) or placements.DEFAULT,
        example=example,
        scheduler=scheduler,
        clip_norm=clip_norm,
        seed=seed,
        save_every=save_every,
        keep=keep,
        member=_member,
    )
    _sessions.append(weakref.ref(made))
    return made


class Session:
    """The step, the data, evaluation, saving and resuming of one run."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        *,
        world: World | Station,
        strategy: str = strategies.DEFAULT,
        placement: str = placements.DEFAULT,
        example: Any = None,
        scheduler: Any = None,
        clip_norm: float | None = None,
        seed: int = 0,
        save_every: str = intervals.NEVER,
        keep: int = KEEP,
        out: Path | None = None,
        member: Member | None = None,
        journaled: bool = False,
    ) -> None:
        self.strategy_text = strategy  # as a person wrote it: reports show the name they know
        self.strategy = strategies.parse(strategy)
        self.out = out or (Path(os.environ[local.RUN_DIR]) if local.RUN_DIR in os.environ else None)
        hosts = len(world.hosts) if isinstance(world, World) else None
        self.placing = Placing(placement, world.seat.workers, example)
        asked = _asked(self.placing.mesh.replicas, world.seat, optimizer, hosts)
        placements.admit(self.placing.placement, self.placing.mesh, self.strategy, asked)
        strategies.admit(self.strategy, asked)
        strategies.admit_copies(self.strategy, have_hosts=world.seat.address is not None)
        strategies.admit_model(self.strategy, [name for name, _ in model.named_parameters()])
        if isinstance(world, Station):
            survives = local.INVITATION in os.environ
            peers = () if self.placing.is_whole else self.placing.mesh.peers()
            served.be_a_server(
                world,
                model,
                optimizer,
                self.strategy,
                clip_norm,
                self.out,
                survives,
                peers,
                lambda first: recovery.stations(member, first),
            )
        number = world.rank if world.seat.number is None else world.seat.number
        self.world = world
        self.model = model
        self.steps = 0
        self.epoch = 0
        self.position = 0  # samples of this epoch that were used
        self.samples = 0
        self.samples_before = 0  # this epoch
        self.last_loss = float("nan")
        self.measured: dict[str, float] = {}
        self.optimizer = optimizer
        self.loss = loss
        self.clip_norm = clip_norm
        self.scheduler = scheduler
        self.seed = seed
        self.feed = Feed(pooled=self.strategy.pooled)
        self.full = self.placing.mesh.feeds  # batches that make a round, however many workers there are later
        self._trained = sum(len(group["params"]) for group in optimizer.param_groups)
        # Whether the others can finish an update in which one of them dies.
        self.journaled = journaled or member is not None
        self._clock = Stopwatch()
        self._watch = LossWatch(number, self._suspects)
        self._closed = False
        self._broken = ""
        self.parted = False  # whether there were steps since the replicas last agreed
        self._uncounted = 0  # samples of this worker that the others have not heard of
        self._total_bytes: list[float] = []
        self.plan: dict[str, Any] | None = None  # saved with every checkpoint, where there is one
        self.saver = Saver(world, self.warn)
        self.cadence = Cadence(intervals.parse(save_every))
        self._keep = keep
        self.place: Path | None = None  # where checkpoints were last saved or looked for
        self.extra: dict[str, Any] = {}  # what the script last had in one
        self._doing = NOTHING  # of what workers ask each other for
        self._unsaved = ""  # why the last save before the end is not on the disk
        if self.out:
            telemetry.open(self.out / "events" / f"worker-{number}.jsonl", rank=number)
        self.servers: Servers | None = None
        self.staleness: dict[str, Any] | None = None
        # What recovery.py needs to know, and what it leaves here.
        self.member = member
        self.commits = 0  # steps, and agreements of replicas
        self.steps_here = 0  # steps in this generation
        self.transaction: recovery.Transaction | None = None
        self.alone_until = 0  # commits up to which the others are ahead, by steps that need nobody
        self.calls = 0  # of what all scripts do alike: loops, evaluations, checkpoints
        self.caught_up_at = 0  # calls that were made before this worker came, which it passes over
        self.outside = 0  # steps that the script has made outside of loops
        self.outside_before = 0  # of those, made before this worker came
        self._is_in_own_loop = False
        self.resumed: dict[str, Any] | None = None  # what `resume` has returned
        self._progress: Progress | None = None  # rounds of data whose effect is in the host's memory
        self._change_is_due = False
        self._replica: Replica | None = None
        self.has_state = True  # not where the others have gone on without this worker
        # Whether the replica lacks a step that counts, so that another host's must be taken.
        self.is_behind = False
        self.takeovers = 0  # how often this worker has become what another one was
        recovery.surviving(self, self._enter_first)
        telemetry.event("start", workers=self.world.size, strategy=strategy, placement=placement)

    def _enter_first(self) -> None:
        if self._replica is None:  # else it was done while recovering
            recovery.enter(self, self.member.turn if self.member else None)

    def settle_in(self, world: World, replica: Replica, comm: Comm, servers: Servers | None) -> None:
        """A generation begins."""
        if self.world is _current:
            _stay_in(world)
        self.world, self.comm, self.servers = world, comm, servers
        self.saver.world = world
        self._replica = replica
        self.has_state, self.is_behind = True, False
        self._change_is_due = False
        self.steps_here = 0
        # With several hosts it is the servers who know.
        alone = self.strategy.lockstep or (servers is not None and servers.roam)
        self._progress = None if alone else world.host.progress()

    @property
    def replica(self) -> Replica:
        assert self._replica is not None, "the session is not set up yet"
        return self._replica

    @property
    def is_set_up(self) -> bool:
        return self._replica is not None

    @property
    def can_go_on(self) -> bool:
        """Whether the members of the run may change; a process with several sessions cannot rebuild them all."""
        if self.member is None or self._others():
            return False
        # A model that is being divided for the first time is whole nowhere.
        turn = self.member.turn
        return self.placing.is_whole or self.is_set_up or (turn is not None and turn.heirs > 0)

    @property
    def served(self) -> bool:
        """Whether the parameters are on servers; a worker may leave it to a neighbour to speak with them."""
        return self.replica.lent is not None

    # The step

    def step(self, *batches: Any) -> float:
        """One update from one batch, or from several accumulated; returns this worker's mean loss.

        Gradients are weighted by samples over all workers, so batches may differ in size.
        """
        # Fewer workers have more each.
        limit = self.feed.batch if self.placing.mesh.feeds < self.full else None
        pieces = [piece for batch in batches for piece in (split(batch, limit) if limit else [batch])]
        parts = [(piece, samples) for piece in pieces if (samples := samples_in(piece))]
        if self.feed.data is None and not self._is_in_own_loop:
            self.outside += 1
            if self.outside <= self.outside_before:
                return self.last_loss
        places = self.feed.audit.find(batches) if self.feed.data is not None else []
        return self._surviving(lambda: self._step(parts, len(batches), places))

    def _step(self, parts: list[tuple[Any, int]], batches: int, places: Ranges) -> Callable[[], float]:
        """What has to be tried until it is done: this step."""
        steps, takeovers = self.steps, self.takeovers

        def attempt() -> float:
            self._clock.start()
            # It counted after all, or others have used these samples meanwhile.
            if self.steps > steps or self.takeovers > takeovers:
                return self.last_loss
            if not self.strategy.lockstep:
                self._look_up()
                loss = self._run(parts, None, places)
                self._advance(batches)
                self._answer(self._wish(STEP, self.steps))
                return loss
            if self.commits < self.alone_until:
                return self._run(parts, None, places)
            samples = sum(samples for _, samples in parts)
            meeting = self._open(STEP, samples=samples)
            loss = self._run(parts, meeting, places)
            self._answer(meeting.asked())
            return loss

        return attempt

    def _look_up(self) -> None:
        """Where nobody waits for anybody, a worker looks before each step whether there is news."""
        if self.member:
            self.member.check()
            if self.member.wants_change:
                raise Regroup

    def _surviving(self, make: Callable[[], Callable[[], T]]) -> T:
        """Do something together with the others, whoever of them dies meanwhile."""
        with self._together():
            return recovery.surviving(self, make())

    def _call(self, make: Callable[[], Callable[[], T]], otherwise: Callable[[], T]) -> T:
        """The same, for what all scripts do equally often: what was done before this worker came it passes over."""
        if self.feed.data is not None or self._is_in_own_loop:
            return self._surviving(make)  # a loop counts as one, whatever is done in it
        calls = self.calls
        if calls < self.caught_up_at:
            self.calls += 1
            return otherwise()

        def made() -> Callable[[], T]:
            attempt = make()
            return lambda: otherwise() if self.caught_up_at > calls else attempt()

        result = self._surviving(made)
        self.calls = calls + 1
        return result

    @contextmanager
    def _together(self) -> Iterator[None]:
        """For what all workers do at once: whoever fails in it cannot take part in anything more."""
        if self._closed:
            raise UsageError("the session is closed; make a new one to go on training")
        if self._broken:
            raise UsageError(
                f"an earlier step failed ({self._broken}); the other workers could not wait, start again"
            )
        try:
            yield
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise

    def _run(
        self, parts: list[tuple[Any, int]], meeting: Meeting | None, places: Sequence[Range] = ()
    ) -> float:
        """The step itself; without a meeting nobody knows what the others do."""
        own = float(sum(samples for _, samples in parts))
        total = meeting.total if meeting else lambda: own
        ours = meeting.of_replica if meeting else total
        share = Share(parts=parts, total=total if self.strategy.pooled else ours)
        if not parts or not self.strategy.pooled or len(self.world.hosts) == 1 or not self.placing.is_whole:
            total()  # all workers must have asked before anything else is exchanged
        meets = self.strategy.meets(self.replica.steps)
        if self.servers:
            self.servers.used = self.feed.prospect

        def finish(loss: float) -> None:
            self.feed.audit.used += places
            holds_back = self.strategy.holds_back(self.replica, self.comm)
            self._finish(loss, meeting, share, is_safe=meets and not holds_back)

        is_alone = self.replica.is_own and self.placing.is_whole and not meets
        together = self.strategy.lockstep and not is_alone
        with self._transaction(finish, together=together) as transaction:
            transaction.loss = self.strategy.step(self.replica, self.comm, share)
            self.replica.settle()
        return transaction.loss

    @contextmanager
    def _transaction(
        self, finish: Callable[[float], None], *, together: bool
    ) -> Iterator[recovery.Transaction]:
        """Something that, where all do it together, counts for all or for none, should one of them die in it."""
        guarded = self.can_go_on and together and self.replica.is_own
        transaction = recovery.Transaction(
            undo=Undo(self.replica) if guarded else None, finish=finish, loss=self.last_loss
        )
        self.transaction = transaction if together else None
        yield transaction
        transaction.is_done = True
        if guarded:
            self.world.exchange([])  # whoever gets past this knows that all have done their part
        transaction.complete()
        self.transaction = None

    def _finish(self, loss: float, meeting: Meeting | None, share: Share, *, is_safe: bool) -> None:
        """A step is made: whatever happens from here on, it counts."""
        self._show_step(loss)
        if self.scheduler is not None:
            self.scheduler.step()
        self.steps += 1
        self.steps_here += 1
        self.commits += self.strategy.lockstep
        self.parted = True
        total = int(meeting.total()) if meeting else share.samples
        self.samples += total
        if self.feed.data is not None and self.strategy.lockstep:
            self.position += total
            if meeting:
                if self.strategy.late:
                    self.feed.commit()  # what everyone had used before this step
                self.feed.note(meeting.drawn())
                if is_safe and not self.strategy.late:
                    self.feed.commit()
        self._uncounted += 0 if meeting else share.samples
        self.feed.used = self.feed.drawn
        if is_safe:
            self._publish()
        self._clock.lap(total)
        if self.member:
            self.member.stepped(self.steps)
            self._change_is_due = bool(meeting and meeting.change_is_wanted())
        counted = share.samples * self.placing.counts
        telemetry.step(step=self.steps, epoch=self.epoch, loss=loss, samples=counted)
        self.saver.look()
        if share.parts:
            self.last_loss = loss
            if warning := self._watch.see(self.steps, loss):
                self.warn(warning)

    def _publish(self) -> None:
        """Where nobody waits: what this worker has used so far is safe, should it die."""
        if self._progress:
            self._progress.publish(self.feed.progress)

    def _show_step(self, loss: float) -> None:
        """Hooks and schedulers see `step` called also where others make the update; without gradients it changes
        nothing."""
        evaluates = self.replica.needs_closure
        if is_watched(self.optimizer) and (self.served or not evaluates):
            self.optimizer.step(*[lambda: loss] * evaluates)

    def warn(self, warning: str) -> None:
        """Every worker records what it saw; one says it, since all are likely to see the same."""
        telemetry.event("warning", step=self.steps, text=warning)
        if self.world.rank == 0:
            print(f"warning: step {self.steps}: {warning}", file=sys.stderr, flush=True)

    def _suspects(self) -> Suspects:
        """What a loss that goes wrong may be due to."""
        staleness = float(self.strategy.updates_late(self.world.size, len(self.world.hosts)))
        with contextlib.suppress(PeerLost):
            if self.servers:
                staleness = served.staleness(self.servers.reports())["mean"]
        return Suspects(
            rate=max(float(group.get("lr", 0.0)) for group in self.optimizer.param_groups),
            staleness=staleness,
            period=self.strategy.period,
        )

    def _advance(self, batches: int) -> None:
        """Where nobody waits, a worker that has used some of its batches assumes the same of the others."""
        if self.feed.dealing is not None and self.feed.data is not None:
            used = batches * self.feed.dealing.round_samples
            self.position = min(len(self.feed.data), self.position + used)

    def _open(self, purpose: int, *, samples: int = 0) -> Meeting:
        """Tell everyone what this worker has come for, and what it brings."""
        if self._change_is_due:
            raise Regroup
        count = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if count != self._trained:
            raise UsageError(
                f"the optimizer had {self._trained} parameters when the session was made and has {count} now; "
                "close the session and make a new one"
            )
        values = hyper_parameters(self.optimizer)
        digest = zlib.crc32(struct.pack(f"{len(values)}d", *values))
        change = self.member is not None and self.member.wants_change
        # What a script has not used by the end of a loop it does not want.
        used = self.feed.drawn if purpose in (STEP, END_OF_DATA) else self.feed.used
        wish = self._wish(purpose, self.steps + 1)
        rows = self.world.start_exchange(
            [float(number) for number in (purpose, samples, digest, used, change, wish)]
        )
        return Meeting(rows, self._same_hyper_parameters, self.placing.mesh, self.world.rank)

    def _wish(self, purpose: int, steps: int) -> int:
        """What this worker asks all others to do with it, after so many steps."""
        if leaving.is_asked() and purpose not in (RESUME, FINISH):
            return LEAVE
        is_due = purpose == STEP and self.cadence.is_due(steps=steps, epochs=self.epoch)
        return max(self._doing, SAVE_NOW if is_due else NOTHING)

    def _answer(self, asked: int) -> None:
        """Do what someone has asked for; all do it at the same point."""
        if asked <= self._doing:
            return
        before, self._doing = self._doing, asked
        try:
            if asked == LEAVE:
                self._save_and_leave()
            self._save(self.place or self._checkpoints(None), self.extra, self._keep)
        finally:
            self._doing = before

    def _save_and_leave(self) -> NoReturn:
        """The machine is about to be taken away."""
        place = self.place or (self.out / "checkpoints" if self.out else None)
        has_place = self.world.exchange([float(place is not None)])[0][0]
        if has_place:
            self._save(place or Path(), self.extra, self._keep)
            if problem := self._saved():
                raise CheckpointError(problem)
        if self.world.rank == 0:
            what = f"saved step {self.steps} in {place}" if has_place else "there is no directory to save in"
            print(f"asked to leave: {what}", file=sys.stderr, flush=True)
        self._closed = True
        telemetry.event("end", step=self.steps)
        if self.servers is not None:
            self.servers.close()
        raise SystemExit(local.EXIT_SAVED if has_place else local.EXIT_TERMINATED)

    def _same_hyper_parameters(self, rows: Rows) -> None:
        if self.strategy.same_settings:
            follow_settings(rows, self.optimizer, self.world)

    def _gather_everyone(self, purpose: int) -> None:
        """Take part in the others' steps, without data of our own, until all have come for the same thing."""
        while True:
            if not self.strategy.lockstep:
                self._look_up()
                self.strategy.leave(self.replica, self.comm)
                self._publish()
            while self.commits < self.alone_until:
                self._run([], None)
            meeting = self._open(purpose)
            if meeting.anyone_steps():
                self._run([], meeting)
                self._answer(meeting.asked())
            elif meeting.asked() > self._doing:
                self._answer(meeting.asked())
            elif meeting.is_unanimous():
                break
        if self.feed.is_under_way:
            self.feed.note(meeting.drawn())
        self._change_is_due = meeting.change_is_wanted()
        if not self.strategy.lockstep:
            rows = self.world.exchange([float(self._uncounted), float(self.parted), float(self.position)])
            others = sum(int(row[0]) for row in rows) - self._uncounted
            self.samples += others
            self._clock.add(others)
            self._uncounted = 0
            self.parted = any(row[1] for row in rows)
            self.position = int(min(row[2] for row in rows))  # nothing is lost of what the slowest has left
            self.feed.commit()

    def others_progress(self) -> list[int]:
        """Where nobody waits: what each worker's steps have left in the host's memory is what they have used."""
        return self._progress.values() if self._progress else []

    def settle_alone(self, progress: Sequence[int]) -> None:
        """How far each worker had come is what counts."""
        if progress and self.feed.data is not None:
            self.feed.note_progress(progress)
            self.feed.commit()

    # The data

    def batches(
        self, data: Dataset[Any] | Iterable[Any], *, batch_size: int | None = None, shuffle: bool = True
    ) -> Iterator[Any]:
        """This worker's share of an epoch, loaded ahead in the background.

        Either a data set (anything with a length and items) and the batch size per worker, or an iterable of batches
        that are already this worker's own. Workers may have different numbers of batches: whoever is out of data
        takes part in the others' steps until all are. A data set gives every worker the same number of batches; the
        last one may be empty on some. A loop left early has not finished the epoch: the next call with the same data
        goes on with the samples that are left.
        """
        if batch_size is None:
            if hasattr(data, "__getitem__") and not isinstance(data, (list, tuple)):
                raise UsageError("session.batches(dataset) needs batch_size=… (samples per worker and step)")
            yield from self._own_batches(data)
            return
        if self.calls < self.caught_up_at:
            self.calls += 1
            return
        begins = self.feed.begin(
            data,
            epoch=self.epoch,
            seed=self.seed,
            batch=batch_size,
            shuffle=shuffle,
            workers=self.placing.mesh.feeds,
            full=self.full,
        )
        if begins:
            self.samples_before = self.samples - self.position
        self._clock.start()
        try:
            while not (yield from self._epoch()):
                pass
        finally:
            self.feed.data = None
            self._clock.stop()

    def _own_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Batches that are this worker's alone: nobody else could use them in its place."""
        if self.calls < self.caught_up_at:
            self.calls += 1
            return
        calls = self.calls
        ahead = prefetch(batches)
        self._clock.start()
        self._is_in_own_loop = True
        try:
            yield from ahead
            self._surviving(lambda: lambda: self._end_of_data(calls))
        finally:
            self._is_in_own_loop = False
            ahead.close()
            self._clock.stop()

    def _epoch(self) -> Generator[Any, None, bool]:
        """What this worker gets of what is left of the epoch; says whether the epoch is over then."""
        calls, dealing = self.calls, self.feed.dealing
        assert dealing is not None
        ahead = prefetch(self.feed.batches(dealing, self.placing.feed))
        try:
            for places, batch in ahead:
                self.feed.drawn += 1
                self.feed.audit.hand(batch, places)
                yield batch
                if self.feed.dealing is not dealing or self.caught_up_at > calls:
                    break
        finally:
            ahead.close()
        self._surviving(lambda: lambda: self._end_of_data(calls, dealing))
        return self.calls > calls

    def _end_of_data(self, calls: int, dealing: Dealing | None = None) -> None:
        """Wait for everyone; if members have changed since, there may be more to do for this worker."""
        if self.caught_up_at > calls:  # the others had all that they needed of us
            self.calls = calls + 1
        if self.calls > calls or (dealing and self.feed.dealing is not dealing):
            return
        self._gather_everyone(END_OF_DATA)
        if self.member:
            self._agree()  # an epoch is over when what was learned in it is safe
        self.feed.commit()
        if dealing and not self.feed.is_complete:
            self.feed.deal(self.placing.mesh.feeds)
            return
        if dealing:
            self.feed.end_epoch(self._everyones_notes())
            self.samples = self.samples_before + self.feed.length  # what the dead had used does not count
        self.calls += 1
        self.epoch += 1
        self.position = 0
        if self.cadence.is_due_at_the_end_of(self.epoch):
            self._answer(SAVE_NOW)

    def _everyones_notes(self) -> list[Ranges]:
        """Of the samples that the steps of each worker have used in this epoch."""
        used = self.feed.audit.used if self.placing.counts else []
        said = self.world.gather(msgspec.json.encode(used))
        return [msgspec.json.decode(row, type=Ranges) for row in said]

    # Evaluation

    def evaluate(
        self, data: Any, *, batch_size: int = 256, measures: Mapping[str, Measure] | None = None
    ) -> dict[str, float]:
        """Mean loss and measures over a data set, computed by all workers together; the same result on each.

        The running statistics of batch norm become the mean over all workers first.
        """
        judges = {"loss": self.loss, **(measures or {})}

        def attempt() -> dict[str, float]:
            with self.replica.judged():
                return self._evaluate(data, batch_size, judges)

        return self._call(lambda: attempt, lambda: self.measured)

    def _evaluate(self, data: Any, batch_size: int, judges: dict[str, Measure]) -> dict[str, float]:
        self._pause(EVALUATE)
        self.measured = evaluating.measure(
            self.replica.part,
            data,
            judges,
            batch_size=batch_size,
            epoch=self.epoch,
            world=self.world,
            placing=self.placing,
        )
        telemetry.event("evaluate", step=self.steps, epoch=self.epoch, **self.measured)
        return self.measured

    def _pause(self, purpose: int) -> None:
        """Before anything that is not a step: everyone is here, parameters and buffers are the same everywhere."""
        self._clock.stop()
        self._gather_everyone(purpose)
        self._agree()
        average_buffers(self.replica.part.buffers(), self.placing.observers)

    def _agree(self) -> None:
        """The parameters of all replicas are the same from here on, and what was learned is safe."""
        if not self.parted:
            return

        def finish(loss: float) -> None:
            self.parted = False
            self.commits += 1
            self.feed.commit()

        with self._transaction(finish, together=True):
            self.strategy.agree(self.replica, self.comm)
            if self.member:
                self.world.exchange([])  # hosts, too, must not be more than this apart
            else:
                self.world.host.barrier()

    # Saving and resuming

    def save(
        self,
        directory: Path | str | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
        wait: bool = False,
    ) -> Path:
        """Save a complete checkpoint and return the directory that it will be in; the `keep` newest remain there.

        Training stops for a copy of the state into memory. Another process writes it, and a failure of that is a
        warning; the next save waits for it, and so does the end, where a checkpoint that could not be written is
        an error. With `wait` the checkpoint is on the disk when this returns.
        """
        target = self._checkpoints(directory)

        def attempt() -> Path:
            self._save(target, dict(extra or {}), self._keep if keep is None else keep)
            if wait and (problem := self._saved()):
                raise CheckpointError(problem)
            return target

        return self._call(lambda: attempt, lambda: target)

    def _save(self, target: Path, extra: dict[str, Any], keep: int) -> None:
        began_s = time.monotonic()
        self._pause(SAVE)
        self._write(target, extra, keep)
        telemetry.event("checkpoint", step=self.steps, stopped_s=time.monotonic() - began_s)

    def _write(self, target: Path, extra: dict[str, Any], keep: int) -> None:
        """All have paused."""
        resuming.save(self, target, extra, keep)
        self.place, self.extra = target, extra
        self.cadence.mark(steps=self.steps, epochs=self.epoch)

    def _saved(self) -> str:
        """When all saves are over: why the last one is not on the disk, if it is not."""
        while (problem := self.saver.outcome()) is None:
            self._write(self.place or Path(), self.extra, self._keep)
        return problem

    def resume(self, directory: Path | str | None = None) -> dict[str, Any] | None:
        """Go on from the newest checkpoint there; returns what was given as `extra`, or None if there is none."""
        target = self._checkpoints(directory)

        def attempt() -> dict[str, Any] | None:
            self._pause(RESUME)
            self.resumed = resuming.resume(self, target)
            self.place = target  # where the next run will look
            if self.resumed is not None:
                self.extra = self.resumed
                self.cadence.mark(steps=self.steps, epochs=self.epoch)
            return self.resumed

        return self._call(lambda: attempt, lambda: self.resumed)

    def _checkpoints(self, directory: Path | str | None) -> Path:
        if directory is not None:
            return Path(directory)
        if self.out is None:
            raise UsageError(
                "without a run directory, name one: session.save(directory), or launch with --out"
            )
        return self.out / "checkpoints"

    def collect(self) -> tuple[dict[str, Tensor], States]:
        """The state of the optimizer, and what the strategy keeps, as a checkpoint holds it."""
        if self.served:
            return served.collect(self.servers, self.replica, self.placing.peers)
        return collect(self.replica, self.placing.peers)

    # The end

    def summary(self) -> dict[str, Any]:
        """What the run did so far, as `summary.json` has it; bytes are this worker's until the session is closed,
        then everyone's."""
        bytes_sent, shared_bytes = self._total_bytes or _own_bytes()
        more = {"servers": self.world.servers, "staleness": self.staleness} if self.served else {}
        return {
            "samples_per_second": round(self._clock.rate(), 2),
            "loss": self.measured.get("loss", self.last_loss),
            "accuracy": self.measured.get("accuracy"),
            "steps": self.steps,
            "samples": self.samples,
            "epochs": self.epoch,
            "workers": self.world.size,
            "hosts": len(self.world.hosts),
            "strategy": self.strategy_text,
            "placement": placements.describe(self.placing.placement),
            "bytes_sent": int(bytes_sent),
            "shared_bytes": int(shared_bytes),
            "wall_s": round(self._clock.wall_s(), 3),
            "committed": self.feed.report,
            **more,
        }

    def close(self) -> None:
        """Wait for everyone, write the summary, and leave the model usable by itself."""
        if not self._closed and not self._broken:
            self._end()
            model = recovery.surviving(self, lambda: self.placing.give_back(self.replica, *self.collect()))
            with contextlib.suppress(*((PeerLost,) if self.member else ())):
                self.replica.release()
            self.replica.part.become_whole(model)
            if self.servers is not None:
                self.servers.close()
            self._complain()

    def finish(self) -> None:
        """Wait for everyone and write the summary; what happens at the end of a process that did not close."""
        if not self._closed and not self._broken:
            self._end()
            if self.servers is not None:
                self.servers.close()
            self._complain()

    def _complain(self) -> None:
        """All is over and done, but for one thing."""
        if self._unsaved:
            raise CheckpointError(self._unsaved)

    def _end(self) -> None:
        self._surviving(lambda: self._end_together)
        self._closed = True
        telemetry.event("end", step=self.steps)
        if self.out and self.world.rank == 0:
            temporary = self.out / ".summary.json"
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(self.summary())))
            temporary.replace(self.out / "summary.json")
        others = self._others()
        if not others:
            leaving.stop_listening()
        if self.out and not any(other.out == self.out for other in others):
            telemetry.close()  # now what it has recorded is on the disk

    def _others(self) -> "list[Session]":
        """The other sessions of this process that are not closed."""
        return [other for other in _open_sessions() if other is not self]

    def _end_together(self) -> None:
        self._pause(FINISH)
        if any(row[0] for row in self.world.exchange([float(self.cadence.is_behind(self.steps))])):
            self._write(self.place or self._checkpoints(None), self.extra, self._keep)
        self._unsaved = self._saved()
        self.feed.end(self._everyones_notes())
        everyone = self.world.exchange(_own_bytes())
        self._total_bytes = [sum(column) for column in zip(*everyone, strict=True)]
        if self.served:
            reports = served.report(self.servers, self.world)
            self._total_bytes[0] += sum(one.bytes_sent for one in reports)
            self.staleness = served.staleness(reports)

    def leave_run(self) -> None:
        """This worker was asked to leave, and does not take part any more."""
        self._closed = True
        telemetry.event("end", step=self.steps)

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.saver.wait_alone()  # what was copied before an error is as good as ever


def _asked(replicas: int, seat: Seat, optimizer: Optimizer, hosts: int | None) -> Asked:
    name = type(optimizer).__name__.lower()
    # What a run was begun with was let pass; whoever comes later need not find as many.
    workers = seat.rows if seat.generation and not seat.address else replicas
    return Asked(workers=workers, servers=seat.servers, optimizer=name, hosts=hosts)


def _own_bytes() -> list[float]:
    totals = telemetry.totals()
    return [float(totals.get(name, 0)) for name in ("bytes_sent", "shared_bytes")]


_current: World | Station | None = None
_member: Member | None = None


def _world() -> World | Station:
    """The world of this process: joined once, left at exit."""
    global _current, _member
    if _current is None:
        keep_freed_memory()
        _member = recovery.membership(os.environ)
        _current = recovery.first_world(_member) if _member else join()
        atexit.register(_leave, os.getpid())
        worker.before_termination.append(background.abandon_all)
    return _current


def _stay_in(world: World) -> None:
    global _current
    _current = world


def host_count() -> int:
    """On how many hosts the workers of this run are."""
    world = _world()
    return len(world.neighbours.workers(world.seat))


def worker_count() -> int:
    """How many workers there are in this run."""
    return _world().seat.workers


_sessions: "list[weakref.ref[Session]]" = []  # in the order in which they were made, the same on all workers


def _open_sessions() -> "list[Session]":
    return [one for reference in _sessions if (one := reference()) is not None and not one._closed]


def _leave(pid: int) -> None:
    """At exit: wait for the others, unless this process ends because of an error or is a fork of the worker."""
    global _current
    if os.getpid() != pid:
        return
    problem: ManyhandsError | None = None
    end = getattr(sys, "last_value", None)
    if end is None:
        try:
            for open_session in _open_sessions():
                open_session.finish()
        except (PeerLost, SystemExit):
            pass  # whoever died meanwhile says why, and whoever told us to end knows it: there is nothing to add
        except ManyhandsError as error:
            problem = error
    for open_session in _open_sessions():
        open_session.saver.wait_alone()  # what was copied before an error is as good as ever
    if _current is not None:
        _current.close()
        _current = None
    is_good = end is None or (isinstance(end, SystemExit) and end.code in local.GOOD_ENDS)
    if _member is not None and is_good and not problem:
        _member.close()  # else the others would go on without it, as if it had not been an error that ends the run
    if problem:
        worker.refuse(problem, local.EXIT_REFUSED)
        telemetry.close()
        os._exit(local.EXIT_REFUSED)  # at this point an exception would no longer change the exit code
