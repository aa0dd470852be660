"""What a training script holds: the user keeps the loop, the session owns the step."""

import atexit
import contextlib
import os
import struct
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from manyhands import placement as placements
from manyhands import resuming, served, strategies, telemetry
from manyhands.cluster.heap import keep_freed_memory
from manyhands.cluster.launchers import local
from manyhands.cluster.seat import Seat
from manyhands.cluster.world import Station, World, join
from manyhands.comm.comm import Comm
from manyhands.data.ledger import Ledger
from manyhands.data.loading import empty_like, gather, prefetch, samples_in
from manyhands.divergence import LossWatch, Suspects
from manyhands.errors import PeerLost, UsageError
from manyhands.meeting import END_OF_DATA, EVALUATE, FINISH, RESUME, SAVE, STEP, Meeting
from manyhands.placement.assembly import Assembly
from manyhands.placement.standing import Standing
from manyhands.replica.neighbours import Neighbours
from manyhands.replica.parameters import lay_out_model
from manyhands.replica.replica import SPAN_BYTES, Loss, Replica, Share
from manyhands.replica.state import (
    States,
    average_buffers,
    begin_alike,
    collect,
    give_back_state,
    give_whole_state,
    model_tensors,
    spread,
)
from manyhands.replica.updates import hyper_parameters, is_watched, needs_closure, set_hyper_parameters
from manyhands.servers.client import Servers
from manyhands.stopwatch import Stopwatch
from manyhands.strategies import Asked

Measure = Callable[[nn.Module, Any], Tensor]


