"""How the launcher keeps an elastic run going: it replaces workers that died, kills those that hang, reports both."""

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from manyhands.cluster.coordinator.orders import Report
from manyhands.cluster.launcher.blame import RunFailure
from manyhands.cluster.launcher.child import Child
from manyhands.cluster.launcher.coordination import Coordination
from manyhands.cluster.launcher.events import Event
from manyhands.cluster.launcher.exits import describe_exit
from manyhands.cluster.launcher.fixed_membership import LOST
from manyhands.cluster.launcher.hosts_awaited import HostsAwaited
from manyhands.cluster.launcher.kernel_view import Silences
from manyhands.cluster.launcher.processes import WorkerProcesses
from manyhands.cluster.launchers import local

FIRST_DELAY_S = 0.5  # before the second replacement; each one after it waits twice as long
LONGEST_DELAY_S = 30.0


@dataclass(kw_only=True)
class _Death:
    child: Child
    how: str
    at_s: float


class Survival:
    """Deaths and replacements in one run; `start(slot)` starts a worker in the place of another.

    `servers` are the ranks of servers, and `start_server(rank)` starts one that takes over from one that died.
    """

    def __init__(
        self,
        processes: WorkerProcesses,
        coordination: Coordination,
        *,
        start: Callable[[int], int],
        start_server: Callable[[int], int],
        servers: Iterable[int],
        on_event: Callable[[Event], None],
        awaited: HostsAwaited | None = None,
        steps: Callable[[], int] = lambda: 0,
    ) -> None:
        self._awaited = awaited
        self._steps = steps
        self._processes = processes
        self._coordination = coordination
        self._elastic = coordination.elastic
        self._start = start
        self._start_server = start_server
        self._servers = {rank: rank for rank in servers}  # by number: whose place it has
        self._first_server = min(self._servers, default=0)
        self._on_event = on_event
        self._slots = {number: number for number in coordination.members}  # whose place each worker has
        self._state_holders = set(coordination.members)  # members that have the run's state
        self._untold: list[_Death] = []
        self._stalled: set[int] = set()
        self._silences = Silences(self._elastic.stall_s)
        self._waiting: set[int] = set()  # members whose replica is not whole
        self._has_finished = False
        self._is_lost = False  # whether no worker is left that has the parameters
        self._last: list[Child] = []  # workers that died and after which no step was made
        self.failed: RunFailure | None = None  # why a launcher on another host says that the run cannot go on
        self._remote_hosts: set[int] = set()  # members that another launcher has started
        self._replaced = 0  # workers
        self._server_deaths = 0  # since the last step
        self._steps_at_death = -1
        self._due: list[tuple[float, int]] = []  # when to start a replacement, and in which place
        processes.listen(coordination, self._hear)

    def is_worker(self, number: int) -> bool:
        return number in self._slots

    def note_end(self, child: Child) -> bool:
        """A process has ended; says whether the run can go on after that."""
        if child.rank in self._servers:
            return self._note_server(child)
        self._coordination.tell_ended(child.rank)
        self._has_finished = self._has_finished or child.code == 0
        if child.code in local.GOOD_ENDS:
            self._state_holders.discard(child.rank)
            return True
        is_late = child.rank not in self._state_holders and (
            self._has_finished or child.code == local.EXIT_PEER_LOST
        )
        if child.code > 0 and is_late:
            return self._has_some()  # it came when the others were going
        if child.code > 0:
            return False  # by an error of its own: the others would meet it as well
        how = describe_exit(child.code)
        if child.rank in self._stalled:
            how = f"it had not been heard of for {self._elastic.stall_s:g} s and was {how}"
        death = _Death(child=child, how=how, at_s=time.monotonic())
        if child.rank in self._waiting:
            self._tell(death, "it waited for its replica to be whole again", {})
        else:
            self._untold.append(death)
        self._state_holders.discard(child.rank)
        if not self._has_some():
            return False
        if self._replaced < self._elastic.replace:
            delay_s = (
                min(FIRST_DELAY_S * 2 ** (self._replaced - 1), LONGEST_DELAY_S) if self._replaced else 0.0
            )
            self._due.append((time.monotonic() + delay_s, self._slots[child.rank]))
            self._replaced += 1
        return self._has_finished or not self._are_too_few()

    def _are_too_few(self) -> bool:
        """Whether workers are left, and are not enough for a replica in parts."""
        if self._elastic.group_size == 1:
            return False
        here = [one for one in self._processes.running if self.is_worker(one.rank)]
        return len(here) + len(self._due) < self._elastic.group_size

    def _note_server(self, child: Child) -> bool:
        """A server has ended; another takes over its state, if that is in the host's memory."""
        if self._elastic.hosts:
            self._coordination.tell_ended(child.rank)
        if child.code == 0 or self._has_finished:
            return True  # a worker that has finished was the last to want anything of it
        is_replaced = self._may_replace_server()
        # Where there are other hosts, servers there may have a copy of what it had.
        if child.code > 0 or not (is_replaced or self._elastic.hosts):
            return False
        rank = self._servers.pop(child.rank)
        if is_replaced:
            self._servers[self._start_server(rank)] = rank
        how = describe_exit(child.code)
        name = child.rank if self._elastic.hosts else rank - self._first_server
        what = "another takes over from it" if is_replaced else "the others go on without it"
        text = f"server {name} died ({how}): {what}"
        self._on_event(Event(kind="server", text=text, fields={"rank": rank, "how": how, "pid": child.pid}))
        return True

    def _may_replace_server(self) -> bool:
        """What a server knew is in the host's memory: it is replaced as often as it dies, unless each new one dies
        before the workers have made a step."""
        steps = self._steps()
        self._server_deaths = self._server_deaths + 1 if steps == self._steps_at_death else 1
        self._steps_at_death = steps
        return self._server_deaths <= self._elastic.replace

    def _has_some(self) -> bool:
        """Whether a worker is left, or the last one had finished."""
        has_workers = self._remote_hosts or any(self.is_worker(one.rank) for one in self._processes.running)
        self._is_lost = not (has_workers or self._has_finished)
        return not self._is_lost

    @property
    def waits_for(self) -> str:
        return self._awaited.missing if self._awaited else ""

    def why(self, culprit: Child) -> str:
        """Why the run could not go on after the death of this process."""
        if culprit.rank in self._servers and culprit.code < 0:
            died = f" and {self._server_deaths} servers died without a step in between"
            return f"no other takes over from it, since replace = {self._elastic.replace}" + (
                died if self._elastic.replace else ""
            )
        if not self._is_lost:
            return ""
        before = [child.rank for child in self._last if child is not culprit]
        return f"{_named('worker', before)} had died before it, and {LOST}" if before else LOST

    @property
    def has_finished(self) -> bool:
        """Whether a worker has come to the end of its script."""
        return self._has_finished

    def goes_on(self) -> bool:
        """Whether any worker runs or will; once one has finished, those that have not joined come too late."""
        running = {one.rank for one in self._processes.running if self.is_worker(one.rank)}
        elsewhere = self._remote_hosts if self._elastic.hosts else set()
        return self._processes.is_forking or bool(
            running & self._state_holders if self._has_finished else running or elsewhere
        )

    def tick(self, *, is_leaving: bool) -> None:
        """Start what is due, and say which hosts are missing."""
        if is_leaving:
            return
        if self._awaited:
            self._awaited.tick()
        now = time.monotonic()
        for at_s, slot in [entry for entry in self._due if entry[0] <= now]:
            self._due.remove((at_s, slot))
            self._slots[self._start(slot)] = slot

    def finish(self) -> None:
        """Report deaths after which the workers made no step any more."""
        for death in self._untold:
            self._tell(death, "the run ended", {})
        self._last = [death.child for death in self._untold]
        self._untold.clear()
        self._processes.ignore(self._coordination)

    def _hear(self) -> None:
        reports = self._coordination.take()
        if reports is None:
            self._processes.ignore(self._coordination)
            code = self._coordination.start_again()
            self._processes.listen(self._coordination, self._hear)
            how = describe_exit(code)
            self._on_event(
                Event(kind="coordinator", text=f"the coordinator died ({how}) and was started again")
            )
            return
        for report in reports:
            if report.hosts_here is not None and self._awaited:
                self._awaited.note(report.hosts_here)
            if report.stalled is not None:
                self._kill(report.stalled)
            if report.failed and not self.failed:
                self.failed = RunFailure(report.failed, local.EXIT_CRASHED)
            if report.is_over:
                self._remote_hosts.clear()
                self._has_finished = self._has_finished or (report.finished and self._elastic.hosts > 0)
                self._has_some()
            if report.generation is not None:
                self._awaited = None  # the run has begun
                self._tell_generation(report)

    def _kill(self, number: int) -> None:
        """Kill a silent member if it hangs; the other workers end one of another launcher (`Host.end`)."""
        ours = [child for child in self._processes.running if child.rank == number]
        for child in ours:
            if self._silences.hangs(child.pid):
                self._stalled.add(number)
                child.signal(signal.SIGKILL)
        if not ours:
            self._coordination.tell_ended(number)

    def _tell_generation(self, report: Report) -> None:
        new = sorted(set(report.members) - self._state_holders - self._remote_hosts)
        accounted = {*report.members, *report.gone, *report.left}
        waiting = sorted(self._state_holders - accounted) if self._elastic.group_size > 1 else []
        ours = {child.rank for child in self._processes.running} | set(self._slots)
        self._state_holders |= set(report.members) & ours
        self._remote_hosts |= set(report.members) - ours
        count = f"{len(report.members)} worker{'' if len(report.members) == 1 else 's'}"
        again = f"step {report.step} begun again with {count}"
        for death in [one for one in self._untold if one.child.rank in report.gone]:
            self._untold.remove(death)
            told, fields = _timed(report, death.at_s, again)
            self._tell(death, told, fields)
        for ending in report.ended:
            self._remote_hosts.discard(ending.member)
            if ending.how:
                told, fields = _timed(report, ending.at_s, again)
                kind, name = ("server", "server") if ending.member in report.servers else ("death", "worker")
                text = f"{name} {ending.member} of host {ending.address} died ({ending.how}): {told}"
                known = {"rank": ending.member, "how": ending.how, "host": ending.address, **fields}
                self._on_event(Event(kind=kind, text=text, fields=known))
        for host in report.vanished:
            self._remote_hosts -= set(host.members)
            told, fields = _timed(report, host.at_s, again)
            servers = [one for one in host.members if one in report.servers]
            workers = [one for one in host.members if one not in servers]
            names = " and ".join(
                _named(*some) for some in (("worker", workers), ("server", servers)) if some[1]
            )
            text = f"host {host.address} is gone (nothing was heard of it any more), with {names}: {told}"
            known = {"host": host.address, "ranks": workers, "servers": servers, **fields}
            self._on_event(Event(kind="host", text=text, fields=known))
        for number in sorted(set(report.left) | (self._remote_hosts - set(report.members))):
            self._state_holders.discard(number)
            self._remote_hosts.discard(number)
            text = f"worker {number} has left: {count} from step {report.step} on"
            self._on_event(Event(kind="leave", text=text, fields={"rank": number, "step": report.step}))
        if report.is_mixed:
            text = "no replica was whole: the parts that are left of several make one, and nothing is lost"
            self._on_event(Event(kind="mixed", text=text, fields={"step": report.step}))
        self._waiting = (self._waiting - set(report.members)) | set(waiting)
        for number in waiting:
            self._state_holders.discard(number)
            text = f"worker {number} waits: its replica is not whole until another has joined"
            self._on_event(Event(kind="wait", text=text, fields={"rank": number, "step": report.step}))
        for number in new:
            text = f"worker {number} has joined: {count} from step {report.step} on"
            self._on_event(Event(kind="join", text=text, fields={"rank": number, "step": report.step}))

    def _tell(self, death: _Death, rest: str, fields: dict[str, object]) -> None:
        child = death.child
        last = _reason_in(list(child.tail))
        text = f"worker {child.rank} died ({death.how}{last and ': ' + last}): {rest}"
        known = {"rank": child.rank, "how": death.how, "pid": child.pid, **fields}
        self._on_event(Event(kind="death", text=text, fields=known))


def _timed(report: Report, at_s: float, again: str) -> tuple[str, dict[str, object]]:
    """How long something took to be noticed, and how long training stood still for it."""
    noticed_s = max(0.0, report.noticed_s - at_s)
    stood_s = max(0.0, report.resumed_s - at_s)
    text = f"noticed after {noticed_s:.2f} s, {again}, training stood still for {stood_s:.2f} s"
    fields: dict[str, object] = {
        "noticed_s": noticed_s,
        "stood_s": stood_s,
        "step": report.step,
        "workers": len(report.members),
    }
    return text, fields


def _named(word: str, numbers: list[int]) -> str:
    return f"{word}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _reason_in(tail: list[str]) -> str:
    """The line that says most of why a worker died: its last one, or, in Python's report of a crash, the place."""
    for number, line in enumerate(tail):
        if line.startswith("Current thread"):
            return next((place.strip() for place in tail[number:] if place.lstrip().startswith("File ")), "")
    return next((line.strip() for line in reversed(tail) if line.strip()), "")
