"""What a training script holds: the user keeps the loop, the session owns the step."""

import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar, cast

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from manyhands import placement as placements
from manyhands import strategies, telemetry
from manyhands.checkpoint.publish import KEEP
from manyhands.cluster.launchers import local
from manyhands.cluster.worker import leaving
from manyhands.cluster.worker.member import Member, Regroup
from manyhands.cluster.worker.world import ServerContext, World
from manyhands.data.loading import moved, prefetch, samples_in, split
from manyhands.engine import evaluate, intervals, join, pause, resume, save, worker_process
from manyhands.engine.build import service_of
from manyhands.engine.elastic import recover
from manyhands.engine.engine import Engine, admit
from manyhands.engine.evaluate import Measure
from manyhands.engine.handshake import EVALUATE, FINISH, RESUME
from manyhands.engine.rejoin import enter_first
from manyhands.engine.settings import Settings, Training
from manyhands.engine.step import StepInput, attempt_of
from manyhands.engine.summary import own_bytes, summarize, write_summary
from manyhands.errors import CheckpointError, PeerLost, UsageError
from manyhands.replica.part import Loss
from manyhands.servers.process.startup import be_a_server
from manyhands.servers.worker.reports import report, staleness

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

    `loss(model, batch)` is the mean over the batch. The session steps a `scheduler` after every step
    and saves it; one that needs a measure, as ReduceLROnPlateau does, the script steps itself.
    `clip_norm` limits the global norm of the gradient. With `save_every` the session saves by itself,
    as `10 min`, `500 steps` or `epoch`, into the run's directory or where checkpoints were last saved
    or looked for; the `keep` newest remain. `strategy` and `placement` are for scripts that insist on
    one; normally the launcher chooses. `example` is a batch on which a placement may measure the model.
    """
    settings = Settings(
        strategy=strategy or os.environ.get(local.STRATEGY) or strategies.DEFAULT,
        placement=placement or os.environ.get(local.PLACEMENT) or placements.DEFAULT,
        example=example,
        clip_norm=clip_norm,
        seed=seed,
        save_every=save_every,
        keep=keep,
        out=Path(os.environ[local.RUN_DIR]) if local.RUN_DIR in os.environ else None,
    )
    leaving.listen()
    training = Training(model=model, optimizer=optimizer, loss=loss, scheduler=scheduler)
    world = worker_process.own_world()
    made = Session(training, settings, world, worker_process.own_member())
    worker_process.register(made)
    return made


class Session:
    """The step, the data, evaluation, saving and resuming of one run."""

    def __init__(
        self,
        training: Training,
        settings: Settings,
        world: World | ServerContext,
        member: Member | None = None,
    ) -> None:
        admit(settings, training, world)
        if isinstance(world, ServerContext):
            _serve(training, settings, world, member)
        self.engine = Engine(training, settings, world, member)
        self._is_in_own_loop = False
        self._unsaved = ""  # why the last save before the end is not on the disk
        if settings.out:
            number = world.rank if world.rank_info.number is None else world.rank_info.number
            telemetry.open(settings.out / "events" / f"worker-{number}.jsonl", rank=number)
        self._surviving(lambda: enter_first(self.engine))
        telemetry.event(
            "start", workers=self.workers, strategy=settings.strategy, placement=settings.placement
        )

    # Where the run is

    @property
    def rank(self) -> int:
        """Which worker this is, of `workers`; it may change when another worker dies."""
        return self.world.rank

    @property
    def workers(self) -> int:
        return self.world.size

    @property
    def is_main(self) -> bool:
        """Whether this worker is the one that prints and writes for all."""
        return self.rank == 0

    @property
    def world(self) -> World:
        return self.engine.world

    @property
    def model(self) -> nn.Module:
        return self.engine.training.model

    @property
    def optimizer(self) -> Optimizer:
        return self.engine.training.optimizer

    @property
    def out(self) -> Path | None:
        """The run's directory."""
        return self.engine.settings.out

    @property
    def steps(self) -> int:
        return self.engine.progress.steps

    @property
    def epoch(self) -> int:
        return self.engine.progress.epoch

    @property
    def samples(self) -> int:
        """How many samples the steps of all workers have used."""
        return self.engine.progress.samples

    @property
    def position(self) -> int:
        """How many samples of this epoch."""
        return self.engine.progress.position

    @property
    def measured(self) -> dict[str, float]:
        """What the last evaluation found."""
        return self.engine.progress.measured

    @property
    def is_closed(self) -> bool:
        return self.engine.is_closed

    def warn(self, warning: str) -> None:
        """Record a warning; worker 0 prints it."""
        self.engine.warn(warning)

    # The step

    def step(self, *batches: Any) -> float:
        """One update from one batch, or from several accumulated; returns this worker's mean loss.

        Gradients are weighted by samples over all workers, so batches may differ in size. They move to the
        model's device.
        """
        engine = self.engine
        feed, progress = engine.feed, engine.progress
        # Fewer workers have more each.
        limit = feed.batch if engine.generation.feeds < progress.full else None
        pieces = [piece for batch in batches for piece in split(batch, limit)] if limit else batches
        if not engine.generation.on_cpu:
            pieces = [moved(piece, engine.replica.params.device) for piece in pieces]
        parts = [(piece, samples) for piece in pieces if (samples := samples_in(piece))]
        total = sum([samples for _, samples in parts])
        places = feed.audit.find(batches, total) if feed.data is not None else []
        if feed.data is None and not self._is_in_own_loop:
            progress.outside += 1
            if progress.outside <= progress.outside_before:
                return progress.last_loss
        return self._together(attempt_of(engine, StepInput(parts, total, len(batches), places), pause.answer))

    def _together(self, attempt: Callable[[], T]) -> T:
        """Do something together with the other workers, whichever of them die meanwhile. A worker that fails in it
        cannot take part in anything more."""
        engine = self.engine
        if engine.is_closed:
            raise UsageError("the session is closed; make a new one to go on training")
        if engine.failure:
            raise UsageError(
                f"an earlier step failed ({engine.failure}); the other workers could not wait, start again"
            )
        try:
            return self._surviving(attempt)
        except BaseException as error:
            engine.failure = f"{type(error).__name__}: {error}"
            raise

    def _surviving(self, attempt: Callable[[], T]) -> T:
        """Make an attempt, again if members change in it, in one generation after the other."""
        while True:
            try:
                return attempt()
            except (PeerLost, Regroup) as cause:
                recover(self.engine, cause)

    def _call(self, attempt: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """As above, for calls that every script makes equally often; a late joiner skips those made before it
        joined."""
        if self.engine.feed.data is not None or self._is_in_own_loop:
            return self._together(attempt)  # a loop counts as one call, whatever is done in it
        progress = self.engine.progress
        calls = progress.calls
        if calls < progress.caught_up_at:
            progress.calls += 1
            return otherwise()
        result = self._together(lambda: otherwise() if progress.caught_up_at > calls else attempt())
        progress.calls = calls + 1
        return result

    # The data

    def batches(
        self, data: Dataset[Any] | Iterable[Any], *, batch_size: int | None = None, shuffle: bool = True
    ) -> Iterator[Any]:
        """This worker's share of an epoch, loaded ahead in the background.

        Either a data set (anything with a length and items) and the batch size per worker, or an iterable of batches
        that are already this worker's own. Workers may have different numbers of batches: a worker that is out of data
        takes part in the others' steps until all are. A data set gives every worker the same number of batches; the
        last one may be empty on some. A loop left early has not finished the epoch: the next call with the same data
        goes on with the samples that are left.
        """
        engine, progress = self.engine, self.engine.progress
        if batch_size is None and hasattr(data, "__getitem__") and not isinstance(data, (list, tuple)):
            raise UsageError("session.batches(dataset) needs batch_size=… (samples per worker and step)")
        if progress.calls < progress.caught_up_at:
            progress.calls += 1
            return
        if batch_size is None:
            yield from self._own_batches(cast(Iterable[Any], data))
            return
        begins = engine.feed.begin(
            data,
            epoch=progress.epoch,
            seed=progress.seed,
            batch=batch_size,
            shuffle=shuffle,
            workers=engine.placed.mesh.feeds,
            full=progress.full,
        )
        if begins:
            progress.samples_before = progress.samples - progress.position
        engine.clock.start()
        try:
            while not (yield from self._epoch()):
                pass
        finally:
            engine.feed.data = None
            engine.clock.stop()

    def _own_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Batches that are this worker's alone: no other worker could use them in its place."""
        calls = self.engine.progress.calls
        ahead = prefetch(batches)
        self.engine.clock.start()
        self._is_in_own_loop = True
        try:
            yield from ahead
            self._together(lambda: pause.end_of_data(self.engine, calls))
        finally:
            self._is_in_own_loop = False
            ahead.close()
            self.engine.clock.stop()

    def _epoch(self) -> Generator[Any, None, bool]:
        """What this worker gets of what is left of the epoch; says whether the epoch is over then."""
        feed, progress = self.engine.feed, self.engine.progress
        calls, assignment = progress.calls, feed.assignment
        ahead = prefetch(feed.batches(self.engine.placed.feed))
        try:
            for places, batch in ahead:
                feed.drawn += 1
                feed.audit.hand(batch, places)
                yield batch
                if feed.assignment is not assignment or progress.caught_up_at > calls:
                    break
        finally:
            ahead.close()
        self._together(lambda: pause.end_of_data(self.engine, calls, assignment))
        return progress.calls > calls

    # Evaluation

    def evaluate(
        self, data: Any, *, batch_size: int = 256, measures: Mapping[str, Measure] | None = None
    ) -> dict[str, float]:
        """Mean loss and measures over a data set, computed by all workers together; the same result on each.

        The running statistics of batch norm become the mean over all workers first.
        """
        engine, progress = self.engine, self.engine.progress
        judges = {"loss": engine.training.loss, **(measures or {})}

        def attempt() -> dict[str, float]:
            with engine.replica.judged():
                pause.pause(engine, EVALUATE)
                progress.measured = evaluate.measure(engine, data, judges, batch_size=batch_size)
            telemetry.event("evaluate", step=progress.steps, epoch=progress.epoch, **progress.measured)
            return progress.measured

        return self._call(attempt, lambda: progress.measured)

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
        engine = self.engine
        target = pause.checkpoints(engine, directory)

        def attempt() -> Path:
            pause.save(engine, target, dict(extra or {}), engine.settings.keep if keep is None else keep)
            if wait and (problem := pause.outcome(engine)):
                raise CheckpointError(problem)
            return target

        return self._call(attempt, lambda: target)

    def resume(self, directory: Path | str | None = None) -> dict[str, Any] | None:
        """Go on from the newest checkpoint there; returns what was given as `extra`, or None if there is none."""
        engine, progress = self.engine, self.engine.progress
        target = pause.checkpoints(engine, directory)

        def attempt() -> dict[str, Any] | None:
            pause.pause(engine, RESUME)
            progress.resumed = resume.resume(engine, target)
            progress.directory = target  # where the next run will look
            if progress.resumed is not None:
                progress.extra = progress.resumed
                progress.mark_saved()
            return progress.resumed

        return self._call(attempt, lambda: progress.resumed)

    def wait_for_saves(self) -> None:
        """Until what this worker has copied is on the disk."""
        self.engine.saver.wait_alone()

    # The end

    def summary(self) -> dict[str, Any]:
        """What the run did so far, as `summary.json` has it; bytes are this worker's until the session is closed,
        then those of all processes."""
        return summarize(self.engine)

    def close(self) -> None:
        """Wait for all workers, write the summary, and leave the model usable by itself."""
        engine = self.engine
        if engine.failure and engine.is_set_up:
            engine.replica.let_go()  # its hooks would keep the host's memory open as long as the model lives
        if engine.is_closed or engine.failure:
            return
        self._end()
        model = self._surviving(lambda: engine.placed.give_back(engine.replica, *save.collect(engine)))
        with contextlib.suppress(*((PeerLost,) if engine.member else ())):
            engine.replica.release()
        engine.replica.part.become_whole(model)
        self._leave_servers()

    def finish(self) -> None:
        """Wait for all workers and write the summary; what happens at the end of a process that did not close."""
        if not self.engine.is_closed and not self.engine.failure:
            self._end()
            self._leave_servers()

    def _leave_servers(self) -> None:
        """All is over and done, but for a save that failed."""
        if self.engine.generation.servers:
            self.engine.generation.servers.close()
        if self._unsaved:
            raise CheckpointError(self._unsaved)

    def _end(self) -> None:
        engine = self.engine
        self._together(self._end_together)
        engine.is_closed = True
        telemetry.event("end", step=self.steps)
        if self.out and self.is_main:
            write_summary(self.out, self.summary())
        others = worker_process.others(engine)
        if not others:
            leaving.stop_listening()
        if self.out and not any(other.out == self.out for other in others):
            telemetry.close()  # now what it has recorded is on the disk

    def _end_together(self) -> None:
        engine, progress = self.engine, self.engine.progress
        pause.pause(engine, FINISH)
        is_behind = engine.save_every is not None and progress.steps != progress.saved_steps
        if any(row[0] for row in engine.world.exchange([float(is_behind)])):
            place = progress.directory or pause.checkpoints(engine)
            pause.write(engine, place, progress.extra, engine.settings.keep)
        self._unsaved = pause.outcome(engine)
        engine.feed.end(pause.notes(engine))
        rows = engine.world.exchange(own_bytes())
        engine.total_bytes = [sum(column) for column in zip(*rows, strict=True)]
        if engine.served:
            reports = report(engine.generation.servers, engine.world)
            engine.total_bytes[0] += sum(one.bytes_sent for one in reports)
            engine.staleness = staleness(reports)

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.wait_for_saves()  # what was copied before an error is as good as ever


def _serve(training: Training, settings: Settings, context: ServerContext, member: Member | None) -> NoReturn:
    """This process is a server: it serves until the run ends."""
    mesh = placements.parse(settings.placement).mesh(context.rank_info.workers)
    be_a_server(
        context,
        training.model,
        training.optimizer,
        service_of(strategies.parse(settings.strategy), settings.clip_norm),
        out=settings.out,
        survives=local.INVITATION in os.environ,
        peers=() if mesh.members == 1 else mesh.peers(),
        contexts=lambda first: join.contexts(member, first),
    )
