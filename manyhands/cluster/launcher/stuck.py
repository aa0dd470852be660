"""Whether a run gets on, and, where it does not, who waits for whom and at which line.

The launcher sees how many steps the workers have made. When there were none for a while, it asks every process where it
is: a signal makes the process write its Python stack into a pipe, also while a call into C holds the interpreter's
lock. Those whose stack ends in our own meetings wait; the others are the ones that they wait for.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from manyhands.cluster.launcher import kernel_view, stack
from manyhands.cluster.launcher.child import Child
from manyhands.cluster.launcher.events import Event
from manyhands.cluster.launcher.kernel_view import KernelView
from manyhands.cluster.launcher.processes import WorkerProcesses
from manyhands.cluster.launcher.stack import Doing, Frame
from manyhands.cluster.launchers import local

STALL_S = 10.0
"""After so long without a word or a step a process is looked at more closely."""
SAID_AFTER = 3.0  # stalls without a step, before a person is told; then after twice as long, and so on
_LONG_STEPS = 3.0  # mean steps: slow is not stuck
# In a run that was told to end: stalls that a worker has which computes, or is on another host, while others wait.
_COMPUTES_FOR = 6.0
_ANSWER_S = 0.5
_NAMED = 4  # processes that a sentence names


@dataclass
class _Seen:
    """One process, as it was looked at."""

    child: Child
    before: KernelView
    after: KernelView | None = None
    frames: list[Frame] = field(default_factory=list)

    @property
    def doing(self) -> Doing:
        if self.after is None or self.after.is_stopped or not self.frames:
            return Doing.WORKS
        found = stack.doing(self.frames)
        return Doing.WORKS if found is Doing.SERVES and self.computes else found

    @property
    def computes(self) -> bool:
        return self.after is not None and self.after.computes_since(self.before)

    def text(self) -> str:
        """Where it is; follows its name."""
        if self.after is not None and self.after.is_stopped:
            return "is stopped (SIGSTOP)"
        if not self.frames:
            disk = self.after is not None and self.after.waits_for_a_disk
            return (
                "waits for a disk or a file system" if disk else "has not begun, or does not say where it is"
            )
        verb = "computes" if self.computes else "is"
        return f"{verb} at {stack.place(self.frames)}"


class StepClock:
    """When the run last got on, and how long its steps take; `steps` counts those of all workers."""

    def __init__(self, steps: Callable[[], int]) -> None:
        self._steps = steps
        self._seen = steps()
        self._made = 0
        self._began_s = self.last_s = time.monotonic()

    def note(self, now_s: float) -> None:
        seen = self._steps()
        if seen == self._seen:
            return
        if not self._made:
            self._began_s = now_s  # from the first step on: what was before it is no step
        self._made += 1
        self._seen, self.last_s = seen, now_s

    @property
    def mean_s(self) -> float:
        """Seconds between two steps, as the launcher has seen them."""
        return (self.last_s - self._began_s) / (self._made - 1) if self._made > 1 else 0.0


class StuckWatch:
    """Looks at the processes of a run that makes no steps; `name` is what people call one.

    In a run that `is_spread` over hosts, each launcher sees its own host alone.
    """

    def __init__(
        self,
        processes: WorkerProcesses,
        *,
        name: Callable[[int], str],
        steps: Callable[[], int],
        on_event: Callable[[Event], None],
        stall_s: float,
        is_spread: bool = False,
    ) -> None:
        self._is_spread = is_spread
        self._processes = processes
        self._name = name
        self._progress = StepClock(steps)
        self._on_event = on_event
        self._stall_s = stall_s
        self._told_after_s = SAID_AFTER * stall_s
        self._looking: list[_Seen] = []
        self._looking_s = 0.0
        self._again_s = 0.0
        self._said = ""
        self._is_interrupted = self._is_explained = False

    def tick(self, asked_s: float | None) -> Sequence[Child]:
        """Look, where it is time for it; returns the processes to end in a run that was asked at `asked_s` to leave."""
        now_s = time.monotonic()
        if self._is_interrupted:
            return ()
        seen_s = self._progress.last_s
        self._progress.note(now_s)
        if self._progress.last_s != seen_s:
            self._told_after_s, self._said = SAID_AFTER * self._stall_s, ""
        if self._looking:
            return self._answered(now_s, asked_s) if now_s - self._looking_s >= _ANSWER_S else ()
        waited_s = now_s - max(self._progress.last_s, asked_s or 0.0)
        patience_s = self._told_after_s if asked_s is None else self._stall_s - _ANSWER_S
        if waited_s >= max(patience_s, _LONG_STEPS * self._progress.mean_s) and now_s >= self._again_s:
            self._look(now_s)
        return ()

    def explain(self) -> bool:
        """The run was interrupted: say first who waits for whom, if it had not got on; whether that is done."""
        now_s = time.monotonic()
        if not self._is_interrupted:
            self._is_interrupted = True
            self._is_explained = now_s - self._progress.last_s < self._stall_s / 2
            if not self._is_explained:
                self._look(now_s)
        elif not self._is_explained and now_s - self._looking_s >= _ANSWER_S:
            self._said = ""
            self._tell(self._take(), now_s)
            self._is_explained = True
        return self._is_explained

    def _look(self, now_s: float) -> None:
        self._looking = [_Seen(child, kernel_view.view(child.pid)) for child in self._processes.running]
        self._looking_s = now_s
        for child in self._processes.running:
            child.stack_lines.clear()
            if kernel_view.catches(child.pid, local.WHERE):
                child.signal(local.WHERE)

    def _take(self) -> list[_Seen]:
        """What was seen of those that still run."""
        seen, self._looking = self._looking, []
        left = [one for one in seen if one.child in self._processes.running]
        for one in left:
            one.after = kernel_view.view(one.child.pid)
            one.frames = stack.parse(one.child.stack_lines)
        return left

    def _answered(self, now_s: float, asked_s: float | None) -> Sequence[Child]:
        seen = self._take()
        if self._progress.last_s > self._looking_s:
            return ()  # meanwhile it has got on
        if asked_s is None:
            if any(one.doing is Doing.WAITS for one in seen):  # else all are at work of their own
                self._tell(seen, now_s)
            self._told_after_s *= 2
            return ()
        self._again_s = now_s + self._stall_s / 4
        working = [one for one in seen if one.doing is Doing.WORKS]
        is_saving = any(one.doing is Doing.SAVES for one in seen)
        if not seen or (is_saving and not working):
            return ()
        if working and self._has_time(seen, working, now_s - asked_s):
            if not self._said:
                self._tell(seen, now_s)
            return ()
        ending = working or [one for one in seen if one.doing is not Doing.SERVES]
        if not ending:
            return ()  # servers stay until the run is over
        if not working and self._is_spread and now_s - asked_s < _COMPUTES_FOR * self._stall_s:
            return ()  # a worker of another host, which this launcher cannot look at, may be in a long step
        self._said = ""
        self._tell(seen, now_s)
        self._again_s = now_s + self._stall_s  # for the others, to go on without them and save
        return [one.child for one in ending]

    def _has_time(self, seen: Sequence[_Seen], working: Sequence[_Seen], asked_s: float) -> bool:
        """Whether a run that was asked to leave so long ago is only at work: a long step, an evaluation."""
        is_needed = any(one.doing is Doing.WAITS for one in seen)
        patience_s = _COMPUTES_FOR * self._stall_s if is_needed else float("inf")
        return all(one.computes for one in working) and asked_s < patience_s

    def _tell(self, seen: Sequence[_Seen], now_s: float) -> None:
        """Say who waits for whom, if that is news."""
        waiting = [one for one in seen if one.doing is Doing.WAITS]
        others = [one for one in seen if one.doing is Doing.WORKS]
        text = self._sentence(waiting, others)
        if not text or text == self._said:
            return
        self._said = text
        waited_s = now_s - self._progress.last_s
        fields: dict[str, object] = {
            "waited_s": waited_s,
            "waiting": [one.child.rank for one in waiting],
            "for": [one.child.rank for one in others],
        }
        self._on_event(Event(kind="stuck", text=f"no step for {waited_s:.0f} s: {text}", fields=fields))

    def _sentence(self, waiting: Sequence[_Seen], others: Sequence[_Seen]) -> str:
        if others and waiting:
            verb = "waits" if len(waiting) == 1 else "wait"
            those = ", and for ".join(
                f"{self._name(one.child.rank)}, which {one.text()}" for one in others[:_NAMED]
            )
            return f"{self._names(waiting)} {verb} for {those}{_more(others)}"
        if len(waiting) > 1 or (waiting and (self._is_spread or self._processes.size > 1)):
            those = "; ".join(f"{self._name(one.child.rank)} {one.text()}" for one in waiting[:_NAMED])
            whom = "another host" if self._is_spread else "each other"
            return f"all wait for {whom}: {those}{_more(waiting)}"
        return "; ".join(f"{self._name(one.child.rank)} {one.text()}" for one in others[:_NAMED]) + _more(
            others
        )

    def _names(self, some: Sequence[_Seen]) -> str:
        kind, first = self._name(some[0].child.rank).split()
        numbers = [first, *(self._name(one.child.rank).split()[1] for one in some[1:_NAMED])]
        return f"{kind}{'s' if len(some) > 1 else ''} {', '.join(numbers)}{_more(some)}"


def _more(some: Sequence[_Seen]) -> str:
    left = len(some) - _NAMED
    return f" and {left} more" if left > 0 else ""