def session(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    *,
    scheduler: Any = None,
    clip_norm: float | None = None,
    seed: int = 0,
    strategy: str | None = None,
    placement: str | None = None,
    example: Any = None,
) -> "Session":
    """Make this process a worker of the run that it was started in; alone, a world of one.

    A process that was started as a server serves, and ends with the run: it does not return from this call.

    `loss(model, batch)` is the mean over the batch. A `scheduler` given here is stepped after every step and saved with
    the session. `clip_norm` limits the global norm of the gradient. `strategy` and `placement` are for scripts that
    insist on one; normally the launcher chooses. `example` is a batch on which a placement may measure the model.
    """
    text = strategy or os.environ.get(local.STRATEGY) or strategies.DEFAULT
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
        out: Path | None = None,
    ) -> None:
        self.strategy_text = strategy  # as a person wrote it: reports show the name they know
        self.strategy = strategies.parse(strategy)
        self.out = out or (Path(os.environ[local.RUN_DIR]) if local.RUN_DIR in os.environ else None)
        self.placement = placements.parse(placement)
        self.mesh = self.placement.mesh(world.seat.workers)
        hosts = len(world.hosts) if isinstance(world, World) else None
        asked = _asked(self.mesh.replicas, world.seat, optimizer, hosts)
        placements.admit(self.placement, self.mesh, self.strategy, asked)
        strategies.admit(self.strategy, asked)
        if isinstance(world, Station):
            assert self.strategy.rule is not None
            served.be_a_server(
                world, model, optimizer, self.strategy.rule, clip_norm, self.strategy.cached, self.out
            )
        self.world = world
        self.standing = Standing(world, self.mesh) if self.mesh.members > 1 else None
        # Those with the same part of other replicas; where replicas are whole, everyone.
        self.peers = self.standing.peers if self.standing else world
        self.feed = self.mesh.feed(world.rank)  # which of the step's batches is this worker's
        self.assembly: Assembly | None = None
        self._known_params = sum(len(group["params"]) for group in optimizer.param_groups)
        self.model = model
        self.steps = 0
        self.epoch = 0
        self.position = 0  # samples of this epoch that are committed
        self.samples = 0
        self.last_loss = float("nan")
        self.measured: dict[str, float] = {}
        self.optimizer = optimizer
        self._loss = loss
        self.scheduler = scheduler
        self.seed = seed
        self._clock = Stopwatch()
        self._watch = LossWatch(world.rank, self._suspects)
        self._closed = False
        self._broken = ""
        self._parted = False  # whether there were steps since the replicas last agreed
        self._uncounted = 0  # samples of this worker that the others have not heard of
        self._data: Any = None  # the data set whose samples the current steps use
        self._last_data: Any = None
        self._round_samples = 0  # of it, that one batch on every worker makes
        self._total_bytes: list[float] = []
        if self.out:
            telemetry.open(self.out / "events" / f"worker-{world.rank}.jsonl", rank=world.rank)
        self.servers: Servers | None = None
        self.staleness: dict[str, Any] | None = None
        self.replica, self.comm = self._build(clip_norm, example)
        telemetry.event("start", workers=world.size, strategy=strategy, placement=placement)

    def _build(self, clip_norm: float | None, example: Any) -> tuple[Replica, Comm]:
        """The replica and the comm that fit the strategy, the placement, the optimizer and the device."""
        _same_model(self.model, self.world)
        device = next(self.model.parameters()).device.type
        if self.strategy.rule is not None:
            replica, comm, self.servers = served.join(
                self.model,
                self.optimizer,
                self._loss,
                self.world,
                self.strategy.rule,
                clip_norm,
                self.strategy.cached,
            )
            return replica, comm
        part = None
        if self.standing:
            if device != "cpu":
                raise UsageError(
                    "models are laid over workers in the memory of hosts; use --device cpu, or no --placement"
                )
            layout = lay_out_model(self.model, self.optimizer, span_bytes=SPAN_BYTES, lanes=1)
            begin_alike(self.model, self.world)
            part = self.placement.place(self.model, self.optimizer, self._loss, self.standing, example)
        peers = self.peers
        shared = self.strategy.shares_replica and device == "cpu" and not needs_closure(self.optimizer)
        if shared:
            host, lanes, comm = peers.host, peers.lanes, peers.between_hosts()
        else:
            host, lanes = None, 1
            if (self.strategy.topology == "native" and device == "cpu") or peers.size == 1:
                comm = peers.comm
            elif device != "cpu":
                comm = peers.between_devices()
            else:
                comm = peers.scheduled(self.strategy.topology)
        if self.strategy.open_replica and device != "cpu":
            raise UsageError("this strategy averages in the memory of a host: use --device cpu")
        replica = Replica(
            self.model,
            self.optimizer,
            self._loss,
            host=host,
            neighbours=Neighbours(peers.host) if self.strategy.open_replica else None,
            together=self.strategy.lockstep,
            lanes=lanes,
            clip_norm=clip_norm,
            agree=comm.copy_ if self.strategy.synchronous else None,
            memory=comm if device == "cpu" and not shared else None,
            part=part,
        )
        spread(replica, comm, peers)
        if self.standing:
            self.assembly = Assembly(self.standing, replica, layout)
        return replica, comm

    @property
    def served(self) -> bool:
        """Whether the parameters are on servers; a worker may leave it to a neighbour to speak with them."""
        return self.replica.lent is not None

    @property
    def leads(self) -> bool:
        """Whether this worker speaks for its replica."""
        return self.assembly is None or self.assembly.leads

    # The step

    def step(self, *batches: Any) -> float:
        """One update from one batch, or from several accumulated; returns this worker's mean loss.

        Gradients are weighted by samples over all workers, so batches may differ in size.
        """
        parts = [(batch, samples) for batch in batches if (samples := samples_in(batch))]
        with self._together():
            self._clock.start()
            samples = sum(samples for _, samples in parts)
            if self.strategy.lockstep:
                return self._run(parts, self._open(STEP, samples=samples))
            loss = self._run(parts, None)
            self._advance(len(batches))
            return loss

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

    def _run(self, parts: list[tuple[Any, int]], meeting: Meeting | None) -> float:
        """The step itself; without a meeting nobody knows what the others do."""
        own = float(sum(samples for _, samples in parts))
        total = meeting.total if meeting else lambda: own
        ours = meeting.of_replica if meeting else lambda: own
        share = Share(parts=parts, total=total if self.strategy.pooled else ours)
        if not parts or not self.strategy.pooled or len(self.world.hosts) == 1 or self.standing:
            total()  # all workers must have asked before anything else is exchanged
        loss = self.strategy.step(self.replica, self.comm, share)
        self.replica.settle()
        if not self.replica.needs_closure and is_watched(self.optimizer):
            self.optimizer.step()  # without gradients it changes nothing; hooks and schedulers see it called
        if self.scheduler is not None:
            self.scheduler.step()
        self.steps += 1
        self._parted = True
        self.samples += int(total())
        if meeting and self._data is not None:
            self.position += int(total())
        self._uncounted += 0 if meeting else int(own)
        self._clock.lap(int(total()))
        samples = (
            share.samples if self.world.rank % self.mesh.copies == 0 else 0
        )  # of those with the same, one counts
        telemetry.step(step=self.steps, epoch=self.epoch, loss=loss, samples=samples)
        if parts:
            self.last_loss = loss
            if warning := self._watch.see(self.steps, loss):
                self._warn(warning)
        return loss

    def _warn(self, warning: str) -> None:
        """Every worker records what it saw; one says it, since all are likely to see the same."""
        telemetry.event("warning", step=self.steps, text=warning)
        if self.world.rank == 0:
            print(f"warning: step {self.steps}: {warning}", file=sys.stderr, flush=True)

    def _suspects(self) -> Suspects:
        """What a loss that goes wrong may be due to."""
        staleness = 0.0
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
        if self._data is not None:
            self.position = min(len(self._data), self.position + batches * self._round_samples)

    def _open(self, purpose: int, *, samples: int = 0) -> Meeting:
        """Tell everyone what this worker has come for, and what it brings."""
        count = sum(len(group["params"]) for group in self.optimizer.param_groups)
        known = self._known_params
        if count != known:
            raise UsageError(
                f"the optimizer had {known} parameters when the session was made and has {count} now; "
                "close the session and make a new one"
            )
        values = hyper_parameters(self.optimizer)
        digest = zlib.crc32(struct.pack(f"{len(values)}d", *values))
        rows = self.world.start_exchange([float(purpose), float(samples), float(digest)])
        return Meeting(rows, self._same_hyper_parameters, self.mesh, self.world.rank)

    def _same_hyper_parameters(self, rows: list[list[float]]) -> None:
        """Workers with data must agree; a worker without follows them, since it may own spans all the same."""
        lead = next((rank for rank, row in enumerate(rows) if row[0] == STEP), None)
        if not self.strategy.same_settings or lead is None or all(row[2] == rows[lead][2] for row in rows):
            return
        mine = hyper_parameters(self.optimizer)
        everyone = [
            struct.unpack(f"{len(mine)}d", payload)
            for payload in self.world.gather(struct.pack(f"{len(mine)}d", *mine))
        ]
        for rank, row in enumerate(rows):
            if row[0] == STEP and everyone[rank] != everyone[lead]:
                pair = next((a, b) for a, b in zip(everyone[lead], everyone[rank], strict=True) if a != b)
                raise UsageError(
                    f"the optimizer's settings differ between workers: {pair[0]:g} on worker {lead}, {pair[1]:g} on "
                    f"worker {rank}; step the scheduler equally often on all, or give it to mh.session(scheduler=…)"
                )
        set_hyper_parameters(self.optimizer, everyone[lead])

    def _gather_everyone(self, purpose: int) -> None:
        """Take part in the others' steps, without data of our own, until all have come for the same thing."""
        if not self.strategy.lockstep:
            self.strategy.leave(self.replica, self.comm)
        while (meeting := self._open(purpose)).anyone_steps():
            self._run([], meeting)
        if not self.strategy.lockstep:
            rows = self.world.exchange([float(self._uncounted), float(self._parted), float(self.position)])
            others = sum(int(row[0]) for row in rows) - self._uncounted
            self.samples += others
            self._clock.add(others)
            self._uncounted = 0
            self._parted = any(row[1] for row in rows)
            self.position = int(min(row[2] for row in rows))  # nothing is lost of what the slowest has left

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
            source: Iterable[Any] = data
        else:
            if self._last_data is not None and self._last_data is not data:
                self.position = 0  # what was left of other data says nothing about this
            self._data = self._last_data = data
            self._round_samples = batch_size * self.mesh.feeds
            source = self._shares(data, batch_size, shuffle)
        ahead = prefetch(source)
        self._clock.start()
        try:
            yield from ahead
            with self._together():
                self._gather_everyone(END_OF_DATA)
            self.epoch += 1
            self.position = 0
        finally:
            self._data = None
            ahead.close()
            self._clock.stop()

    def _shares(self, data: Any, batch_size: int, shuffle: bool) -> Iterator[Any]:
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size}: a step needs at least 1 sample per worker")
        ledger = Ledger(len(data), seed=self.seed, shuffle=shuffle)
        epoch = self.epoch
        for indices in ledger.shares(
            epoch, start=self.position, batch=batch_size, rank=self.feed, workers=self.mesh.feeds
        ):
            if len(indices):
                yield gather(data, indices, epoch)
            else:
                yield empty_like(gather(data, torch.tensor([0]), epoch))

    # Evaluation

    def evaluate(
        self, data: Any, *, batch_size: int = 256, measures: Mapping[str, Measure] | None = None
    ) -> dict[str, float]:
        """Mean loss and measures over a data set, computed by all workers together; the same result on each.

        The running statistics of batch norm become the mean over all workers first.
        """
        with self._together(), self.replica.judged():
            return self._evaluate(data, batch_size, {"loss": self._loss, **(measures or {})})

    def _evaluate(self, data: Any, batch_size: int, judges: dict[str, Measure]) -> dict[str, float]:
        self._pause(EVALUATE)
        sums = dict.fromkeys(judges, 0.0)
        count = 0
        if not len(data):
            raise UsageError("evaluate was given a data set without samples")
        indices = torch.arange(len(data))[self.feed :: self.mesh.feeds]
        parts = [part for part in indices.split(batch_size) if len(part)]
        # Workers that need each other's parameters judge equally often; of those with the same samples, one counts.
        rounds = -(-len(data) // (batch_size * self.mesh.feeds)) if self.mesh.shards > 1 else len(parts)
        counts = self.world.rank % self.mesh.copies == 0
        for number in range(rounds):
            part = parts[number] if number < len(parts) else torch.tensor([0])
            batch = gather(data, part, self.epoch)
            samples = samples_in(batch)
            weight = samples if counts and number < len(parts) else 0
            count += weight
            for name, judge in judges.items():
                sums[name] += self.replica.part.judge(judge, batch, samples) * weight
        rows = self.world.exchange([float(count), *sums.values()])
        total = sum(row[0] for row in rows)
        result = {name: sum(row[1 + i] for row in rows) / total for i, name in enumerate(judges)}
        self.measured = result
        telemetry.event("evaluate", step=self.steps, epoch=self.epoch, **result)
        return result

    def _pause(self, purpose: int) -> None:
        """Before anything that is not a step: everyone is here, parameters and buffers are the same everywhere."""
        self._clock.stop()
        self._gather_everyone(purpose)
        if self._parted:
            self.strategy.agree(self.replica, self.comm)
            self.world.host.barrier()
            self._parted = False
        # Workers of a replica have seen the same samples, unless each has samples of its own.
        average_buffers(self.replica.part.buffers(), self.world if self.mesh.shards > 1 else self.peers)

    # Saving and resuming

    def save(self, directory: Path | str | None = None, *, extra: Mapping[str, Any] | None = None) -> Path:
        """Write a complete checkpoint (worker 0 does the writing) and return the directory it is in."""
        target = self._checkpoints(directory)
        with self._together():
            self._pause(SAVE)
            return resuming.save(self, target, dict(extra or {}))

    def resume(self, directory: Path | str | None = None) -> dict[str, Any] | None:
        """Go on from the newest checkpoint there; returns what was given as `extra`, or None if there is none."""
        target = self._checkpoints(directory)
        with self._together():
            self._pause(RESUME)
            return resuming.resume(self, target)

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
            return served.collect(self.servers, self.replica, self.world)
        return collect(self.replica, self.peers)

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
            "placement": placements.describe(self.placement),
            "bytes_sent": int(bytes_sent),
            "shared_bytes": int(shared_bytes),
            "wall_s": round(self._clock.wall_s(), 3),
            **more,
        }

    def close(self) -> None:
        """Wait for everyone, write the summary, and leave the model usable by itself."""
        if not self._closed and not self._broken:
            self._end()
            self._give_back()
            if self.servers is not None:
                self.servers.close()

    def _give_back(self) -> None:
        """Model and optimizer as plain PyTorch has them, whole on every worker."""
        own, states = self.collect()
        if self.assembly is None:
            give_back_state(self.replica, own, states)
            self.replica.release()
            return
        states = self.assembly.states(states)
        whole = self.assembly.everywhere(self.assembly.whole(own | model_tensors(self.replica)))
        self.replica.release()
        self.replica.part.become_whole(
            {name.removeprefix("model/"): value for name, value in whole.items() if name.startswith("model/")}
        )
        give_whole_state(self.model, self.optimizer, whole, states)

    def finish(self) -> None:
        """Wait for everyone and write the summary; what happens at the end of a process that did not close."""
        if not self._closed and not self._broken:
            self._end()
            if self.servers is not None:
                self.servers.close()

    def _end(self) -> None:
        with self._together():
            self._pause(FINISH)
            self._total_bytes = [
                sum(column) for column in zip(*self.world.exchange(_own_bytes()), strict=True)
            ]
            if self.served:
                reports = served.report(self.servers, self.world)
                self._total_bytes[0] += sum(one.bytes_sent for one in reports)
                self.staleness = served.staleness(reports)
        self._closed = True
        telemetry.event("end", step=self.steps)
        if self.out and self.world.rank == 0:
            temporary = self.out / ".summary.json"
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(self.summary())))
            temporary.replace(self.out / "summary.json")
        if self.out and all(other is self or other._closed for other in _open_sessions()):
            telemetry.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()


