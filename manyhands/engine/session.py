"""What a training script holds: the user keeps the loop, the session owns the step."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from manyhands import placement as placements
from manyhands import strategies, telemetry
from manyhands.cluster.launchers import local
from manyhands.cluster.worker import leaving
from manyhands.cluster.worker.member import Member
from manyhands.cluster.worker.server_context import ServerContext
from manyhands.cluster.worker.world import World
from manyhands.comm import codecs
from manyhands.engine import (
    arguments,
    evaluate,
    finish,
    first_batch,
    habits,
    host_record,
    loops,
    lower_level,
    once,
    outside,
    pacing,
    pause,
    resume,
    script_values,
    take_over,
    worker_process,
)
from manyhands.engine.admission import admit
from manyhands.engine.engine import Engine, ReplicaState
from manyhands.engine.evaluate import Measure
from manyhands.engine.handshake import EVALUATE, RESUME
from manyhands.engine.loops import Batches
from manyhands.engine.on_server import OnServer
from manyhands.engine.settings import Settings, Training
from manyhands.engine.step import step, together
from manyhands.engine.summary import summarize
from manyhands.engine.whereabouts import Whereabouts
from manyhands.errors import CheckpointError
from manyhands.replica.optimizer.chain import one_of
from manyhands.replica.optimizer.modes import evaluating
from manyhands.replica.part import Loss

T = TypeVar("T")


def session(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loss: Loss,
    *,
    scheduler: Any = None,
    clip_norm: float | None = None,
    skip_nonfinite: int = 0,
    seed: int = 0,
    same_random: bool = False,
    save_every: str = "never",
    keep: int = 3,
    strategy: str | None = None,
    placement: str | None = None,
    codec: str | None = None,
    example: Any = None,
    samples: Callable[[Any], int] | None = None,
) -> "Session":
    """Make this process a worker of the run that it was started in; alone, it is a run of one.

    All workers make the same model; the values of worker 0 become everyone's. From here on every worker draws random
    numbers of its own. A process that was started as a server does not return from the first use of a session.

    Args:
        model: Any module, on the CPU or the device of this worker.
        optimizer: Made from `model.parameters()`; several, each for some of the parameters, as a list: `[muon, adamw]`.
        loss: A function `loss(model, batch)`: the mean over the batch, or a tuple, dict or object with it.
        scheduler: Stepped after every step, and saved; after a death or a join, by the samples of the whole run. One
            that needs a measure, as ReduceLROnPlateau does, the script steps itself.
        clip_norm: The limit of the gradient's global norm.
        skip_nonfinite: How many steps may be left out because their gradient has a NaN or an infinity in it, before
            such a step ends the run.
        seed: Seeds the order of the batches.
        same_random: Every worker draws the random numbers that the script has seeded.
        save_every: When the session saves by itself: `never`, `epoch`, `500 steps` or `10 min`; into the run's
            directory, or where checkpoints were last saved or looked for.
        keep: How many checkpoints remain, the newest ones.
        strategy: For a script that insists on one; normally the launcher chooses.
        placement: The same for a placement.
        codec: The same for a codec, by which gradients travel between hosts.
        example: A batch by which a placement divides the model at once. Without it the model stays undivided until the
            first step or evaluation, and the session cannot save before.
        samples: `samples(batch)` is the number of samples of a batch, where that is not its first dimension.
    """
    alone = not same_random and not worker_process.open_sessions()
    settings = Settings(
        random_seed=torch.initial_seed() if alone else None,
        strategy=strategy or os.environ.get(local.STRATEGY) or strategies.DEFAULT,
        placement=placement or os.environ.get(local.PLACEMENT) or placements.DEFAULT,
        codec=codec or os.environ.get(local.CODEC) or codecs.DEFAULT,
        example=example,
        samples=samples,
        clip_norm=clip_norm,
        skip_nonfinite=skip_nonfinite,
        seed=seed,
        save_every=save_every,
        keep=keep,
        out=Path(os.environ[local.RUN_DIR]) if local.RUN_DIR in os.environ else None,
    )
    leaving.listen()
    training = Training(model=model, optimizer=one_of(optimizer), loss=loss, scheduler=scheduler)
    made = make(training, settings, worker_process.own_world(), worker_process.own_member())
    worker_process.register(made)
    return made


def make(
    training: Training, settings: Settings, world: World | ServerContext, member: Member | None = None
) -> "Session":
    """A session of this worker, or, on a server, what stands for it there."""
    admit(settings, training, world)
    if isinstance(world, World):
        return Session(training, settings, world, member)
    return ServedSession(training, settings, world, member)


class Session(Whereabouts):
    """The step, the data, evaluation, saving and resuming of one run."""

    def __init__(
        self,
        training: Training,
        settings: Settings,
        world: World,
        member: Member | None = None,
    ) -> None:
        self.engine = engine = Engine(training, settings, world, member)
        if settings.out:
            number = world.rank_info.known_as
            telemetry.open(settings.out / "events" / f"worker-{number}.jsonl", rank=number)
            host_record.begin(engine)
        engine.take_over = take_over.take_over
        outside.watch(engine)
        first_batch.begin(engine)
        habits.watch(engine)
        telemetry.event(
            "start",
            workers=self.workers,
            strategy=settings.strategy,
            placement=settings.placement,
            **engine.terms(),
        )

    def once(self, make: Callable[[], T]) -> T:
        """What one worker does for all, as `log = session.once(lambda: wandb.init(project="mine"))`.

        On the main worker this is the object that `make` returns; on the others it is a stand-in: every call, attribute
        and item of it does nothing, and it is false. If the main worker dies, another becomes main and calls `make`
        before it goes on, so `log.log(...)` works on all workers at any time. Keep the object only here.
        """
        return once.once(self.engine, make)

    def warn(self, warning: str) -> None:
        """Record a warning; worker 0 prints it."""
        self.engine.warn(warning)

    # The step

    def step(self, *batches: Any) -> Any:
        """One update from one batch, or from several accumulated; returns what the loss function returned.

        That is a tensor without a gradient, or whatever has the loss in it, of this worker's samples alone
        (`session.mean` is over all workers). Of several batches, numbers are means weighted by samples, tensors with
        a row per sample are joined, and the rest are lists. A batch without samples gives the last result again.
        Gradients are weighted by samples over all workers, so batches may differ in size. They move to the
        model's device.
        """
        if pacing.pacers:
            batches = tuple(pacing.begin(self.engine, batches))
        if self.engine.replica_state is ReplicaState.NONE:
            first_batch.meet(self.engine, batches)
        result = step(self.engine, batches, pause.answer)
        if pacing.pacers:
            pacing.end()
        return result

    def backward(self, *batches: Any, samples: float | None = None, scaler: Any = None) -> Any:
        """The first half of a step: add the gradient to `param.grad`, for the script to read and change.

        It is that of all workers' samples where they step as one process, the same on each of them, and this worker's
        own elsewhere. In place of batches, a loss that the script has computed and that is the mean over so many
        `samples` (or targets, or a sum of weights); without either, what `loss.backward()` has left in `param.grad`
        becomes that of all workers. A `torch.amp.GradScaler` scales the loss. Returns what `step` would, or the loss.
        """
        return lower_level.backward(self.engine, pacing.begin(self.engine, batches), samples, scaler)

    def update(self, scaler: Any = None, *, loss: Tensor | float | None = None) -> bool:
        """The second half: run the optimizer by the gradients as they are now, and clear them.

        A `scaler` undoes its scale, and skips the update where gradients are not finite; returns whether it was made.
        A script that has called `loss.backward()` itself may say its `loss`, which is shown and watched.
        """
        made = lower_level.update(self.engine, pause.answer, scaler, loss)
        pacing.end()
        return made

    # The data

    def batches(
        self, data: Dataset[Any] | Iterable[Any], *, batch_size: int | None = None, shuffle: bool = True
    ) -> Batches:
        """This worker's share of an epoch, loaded ahead in the background.

        Either a data set (anything with a length and items) and the batch size per worker, or an iterable of batches
        that are already this worker's own. Workers may have different numbers of batches: a worker that is out of data
        takes part in the others' steps until all are. A data set gives every worker the same number of batches; the
        last one may be empty on some. A loop left early has not finished the epoch: the next call with the same data
        goes on with the samples that are left.
        """
        return loops.batches(self.engine, data, batch_size=batch_size, shuffle=shuffle)

    # Evaluation

    def evaluate(
        self, data: Any, *, batch_size: int = 256, measures: Mapping[str, Measure] | None = None
    ) -> dict[str, float]:
        """Mean loss and measures over a data set, computed by all workers together; the same result on each.

        The running statistics of batch norm become the mean over all workers first.
        """
        engine, progress = self.engine, self.engine.progress
        arguments.admit_data(data, "session.evaluate(data)")
        first_batch.meet_data(engine, data, batch_size)
        every = {"loss": engine.training.loss, **(measures or {})}

        def attempt() -> dict[str, float]:
            with engine.replica.evaluated():
                pause.pause(engine, EVALUATE)
                with evaluating(engine.training.optimizer):
                    progress.measured = evaluate.measure(engine, data, every, batch_size=batch_size)
            telemetry.event("evaluate", step=progress.steps, epoch=progress.epoch, **progress.measured)
            return progress.measured

        return self._call(attempt, lambda: progress.measured)

    # Values of all workers

    def gather(self, value: Any) -> list[Any]:
        """The values of all workers, by rank: tensors, arrays, plain values, and lists, tuples or dicts of them.

        All workers call it at the same point. A worker that is out of data adds nothing, and one that joins late
        skips the calls made before it joined and gets its own value alone.
        """
        return script_values.gather(self.engine, value, self._call)

    def mean(self, value: Any, *, samples: float | None = None) -> Any:
        """The mean over the workers of a number, a tensor, or a tuple or dict of them; weighted by `samples`, if given.

        All workers call it at the same point, as `gather`.
        """
        return script_values.mean(self.engine, value, samples, self._call)

    def barrier(self) -> None:
        """Return when all workers have come here."""
        script_values.gather(self.engine, None, self._call)

    def log(self, **values: Any) -> None:
        """Record numbers by name, beside the loss of this step; shown by `train` and in TensorBoard as the mean over
        the workers that log them."""
        script_values.log(self.engine, values)

    # The model outside of a step

    def model_state(self, *, main_only: bool = False) -> dict[str, Tensor]:
        """A copy of the whole model's state, as `model.state_dict()` of a single process has it, under every placement.

        All workers call it and all get it; with `main_only` worker 0 gets it and the others an empty one.
        """
        return outside.model_state(self.engine, self._call, main_only=main_only)

    def whole_model(self) -> AbstractContextManager[nn.Module]:
        """`with session.whole_model() as model:` inside, the model is whole on every worker, under every placement.

        All workers enter the block, and each may use the model alone: call it, print and copy it, save it.
        Under a placement that spreads it, a change that all workers make alike is kept, and any other is refused.
        """
        return outside.whole_model(self.engine, self._call)

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
        first_batch.require(engine, "session.save")

        def attempt() -> Path:
            pause.save(engine, target, dict(extra or {}), engine.settings.keep if keep is None else keep)
            if wait and (problem := pause.outcome(engine)):
                raise CheckpointError(problem)
            return target

        return self._call(attempt, lambda: target)

    def optimizer_state(self) -> dict[str, Any]:
        """What `optimizer.state_dict()` gives, put together from all workers: every worker must call it and gets the
        whole. Needed where a worker has a part only, under a placement; elsewhere `optimizer.state_dict()` will do."""
        engine = self.engine
        first_batch.require(engine, "session.optimizer_state")
        empty: dict[str, Any] = {}
        return self._call(lambda: take_over.optimizer_state(engine), lambda: empty)

    def resume(self, directory: Path | str | None = None) -> dict[str, Any] | None:
        """Go on from the newest checkpoint there; returns what was given as `extra`, or None if there is none."""
        engine, progress = self.engine, self.engine.progress
        target = pause.checkpoints(engine, directory)

        def attempt() -> dict[str, Any] | None:
            if engine.has_entered:
                pause.pause(engine, RESUME)
            engine.script.drop()
            progress.resumed = resume.resume(engine, target)
            if engine.has_entered:
                engine.script.settle()
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
        """Wait for all workers, save where the session saves by itself, write the summary, and give the model back to
        the script: whole under every placement, in memory of its own. The session makes no more steps."""
        finish.close(self.engine)

    def finish(self) -> None:
        """End as `close` does, without giving the model back: nothing may use it afterwards. A process that did not
        close its session does this at its end."""
        finish.finish(self.engine)

    def _call(self, attempt: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """What every script calls equally often; a late joiner skips the calls made before it joined."""
        engine, progress = self.engine, self.engine.progress
        if engine.siblings.is_looping:
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


class ServedSession(OnServer, Session):
    """What the script of a server holds."""
