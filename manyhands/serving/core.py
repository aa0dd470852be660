"""Ties the parts together: looks at sources, does what the manager decides, hands requests to servables.

Knows no tensor, no socket and no HTTP; time comes from a clock that it is given.
"""

import asyncio
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from manyhands.errors import ManyhandsError, UsageError
from manyhands.serving.batcher import Answer, Batcher, DeadlinePassed, ModelError, QueuedRequest
from manyhands.serving.loader import LoadFailed
from manyhands.serving.manager import AVAILABILITY, VersionManager
from manyhands.serving.servable import Servable, least_accuracy
from manyhands.serving.serving_metrics import ServingMetrics
from manyhands.serving.source import LOOK_S
from manyhands.serving.stream import ModelVersion, TrafficShares, VersionPolicy, meant

UNLOAD_PATIENCE_S = 60.0
"""For the requests of a version that is to be unloaded."""
_LOOK_AT_LAST_S = 0.01


class NoSuchModel(ManyhandsError):
    """No model, version or label of that name is served."""


class NotReady(ManyhandsError):
    """It is known, and cannot answer yet."""


class Loader(Protocol):
    async def load(self, version: ModelVersion, least_accuracy: float) -> Servable: ...

    def unload(self, servable: Servable) -> None: ...


class Looker(Protocol):
    """A source of versions."""

    def look(self, now_s: float) -> list[ModelVersion]: ...


@dataclass(kw_only=True)
class ModelEntry:
    """One model: where its versions come from, which are wanted, how they share the traffic."""

    source: Looker
    policy: VersionPolicy = field(default_factory=VersionPolicy)
    labels: dict[str, str | int] = field(default_factory=dict)
    shares: TrafficShares = field(default_factory=lambda: TrafficShares({}))
    most_accuracy_drop: float = 0.1
    servables: dict[ModelVersion, Servable] = field(default_factory=dict)

    def check_labels(self) -> None:
        for label in self.shares.shares:
            if label not in self.labels:
                raise UsageError(
                    f"traffic names the label {label!r}, and the labels are {', '.join(self.labels) or 'none'}"
                )


