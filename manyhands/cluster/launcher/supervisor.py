"""Start the workers of this host, pass on what they print, and see the run to its end.

An elastic run goes on without a worker that died, or with another in its place (`survival.py`). In any other run, and
when a worker ends by an error of its own, the launcher ends all processes and names the one to blame.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from manyhands.cluster.launcher.blame import Exits, Outcome, was_told_to_end
from manyhands.cluster.launcher.child import Child
from manyhands.cluster.launcher.events import Event
from manyhands.cluster.launcher.fixed_membership import FixedMembership, MembershipPolicy
from manyhands.cluster.launcher.host_sampler import HostSampler
from manyhands.cluster.launcher.launch_plan import LaunchPlan, Starter
from manyhands.cluster.launcher.processes import WorkerProcesses
from manyhands.cluster.launcher.stuck import STALL_S, StuckWatch
from manyhands.cluster.launcher.termination_signals import TerminationSignals
from manyhands.cluster.launcher.without_session import WithoutSession
from manyhands.cluster.launcher.worker_logs import WorkerLogs
from manyhands.cluster.launchers import local
from manyhands.cluster.launchers.host_identity import host_identity

if TYPE_CHECKING:
    from manyhands.cluster.launcher.coordination import Coordination, Elastic
    from manyhands.cluster.launcher.host_agent import HostAgent

_TICK_S = 0.125
_AFTER_DEATH_S = 1.0
_AFTER_INTERRUPT_S = 3.0

_LEAVING = Event(
    kind="leaving",
    text="SIGTERM: the workers finish their step, save and leave; a second signal ends them at once",
)


def run(
    plan: LaunchPlan,
    *,
    on_tick: Callable[[], None],
    on_line: Callable[[int, str], None],
    on_output: Callable[[int, str], None] | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    arena: bool | int = True,
    elastic: "Elastic | None" = None,
    host_agent: "HostAgent | None" = None,
    ask: int = local.ASK,
    steps: Callable[[], int] = lambda: 0,
    stall_s: float = STALL_S,
) -> Outcome:
    """Start the processes of a plan, and see to them until all have ended.

    `on_line` gets what they print on standard error, and on standard output unless `on_output` takes that. With
    `elastic` the run survives deaths; with `host_agent` the workers take part in a run of another launcher. Call this
    from the main thread, which gets the signals: the first SIGTERM asks the workers, by the signal `ask`, to save and
    leave; a second one, and any other, ends them. `steps` says how many steps all workers have made; where there are
    none for longer than `stall_s`, the launcher says who waits for whom, and ends a run that was asked to leave.
    """
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(TerminationSignals(leaves_interrupts=plan.debug is not None))
        logs = stack.enter_context(WorkerLogs(plan.run_dir, _log_name(plan, host_agent)))
        coordination = stack.enter_context(_coordinate(plan, elastic)) if elastic else None
        processes = stack.enter_context(
            WorkerProcesses(on_line, on_output or on_line, arena, plan.name, logs)
        )
        starter = _starter(plan, processes, coordination, host_agent)
        policy: MembershipPolicy = host_agent or FixedMembership(processes, plan.workers)
        if host_agent:
            host_agent.see_to(processes, starter.start)
        elif coordination:
            stack.enter_context(_joinable(plan, processes, coordination))
            policy = _survival(plan, processes, coordination, starter, on_event, steps)
        starter.start_all()
        spread = host_agent is not None or (elastic is not None and elastic.hosts > 0)
        stuck = StuckWatch(
            processes, name=plan.name, steps=steps, on_event=on_event, stall_s=stall_s, is_spread=spread
        )
        tick = _sampled(stack, plan, processes, coordination, host_agent, on_tick)
        outcome = _Supervisor(plan, processes, policy, signals, stuck, tick, on_event, ask).watch()
        if coordination:
            coordination.end_run(outcome.message, outcome.exit_code)
        return outcome


def _coordinate(plan: LaunchPlan, elastic: "Elastic") -> "Coordination":
    # A run that is not elastic does without ZeroMQ, and starts faster for it.
    from manyhands.cluster.launcher.coordination import Coordination

    return Coordination(list(range(plan.workers)), elastic, plan.servers)


def _starter(
    plan: LaunchPlan,
    processes: WorkerProcesses,
    coordination: "Coordination | None",
    host_agent: "HostAgent | None",
) -> Starter:
    return Starter(
        plan,
        processes,
        coordination.environ if coordination else {},
        is_spread=host_agent is not None or (coordination is not None and coordination.elastic.hosts > 0),
        first_number=host_agent.first_number if host_agent else None,
    )


def _log_name(plan: LaunchPlan, host_agent: "HostAgent | None") -> Callable[[int], str]:
    """The number of a process in the whole run, as its events have it."""
    if host_agent:
        first, is_server = host_agent.first_number, host_agent.is_server
        return lambda rank: f"{'server' if is_server(rank) else 'worker'} {first + rank}"
    number = plan.environ.get(local.NUMBER)
    return plan.name if number is None else lambda rank: f"worker {number}"


def _sampled(
    stack: contextlib.ExitStack,
    plan: LaunchPlan,
    processes: WorkerProcesses,
    coordination: "Coordination | None",
    host_agent: "HostAgent | None",
    on_tick: Callable[[], None],
) -> Callable[[], None]:
    """What to do at every tick where the run is recorded; a worker that joins on a run's own host adds no second
    record of the host."""
    if plan.run_dir is None or local.NUMBER in plan.environ:
        return on_tick
    name_of = _log_name(plan, host_agent)

    def pids() -> dict[str, int]:
        found = {"launcher": os.getpid(), **({"coordinator": coordination.pid} if coordination else {})}
        return found | {name_of(child.rank): child.pid for child in processes.running}

    sampler = stack.enter_context(HostSampler(plan.run_dir, host_agent.host if host_agent else 0, pids))

    def tick() -> None:
        on_tick()
        sampler.tick()

    return tick


def _joinable(
    plan: LaunchPlan, processes: WorkerProcesses, coordination: "Coordination"
) -> contextlib.AbstractContextManager[None]:
    """While the context lasts, the run's directory says how others join it, if it takes any."""
    most = coordination.elastic.most
    if most <= plan.workers or plan.run_dir is None or processes.memory_fd is None:
        return contextlib.nullcontext()
    from manyhands.cluster.launcher.invitation import Invite, published

    invite = Invite(
        invitation=coordination.invitation,
        command=plan.command,
        strategy=plan.environ.get(local.STRATEGY),
        codec=plan.environ.get(local.CODEC),
        workers=plan.workers,
        servers=plan.servers,
        most=most,
        launcher=os.getpid(),
        memory_fd=processes.memory_fd,
        mark=host_identity(),
    )
    return published(plan.run_dir, invite)


