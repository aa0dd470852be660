"""`launch --join`: more workers for a run that is going on, on this host or another."""

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands import strategies
from manyhands.cluster.launcher import coordination, cores, supervisor
from manyhands.cluster.launcher import invitation as invites
from manyhands.cluster.launcher.blame import Outcome
from manyhands.cluster.launcher.events import Event
from manyhands.cluster.launcher.launch_plan import LaunchPlan
from manyhands.cluster.launchers import local, open_between_hosts
from manyhands.cluster.launchers.addresses import address_towards
from manyhands.cluster.launchers.rank_info import SERVERS
from manyhands.errors import ManyhandsError, UsageError
from manyhands.launching.ending import is_stop, say_ending, signal_name
from manyhands.launching.run import REPLACE, make_directory, stall_s, wait_s
from manyhands.launching.words import say
from manyhands.telemetry.digest import Digest
from manyhands.telemetry.read import Tail

if TYPE_CHECKING:
    from manyhands.cluster.launcher.host_agent import HostAgent

_ENDING_S = 5.0  # for a worker from outside, to end when the run has


def join_run(address: str, command: list[str], workers: int = 1, servers: int = 0) -> int:
    """Be one more worker, or some, of a run on this host or another, until it ends."""
    invite = invites.read(address)
    if not invite.is_here or invite.takes_hosts:
        return _join_from_another_host(invite, address, command or invite.command, workers, servers)
    if servers:
        raise UsageError(
            f"--servers {servers}: the servers of a run on one host are those that it began with; leave --servers out"
        )
    if workers != 1:
        raise UsageError(
            f"--workers {workers}: on the host of the run, workers join one by one; leave --workers out"
        )
    memory_fd = invite.open_memory()
    run = Path(address).resolve()
    seen_s = time.monotonic()
    welcome = _Welcome(address, 1, 0, "this worker")
    watched = _Watched(run)

    def end_with_the_run() -> None:
        nonlocal seen_s
        if not invite.is_over():
            seen_s = time.monotonic()
        elif time.monotonic() - seen_s > _ENDING_S:
            raise ManyhandsError(f"the run in {address} has ended without this worker")
        if os.getpid() in watched.joined():
            welcome.say()

    try:
        outcome = supervisor.run(
            LaunchPlan(
                command=command or invite.command,
                workers=1,
                layout=cores.layout(1),
                environ=_environ(invite),
                run_dir=run,
            ),
            arena=memory_fd,
            on_tick=end_with_the_run,
            on_line=lambda rank, line: say(line),
            on_event=_say_event,
            steps=watched.steps,
            stall_s=stall_s(),
            ask=signal.SIGUSR1,  # this worker alone: the run goes on without it
        )
    finally:
        os.close(memory_fd)
    return _end(outcome)


def _environ(invite: invites.Invite) -> dict[str, str]:
    return {
        local.INVITATION: invite.invitation.text(),
        local.IS_NEW: "1",
        local.NUMBER: str(os.getpid()),
        local.SIZE: str(invite.workers + invite.servers),
        local.MOST: str(invite.most),
        SERVERS: str(invite.servers),
        **invite.chosen,
    }


def _join_from_another_host(
    invite: invites.Invite, directory: str, command: list[str], workers: int, servers: int
) -> int:
    """Start processes of this host in a run of another host's launcher (on one host they do as if on another)."""
    _admit(invite, directory, workers, servers)
    from manyhands.cluster.launcher.host_agent import HostAgent

    place = invite.invitation.endpoint.partition("://")[2]
    own = address_towards(place.rpartition(":")[0])
    make_directory(Path(directory))
    say(open_between_hosts.sentence("a free port of the first worker's host"))
    with HostAgent(
        invite.invitation,
        address=own,
        workers=workers,
        servers=servers,
        replace=REPLACE,
        wait_s=wait_s(),
        on_event=_say_event,
    ) as host_agent:
        told = {
            local.INVITATION: invite.invitation.text(),
            **coordination.host_environ(host_agent.host, own),
            **invite.chosen,
        }
        plan = LaunchPlan(
            command=command,
            workers=workers,
            servers=servers,
            layout=cores.layout(workers, None, servers),
            environ=told,
            run_dir=Path(directory).resolve(),
            load="manyhands.engine.session",
        )
        outcome = _take_part(plan, host_agent, _Welcome(place, workers, servers, "this host"))
    return _end(outcome)


def _take_part(plan: LaunchPlan, host_agent: "HostAgent", welcome: "_Welcome") -> Outcome:
    """See to the processes of this host until they have ended."""

    def on_line(rank: int, line: str) -> None:
        name = "server" if host_agent.is_server(rank) else "worker"
        say(f"[{name} {host_agent.first_number + rank}] {line}")

    def on_tick() -> None:
        if host_agent.is_in_the_run:
            welcome.say()

    assert plan.run_dir
    return supervisor.run(
        plan,
        on_tick=on_tick,
        on_line=on_line,
        on_event=_say_event,
        steps=_Watched(plan.run_dir).steps,
        stall_s=stall_s(),
        host_agent=host_agent,
        ask=signal.SIGUSR1,  # the workers of this host: the run goes on without them
    )


def _say_event(event: Event) -> None:
    say(event.text)


def _admit(invite: invites.Invite, directory: str, workers: int, servers: int) -> None:
    """Refuse what the run does not take from another host."""
    if not invite.takes_hosts:
        raise UsageError(
            f"the run in {directory} is on another host and has room on its own alone; start it with --hosts 2"
        )
    if workers < 1:
        raise UsageError(f"--workers {workers}: it must be at least 1")
    if servers:
        strategy = strategies.parse(invite.strategy or strategies.DEFAULT)
        strategies.admit(strategy, strategies.Asked(workers=workers, servers=servers))


class _Welcome:
    """What is said once, when the coordinator has taken these processes in."""

    def __init__(self, address: str, workers: int, servers: int, what: str) -> None:
        count = f"{workers} worker{'s' * (workers != 1)}"
        if servers:
            count += f" and {servers} server{'s' * (servers != 1)}"
        self._line = (
            f"joined the run of {address} with {count}; its progress is shown there; Ctrl-C takes {what} out"
        )

    def say(self) -> None:
        if self._line:
            say(self._line)
        self._line = ""


class _Watched:
    """The records that are written in a directory from now on: how many steps there are, and who has joined."""

    def __init__(self, run: Path) -> None:
        self._tail, self._digest = Tail(run, skip_existing=True), Digest(1)
        self._joined: set[int] = set()

    def steps(self) -> int:
        """How many steps all workers have made that write their records here."""
        records = self._tail.poll()
        self._joined |= {record["rank"] for record in records if record["kind"] == "join"}
        self._digest.add(records)
        return self._digest.steps_of_all

    def joined(self) -> set[int]:
        self.steps()
        return self._joined


def _end(outcome: Outcome) -> int:
    """Say how it ended here, if not well; the run has an end of its own."""
    if outcome.waited_for:
        say(f"stopped by {signal_name(outcome)} while this host waited for {outcome.waited_for}")
    elif is_stop(outcome):
        say(f"stopped by {signal_name(outcome)}: the run goes on without the workers of this command")
    else:
        say_ending(outcome)
    return outcome.exit_code