class ServingCore:
    """All models of a server."""

    def __init__(
        self,
        models: Mapping[str, ModelEntry],
        loader: Loader,
        batcher: Batcher,
        *,
        policy: str = AVAILABILITY,
        pump: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.models = dict(models)
        self.manager = VersionManager(policy)
        self.metrics = ServingMetrics()
        self._loader, self._batcher = loader, batcher
        self._pump, self._say, self._clock = pump, say, clock
        self._tasks: set[asyncio.Task[None]] = set()
        for entry in self.models.values():
            entry.check_labels()

    async def run(self) -> None:
        """Follow the sources until cancelled."""
        try:
            while True:
                try:
                    self.look()
                except Exception:  # a fault of ours with one version is no reason to follow none
                    traceback.print_exc()
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def look(self) -> None:
        """One look at all sources, and the beginning of what follows from it."""
        now_s = self._clock()
        self._batcher.expire(now_s)  # first: whatever happens to a source, requests have their deadlines
        for name, entry in self.models.items():
            self.manager.aspire(name, entry.policy.aspired(entry.source.look(now_s)))
        for todo in self.manager.due(now_s):
            if todo.load:
                self._start(self._load(todo.version))
            else:
                self._start(self._unload(todo.version))

    def is_ready(self, model: str | None = None) -> bool:
        names = self.models if model is None else [model]
        return all(self._ready(name) for name in names)

    def choose(
        self, model: str, version: int | None = None, label: str | None = None, *, divide: bool = True
    ) -> Servable:
        """Which servable answers a request: the version or label that it names, else by the shares of traffic (unless
        it only asks about the model, and is no traffic), else the newest."""
        entry = self.entry(model)
        ready = self._ready(model)
        if not ready:
            raise NotReady(f"no version of {model} is ready yet")
        if version is not None:
            found = [one for one in ready if one.version.version == version]
            if not found:
                known = ", ".join(str(one.version.version) for one in ready)
                raise NoSuchModel(f"version {version} of {model} is not served; ready: {known}")
            return found[-1]
        if label is None and (not divide or (label := entry.shares.next()) is None):
            return ready[-1]
        if label not in entry.labels:
            raise NoSuchModel(f"{model} has no label {label!r}; labels: {', '.join(entry.labels) or 'none'}")
        number = meant(entry.labels[label], [one.version.version for one in ready])
        if number is not None:
            return next(one for one in reversed(ready) if one.version.version == number)
        if entry.shares.shares:
            return ready[-1]  # a share of the traffic that nothing stands for yet
        raise NotReady(f"label {label!r} of {model} is {entry.labels[label]}, which is not ready")

    def ask(
        self,
        servable: Servable,
        rows: int,
        row_shape: tuple[int, ...],
        content: memoryview,
        timeout_s: float,
        answer: Callable[[Answer], None],
    ) -> QueuedRequest:
        """Queue a request; `answer` is called once, unless the client goes before (`QueuedRequest.is_over`)."""
        begun_s = self._clock()
        version = servable.version

        def answered(found: Answer) -> None:
            well = isinstance(found, memoryview)
            servable.answered(well=not isinstance(found, ModelError))
            outcome = "ok" if well else ("late" if isinstance(found, DeadlinePassed) else "error")
            self.metrics.answered(version.model, version.version, rows, self._clock() - begun_s, outcome)
            if not servable.is_healthy:
                self._send_away(servable)
            answer(found)

        work = QueuedRequest(
            handle=servable.handle,
            rows=rows,
            row_shape=row_shape,
            content=content,
            deadline_s=begun_s + timeout_s,
            answer=answered,
        )
        self._batcher.add(work)
        servable.in_flight += 1
        self._pump()
        return work

    def abandon(self, servable: Servable, work: QueuedRequest) -> None:
        """The client has gone."""
        if not work.is_over:
            work.is_over = True
            servable.in_flight -= 1
            self.metrics.answered(servable.version.model, servable.version.version, 0, 0.0, "abandoned")

    def lost(self, handle: int, reason: str) -> None:
        """A version is in no process any more, and cannot be brought back: its files have gone."""
        for entry in self.models.values():
            for version, servable in list(entry.servables.items()):
                if servable.handle == handle:
                    self._say(f"{version} is lost: {reason}")
                    del entry.servables[version]
                    self._loader.unload(servable)
                    self.manager.lost(version)

    def set_labels(self, model: str, labels: Mapping[str, str | int], shares: Mapping[str, float]) -> None:
        """From now on."""
        entry = self.entry(model)
        changed = ModelEntry(source=entry.source, labels=dict(labels), shares=TrafficShares(shares))
        changed.check_labels()
        entry.labels, entry.shares = changed.labels, changed.shares
        self._say(f"labels of {model}: {dict(labels)}, traffic: {dict(shares)}")

    def entry(self, model: str) -> ModelEntry:
        if model not in self.models:
            raise NoSuchModel(f"no model {model!r} is served here; there are {', '.join(self.models)}")
        return self.models[model]

    def ready(self, model: str) -> list[Servable]:
        """The servables of a model that answer, oldest first."""
        self.entry(model)
        return self._ready(model)

    def _ready(self, model: str) -> list[Servable]:
        servables = self.models[model].servables
        return [servables[one] for one in self.manager.ready(model) if one in servables]

    def _start(self, doing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, version: ModelVersion) -> None:
        entry = self.models[version.model]
        before = next(iter(reversed(self._ready(version.model))), None)
        try:
            servable = await self._loader.load(version, least_accuracy(before, entry.most_accuracy_drop))
        except Exception as error:
            if not isinstance(error, ManyhandsError):
                traceback.print_exc()  # a fault of ours with one version must not end all loading
            for_good = isinstance(error, LoadFailed) and error.for_good
            self.manager.failed(version, str(error), self._clock(), for_good=for_good)
            self.metrics.loads[version.model, "rejected" if for_good else "failed"] += 1
            goes_on = f"; version {before.version.version} goes on" if before else ""
            again = "" if for_good else "; it is tried again"
            self._say(f"{version} is not served: {error}{again}{goes_on}")
            return
        entry.servables[version] = servable
        self.manager.loaded(version)
        self.metrics.loads[version.model, "ok"] += 1
        quality = f", accuracy {servable.accuracy:.1%}" if servable.accuracy is not None else ""
        self._say(
            f"{version} (step {servable.form.step}{quality}) answers, loaded in {servable.load_s:.2f} s"
        )
        self.look()  # what it takes the place of may go

    async def _unload(self, version: ModelVersion) -> None:
        servable = self.models[version.model].servables.pop(version)
        until_s = self._clock() + UNLOAD_PATIENCE_S
        while servable.in_flight and self._clock() < until_s:
            await asyncio.sleep(_LOOK_AT_LAST_S)
        self._loader.unload(servable)
        self.manager.unloaded(version)
        self.metrics.forget(version.model, version.version)

    def _send_away(self, servable: Servable) -> None:
        reason = f"{servable.failures_in_a_row} requests in a row failed"
        if self.manager.withdraw(servable.version, reason):
            self._say(f"{servable.version} is withdrawn: {reason}; the version before it answers")
