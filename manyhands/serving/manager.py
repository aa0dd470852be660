"""Which versions to load and unload, and when: decisions alone, without a clock, a file or a process.

`availability-preserving` loads the new version first: a model that has answered goes on to answer.
`resource-preserving` unloads first: it never holds more than what is aspired to, and does not answer meanwhile.
"""

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from manyhands.errors import UnknownName
from manyhands.serving.stream import ModelVersion

AVAILABILITY, RESOURCE = "availability-preserving", "resource-preserving"
POLICIES = (AVAILABILITY, RESOURCE)

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 60.0


class VersionPhase(enum.StrEnum):
    """Where a version is on its way."""

    WAITING = "waiting"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    FAILED = "failed"  # and will be tried again
    REJECTED = "rejected"  # and will not


@dataclass
class VersionState:
    """What the manager knows of a version."""

    phase: VersionPhase = VersionPhase.WAITING
    reason: str = ""
    attempts: int = 0
    retry_at_s: float = 0.0

    @property
    def is_in_memory(self) -> bool:
        return self.phase in (VersionPhase.LOADING, VersionPhase.READY, VersionPhase.UNLOADING)


@dataclass(frozen=True, kw_only=True)
class ToDo:
    """What the manager wants done next."""

    load: bool
    version: ModelVersion


class VersionManager:
    """All versions of all models. The core acts on `due` and reports by `loaded`, `failed` and `unloaded`."""

    def __init__(self, policy: str = AVAILABILITY) -> None:
        if policy not in POLICIES:
            raise UnknownName("policy", policy, POLICIES)
        self.policy = policy
        self._aspired: dict[str, list[ModelVersion]] = {}
        self._states: dict[ModelVersion, VersionState] = {}

    def aspire(self, model: str, versions: Iterable[ModelVersion]) -> None:
        """From now on these are wanted, and no others of this model."""
        wanted = self._aspired[model] = sorted(versions)
        for version in wanted:
            self._states.setdefault(version, VersionState())
        self._forget(model)

    def due(self, now_s: float) -> list[ToDo]:
        """What to do now. Each is said once, and counts as begun."""
        found = [todo for model in self._aspired for todo in self._due_of(model, now_s)]
        for todo in found:
            state = self._states[todo.version]
            state.phase = VersionPhase.LOADING if todo.load else VersionPhase.UNLOADING
            state.attempts += todo.load
        return found

    def loaded(self, version: ModelVersion) -> None:
        self._expect(version, VersionPhase.LOADING)
        self._states[version] = VersionState(phase=VersionPhase.READY)

    def failed(self, version: ModelVersion, reason: str, now_s: float, *, for_good: bool = False) -> None:
        """A load came to nothing. It is tried again, later and later, unless it would fail `for_good`."""
        state = self._expect(version, VersionPhase.LOADING)
        state.phase = VersionPhase.REJECTED if for_good else VersionPhase.FAILED
        state.reason = reason
        state.retry_at_s = now_s + min(LAST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(state.attempts - 1, 10))
        self._forget(version.model)

    def unloaded(self, version: ModelVersion) -> None:
        state = self._expect(version, VersionPhase.UNLOADING)
        # One that was sent away for its answers does not come back.
        self._states[version] = VersionState(
            phase=VersionPhase.REJECTED if state.reason else VersionPhase.WAITING, reason=state.reason
        )
        self._forget(version.model)

    def lost(self, version: ModelVersion) -> None:
        """A ready version is in memory no more."""
        self._expect(version, VersionPhase.READY)
        self._states[version] = VersionState()
        self._forget(version.model)

    def withdraw(self, version: ModelVersion, reason: str) -> bool:
        """Send a ready version away for what it answers, if another one of its model is ready to take its place."""
        if len(self.ready(version.model)) < 2 or self._states[version].phase is not VersionPhase.READY:
            return False
        self._states[version].reason = reason
        return True

    def ready(self, model: str) -> list[ModelVersion]:
        """The versions that answer, oldest first; those that are to go for their answers do not count."""
        return sorted(
            one
            for one in self._of(model, lambda state: state.phase is VersionPhase.READY and not state.reason)
        )

    def states(self, model: str) -> list[tuple[ModelVersion, VersionState]]:
        """Every version that is known, oldest first."""
        return sorted(
            ((one, state) for one, state in self._states.items() if one.model == model),
            key=lambda pair: pair[0],
        )

    def _due_of(self, model: str, now_s: float) -> Iterator[ToDo]:
        aspired = self._aspired[model]
        unloads = list(self._superfluous(model, aspired))
        yield from (ToDo(load=False, version=version) for version in unloads)
        in_the_way = [one for one in self._of(model, lambda state: state.is_in_memory) if one not in aspired]
        if self.policy == RESOURCE and in_the_way:
            return
        if any(self._of(model, lambda state: state.phase is VersionPhase.LOADING)):
            return  # one after the other: what comes next may have been superseded by then
        for version in reversed(aspired):
            state = self._states[version]
            if state.phase is VersionPhase.WAITING or (
                state.phase is VersionPhase.FAILED and now_s >= state.retry_at_s
            ):
                yield ToDo(load=True, version=version)
                return

    def _superfluous(self, model: str, aspired: list[ModelVersion]) -> Iterator[ModelVersion]:
        """Ready versions that are to go: those withdrawn, and those not wanted any more that are not needed."""
        ready = self.ready(model)
        unwanted = [one for one in ready if one not in aspired]
        if self.policy == AVAILABILITY and len(unwanted) == len(ready):
            # The newest answers until one that is wanted does; also where all folders are gone for a moment.
            unwanted = unwanted[:-1]
        withdrawn = self._of(model, lambda state: state.phase is VersionPhase.READY and bool(state.reason))
        yield from (*unwanted, *withdrawn)

    def _of(self, model: str, admit: Callable[[VersionState], bool]) -> list[ModelVersion]:
        return [one for one, state in self._states.items() if one.model == model and admit(state)]

    def _expect(self, version: ModelVersion, phase: VersionPhase) -> VersionState:
        state = self._states.get(version)
        if state is None or state.phase is not phase:
            raise AssertionError(f"{version} is {state and state.phase}, not {phase}")
        return state

    def _forget(self, model: str) -> None:
        """What is neither wanted nor in memory."""
        wanted = self._aspired.get(model, [])
        for version in self._of(model, lambda state: not state.is_in_memory):
            if version not in wanted:
                del self._states[version]