def _survival(
    plan: LaunchPlan,
    processes: WorkerProcesses,
    coordination: "Coordination",
    starter: Starter,
    on_event: Callable[[Event], None],
    steps: Callable[[], int],
) -> MembershipPolicy:
    from manyhands.cluster.launcher.hosts_awaited import HostsAwaited
    from manyhands.cluster.launcher.survival import Survival

    elastic = coordination.elastic
    awaited = HostsAwaited(plan, elastic.hosts, elastic.address, on_event) if elastic.hosts else None
    return Survival(
        processes,
        coordination,
        start=starter.start_new,
        start_server=starter.start_server,
        servers=range(plan.workers, plan.size),
        on_event=on_event,
        awaited=awaited,
        steps=steps,
    )


class _Supervisor:
    """Watches the processes of a run until all have ended."""

    def __init__(
        self,
        plan: LaunchPlan,
        processes: WorkerProcesses,
        policy: MembershipPolicy,
        signals: TerminationSignals,
        stuck: StuckWatch,
        on_tick: Callable[[], None],
        on_event: Callable[[Event], None],
        ask: int,
    ) -> None:
        self._plan = plan
        self._processes = processes
        self._policy = policy
        self._signals = signals
        self._stuck = stuck
        self._on_tick = on_tick
        self._on_event = on_event
        self._ask = ask
        self._exits = Exits()
        self._without_session = WithoutSession(processes, plan.workers, on_event)
        self._asked_s: float | None = None  # when the workers were asked to save and leave
        self._waited_for = ""  # when a signal ended the processes of this host
        self._given_up: list[Child] = []  # those that did not, and that the launcher has killed
        self._tick_at_s = 0.0

    def watch(self) -> Outcome:
        while self._goes_on():
            self._tick()
            self._obey_signals()
            ended = self._processes.wait(self._tick_at_s - time.monotonic())
            if not self._processes.stopping:
                self._note(ended)
        self._policy.finish()
        return self._outcome()

    def _goes_on(self) -> bool:
        """Whether any process runs, or a replacement will."""
        if self._processes.busy:
            return True
        return self._policy.goes_on() and not self._processes.stopping and not self._signals.count

    def _tick(self) -> None:
        now_s = time.monotonic()
        if now_s < self._tick_at_s:
            return
        self._on_tick()
        if not self._processes.stopping:
            self._policy.tick(is_leaving=self._asked_s is not None)
            if self._plan.debug is None or self._asked_s is not None:  # a person at a prompt takes no steps
                self._end_stuck()
            self._without_session.tick()
        self._tick_at_s = now_s + _TICK_S

    def _end_stuck(self) -> None:
        """Kill the workers that keep a run from ending: the others go on without them, save and leave, if they can."""
        for child in self._stuck.tick(self._asked_s):
            if child not in self._given_up:
                self._given_up.append(child)
                child.signal(signal.SIGKILL)

    def _obey_signals(self) -> None:
        if self._signals.count > 1:
            self._processes.kill()
        elif self._signals.count and (waits_for := self._waited_for or self._policy.waits_for):
            self._waited_for = waits_for  # they can neither go on nor save
            self._processes.stop(_AFTER_DEATH_S)
        elif self._signals.number == signal.SIGTERM and not self._processes.is_forking:
            if self._asked_s is None:
                self._asked_s = time.monotonic()
                self._processes.ask_to_leave(self._ask)
                self._on_event(_LEAVING)
        elif self._signals.count == 1 and self._stuck.explain():
            self._processes.stop(_AFTER_INTERRUPT_S)

    def _note(self, ended: list[Child]) -> None:
        """Processes have ended: go on without them, or end the run."""
        exits, policy = self._exits, self._policy
        exits.codes |= {child.code for child in ended}
        for child in ended:
            self._without_session.note_end(child)
        if policy.failed:
            self._processes.stop(_AFTER_DEATH_S)
            return
        survived = [child for child in ended if policy.note_end(child)]
        failed = [child for child in ended if child.code not in local.GOOD_ENDS]
        exits.survived += [child for child in failed if child in survived]
        deaths = [child for child in failed if child not in survived]
        if self._asked_s is not None:
            if any(child in self._given_up for child in deaths):
                self._processes.stop(_AFTER_DEATH_S)
            deaths = [child for child in deaths if child not in self._given_up]
            deaths = [child for child in deaths if not was_told_to_end(child)]  # they had nothing to save
        if not policy.goes_on() and not exits.deaths and not deaths:
            self._processes.stop(_AFTER_DEATH_S)  # servers, and workers that came too late
        exits.add_deaths(deaths)
        if exits.is_decided():
            self._processes.stop(_AFTER_DEATH_S)

    def _outcome(self) -> Outcome:
        exits, signals, policy = self._exits, self._signals, self._policy
        has_finished = 0 in exits.codes or policy.has_finished
        done = Outcome(ok=True, exit_code=0, message=f"all {self._plan.workers} workers finished")
        if policy.failed and not exits.has_cause:
            return Outcome(ok=False, exit_code=policy.failed.exit_code, message=policy.failed.message)
        if local.EXIT_SAVED in exits.codes and not exits.has_cause:
            return Outcome(
                ok=False,
                exit_code=local.EXIT_SAVED,
                message="told to end by SIGTERM: the run is saved",
            )
        has_left = has_finished or local.EXIT_LEFT in exits.codes
        if self._asked_s is not None and has_left and not exits.deaths and signals.count == 1:
            return done
        if signals.number is not None and not exits.has_cause:
            message = f"interrupted by {signal.Signals(signals.number).name}"
            if self._waited_for:
                message += f" while it waited for {self._waited_for}"
            names = ", ".join(self._plan.name(child.rank) for child in self._given_up)
            unsaved = f"{names} did not come to the end of a step" if names else ""
            return Outcome(
                ok=False,
                exit_code=128 + signals.number,
                message=message,
                unsaved=unsaved,
                waited_for=self._waited_for,
            )
        culprit = exits.culprit(has_finished=has_finished)
        return self._blame(culprit) if culprit else self._done(done)

    def _done(self, done: Outcome) -> Outcome:
        """The run has ended well, unless every worker has only trained by itself."""
        text, is_failure = self._without_session.verdict()
        if not is_failure:
            return replace(done, note=text)
        return Outcome(ok=False, exit_code=local.EXIT_NO_SESSION, message=text)

    def _blame(self, child: Child) -> Outcome:
        workers, why = self._plan.workers, self._policy.why(child)
        who = self._plan.name(child.rank) + (f" of {workers}" if child.rank < workers else "")
        return Outcome(
            ok=False,
            exit_code=child.code if child.code > 0 else 128 - child.code,
            message=f"{who} {child.ending}" + (f"; {why}" if why else ""),
            is_lost=bool(why),
            rank=child.rank,
            process=self._plan.name(child.rank),
            tail=tuple(child.tail),
        )
