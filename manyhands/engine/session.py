"""What a training script holds: the user keeps the loop, the session owns the step."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from manyhands.cluster.worker.member import Member
from manyhands.cluster.worker.server_context import ServerContext
from manyhands.cluster.worker.world import World
from manyhands.engine import epoch, evaluate, finish, intervals, join, pause, resume, worker_process
from manyhands.engine.admission import admit
from manyhands.engine.build import service_of
from manyhands.engine.engine import Engine
from manyhands.engine.evaluate import Measure
from manyhands.engine.handshake import EVALUATE, RESUME
from manyhands.engine.rejoin import enter_first
from manyhands.engine.settings import Settings, Training
from manyhands.engine.step import step, survive, together
from manyhands.engine.summary import summarize
from manyhands.engine.whereabouts import Whereabouts
from manyhands.errors import CheckpointError, UsageError
from manyhands.replica.part import Loss

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

    A process that was started as a server serves until the run ends, and does not return from this call.

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
    worker_process.register(made, made.engine)
    return made


class Session(Whereabouts):
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
        self.engine = engine = Engine(training, settings, world, member)
        if settings.out:
            number = world.rank_info.known_as
            telemetry.open(settings.out / "events" / f"worker-{number}.jsonl", rank=number)
        survive(engine, lambda: enter_first(engine))
        telemetry.event(
            "start", workers=self.workers, strategy=settings.strategy, placement=settings.placement
        )

    def warn(self, warning: str) -> None:
        """Record a warning; worker 0 prints it."""
        self.engine.warn(warning)

    # The step

    def step(self, *batches: Any) -> float:
        """One update from one batch, or from several accumulated; returns this worker's mean loss.

        Gradients are weighted by samples over all workers, so batches may differ in size. They move to the
        model's device.
        """
        return step(self.engine, batches, pause.answer)

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
        progress = self.engine.progress
        if batch_size is None and hasattr(data, "__getitem__") and not isinstance(data, (list, tuple)):
            raise UsageError("session.batches(dataset) needs batch_size=… (samples per worker and step)")
        if progress.calls < progress.caught_up_at:
            progress.calls += 1
        elif batch_size is None:
            yield from epoch.of_own_batches(self.engine, cast(Iterable[Any], data))
        else:
            yield from epoch.of_data_set(self.engine, data, batch_size=batch_size, shuffle=shuffle)

    # Evaluation

    def evaluate(
        self, data: Any, *, batch_size: int = 256, measures: Mapping[str, Measure] | None = None
    ) -> dict[str, float]:
        """Mean loss and measures over a data set, computed by all workers together; the same result on each.

        The running statistics of batch norm become the mean over all workers first.
        """
        engine, progress = self.engine, self.engine.progress
        every = {"loss": engine.training.loss, **(measures or {})}

        def attempt() -> dict[str, float]:
            with engine.replica.evaluated():
                pause.pause(engine, EVALUATE)
                progress.measured = evaluate.measure(engine, data, every, batch_size=batch_size)
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
        """Return when what this worker has copied is on the disk."""
        self.engine.saver.wait_alone()

    # The end

    def summary(self) -> dict[str, Any]:
        """What the run did so far, as `summary.json` has it; bytes are this worker's until the session is closed,
        then those of all processes."""
        return summarize(self.engine)

    def close(self) -> None:
        """Wait for all workers, write the summary, and leave the model usable by itself."""
        finish.close(self.engine)

    def finish(self) -> None:
        """Wait for all workers and write the summary; a process that did not close its session does so at its end."""
        finish.finish(self.engine)

    def _call(self, attempt: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """What every script calls equally often; a late joiner skips the calls made before it joined."""
        engine, progress = self.engine, self.engine.progress
        if engine.feed.data is not None or engine.feed.is_in_own_loop:
            return together(engine, attempt)  # a loop counts as one call, whatever is done in it
        calls = progress.calls
        if calls < progress.caught_up_at:
            progress.calls += 1
            return otherwise()
        result = together(engine, lambda: otherwise() if progress.caught_up_at > calls else attempt())
        progress.calls = calls + 1
        return result

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
    from manyhands.servers.process.startup import be_a_server  # here: workers never load what servers run

    mesh = placements.parse(settings.placement).mesh(context.rank_info.workers)
    be_a_server(
        context,
        training.model,
        training.optimizer,
        service_of(strategies.parse(settings.strategy).traits, settings.clip_norm),
        out=settings.out,
        survives=local.INVITATION in os.environ,
        peers=() if mesh.members == 1 else mesh.peers(),
        contexts=lambda first: join.contexts(member, first),
    )