def _same_model(model: nn.Module, world: World) -> None:
    """Workers that share memory must mean the same by it."""
    shapes = [(name, tuple(param.shape), str(param.dtype)) for name, param in model.named_parameters()]
    if not shapes:
        raise UsageError("the model has no parameters; there is nothing to train")
    digests = [int(row[0]) for row in world.exchange([float(zlib.crc32(repr(shapes).encode()))])]
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise UsageError(
                f"worker {rank} has another model than worker 0; build the same one on all workers"
            )


def _asked(replicas: int, seat: Seat, optimizer: Optimizer, hosts: int | None) -> Asked:
    name = type(optimizer).__name__.lower()
    return Asked(workers=replicas, servers=seat.servers, optimizer=name, hosts=hosts)


def _own_bytes() -> list[float]:
    totals = telemetry.totals()
    return [float(totals.get(name, 0)) for name in ("bytes_sent", "shared_bytes")]


def accuracy(model: nn.Module, batch: Any) -> Tensor:
    """The fraction of right answers, for batches of (inputs, targets) and models that give one score per class."""
    inputs, targets = batch
    right: Tensor = (model(inputs).argmax(-1) == targets).float().mean()
    return right


_current: World | Station | None = None


def _world() -> World | Station:
    """The world of this process: joined once, left at exit."""
    global _current
    if _current is None:
        keep_freed_memory()
        _current = join()
        atexit.register(_leave, os.getpid())
    return _current


_sessions: "list[weakref.ref[Session]]" = []  # in the order in which they were made, the same on all workers


def _open_sessions() -> "list[Session]":
    return [session for reference in _sessions if (session := reference()) is not None]


def _leave(pid: int) -> None:
    """At exit: wait for the others, unless this process ends because of an error or is a fork of the worker."""
    global _current
    if os.getpid() != pid:
        return
    if getattr(sys, "last_value", None) is None:
        # Whoever died meanwhile says why, and whoever told us to end knows it: there is nothing to add.
        with contextlib.suppress(PeerLost, SystemExit):
            for open_session in _open_sessions():
                open_session.finish()
    if _current is not None:
        _current.close()
        _current = None
