"""All processes of one launcher: started together, heard together, ended together.

The launcher holds every process by a file descriptor (pidfd), so exits and output arrive through one selector: no
threads, no polling for deaths, no process id that may meanwhile belong to another process.
"""

import contextlib
import os
import selectors
import subprocess
import time
from collections.abc import Callable
from typing import Any

from manyhands.cluster.launcher.child import Child, split_report
from manyhands.cluster.launcher.empty_terminal import empty_terminal
from manyhands.cluster.launcher.forking import Forking
from manyhands.cluster.launcher.guard import Guard
from manyhands.cluster.launcher.killed_groups import KilledGroups
from manyhands.cluster.launcher.pipes import LinePipe, WorkerPipes
from manyhands.cluster.launcher.worker_logs import WorkerLogs
from manyhands.cluster.launchers import host_page, local
from manyhands.cluster.launchers.host_page import HostPage
from manyhands.errors import ManyhandsError

_NEVER = float("inf")


class WorkerProcesses:
    """The workers and servers of this host; leaving the context ends every process and closes every descriptor.

    `arena` is whether they share memory, or the descriptor of memory that they share with others.
    """

    def __init__(
        self,
        on_line: Callable[[int, str], None],
        on_output: Callable[[int, str], None],
        arena: bool | int,
        name: Callable[[int], str],
        logs: WorkerLogs | None = None,
    ) -> None:
        self.running: list[Child] = []
        self.size = 0
        self.stopping = False
        self._on_line = on_line
        self._on_output = on_output
        self._arena = arena
        self._name = name
        self._logs = logs or WorkerLogs(None, name)
        self._kill_at_s = _NEVER
        self._forking: Forking | None = None
        self._killed = KilledGroups()
        self._ended: list[Child] = []  # heard of since the last `wait`

    def __enter__(self) -> "WorkerProcesses":
        with contextlib.ExitStack() as stack:
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._inherited: list[int] = []
            if self._arena is not False:
                is_given = self._arena is not True
                memory = os.dup(self._arena) if is_given else os.memfd_create("manyhands", os.MFD_CLOEXEC)
                self._inherited.append(memory)
                stack.callback(os.close, memory)
            page = os.memfd_create("manyhands-page", os.MFD_CLOEXEC)
            stack.callback(os.close, page)
            self.page = HostPage(page)
            self._stdin = stack.enter_context(empty_terminal())
            self._guard = stack.enter_context(Guard())
            stack.callback(self._end_all)
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._resources.close()

    @property
    def memory_fd(self) -> int | None:
        """The memory that all workers inherit."""
        return self._inherited[0] if self._inherited else None

    @property
    def busy(self) -> bool:
        """Whether any process runs, or the fork server is about to start some."""
        return bool(self.running or self._forking)

    @property
    def is_forking(self) -> bool:
        return self._forking is not None

    # Starting

    def start(
        self,
        command: list[str],
        environ: dict[str, str],
        rank: int | None = None,
        *,
        has_terminal: bool = False,
    ) -> int:
        """Start the next process, in a process group of its own, so that a terminal's Ctrl-C reaches only the launcher.

        Returns its number, which is its rank unless it takes the `rank` of another. One that `has_terminal` reads and
        writes where the launcher does, and gets its Ctrl-C.
        """
        more = {local.TERMINAL: "1"} if has_terminal else {}
        with WorkerPipes(self.size) as pipes:
            try:
                process = subprocess.Popen(
                    command,
                    env={
                        **self._environ(self.size if rank is None else rank, self.size, environ),
                        local.STACK_FD: str(pipes.their_stack),
                        **more,
                    },
                    stdin=None if has_terminal else self._stdin,
                    stdout=None if has_terminal else pipes.their_output,
                    stderr=None if has_terminal else pipes.their_error,
                    pass_fds=[*self._inherited, self.page.fd, pipes.their_stack],
                    process_group=None if has_terminal else 0,
                )
            except OSError as error:
                raise ManyhandsError(f"cannot start {self._name(self.size)}: {error}.") from error
            process.returncode = 0  # `Child` reaps the process, not that object
            self.size += 1
            self._add(pipes, process.pid)
            return pipes.rank

    def fork(self, command: list[str], environs: list[dict[str, str]], *, load: str) -> None:
        """Let a fork server that has imported `load` start all workers; they appear while the launcher waits."""
        self.size = len(environs)
        own = [self._environ(rank, rank, environ) for rank, environ in enumerate(environs)]
        self._forking = forking = Forking(
            command, own, load=load, inherited=[*self._inherited, self.page.fd], stdin=self._stdin
        )
        self.listen(forking, lambda: self._hear_fork_server(forking))

    def _environ(self, rank: int, row: int, environ: dict[str, str]) -> dict[str, str]:
        arena = {local.ARENA_FD: str(self._inherited[0])} if self._inherited else {}
        page = {host_page.FD: str(self.page.fd), host_page.ROW: str(row)}
        return {**environ, local.RANK: str(rank), **arena, **page}

    def _hear_fork_server(self, forking: Forking) -> None:
        try:
            is_complete = forking.hear()
        except ManyhandsError:
            self._forget_fork_server()
            raise
        if not is_complete:
            return
        self._forget_fork_server()
        forking.finish()
        children = [self._add(pipes, pid) for pipes, pid in zip(forking.pipes, forking.pids, strict=True)]
        self._pass_on_errors(children[0], forking.output)

    def _forget_fork_server(self) -> Forking | None:
        """Stop listening to the fork server."""
        forking, self._forking = self._forking, None
        if forking:
            self._selector.unregister(forking)
        return forking

    def _add(self, pipes: WorkerPipes, pid: int) -> Child:
        """Watch a process from now on, and let it begin."""
        child = Child(pid, pipes)
        self.running.append(child)
        self.page.begin(child.rank, pid)
        self._guard.watch(pid)
        self.listen(child.pidfd, lambda: self._ended.append(child))
        self.listen(
            child.output.fd, lambda: self._read(child.output, lambda lines: self._pass_on(child, lines))
        )
        self.listen(
            child.error.fd, lambda: self._read(child.error, lambda lines: self._pass_on_errors(child, lines))
        )
        self.listen(child.stack.fd, lambda: self._read(child.stack, child.stack_lines.extend))
        pipes.hand_over()
        return child

    # Listening

    def listen(self, source: Any, on_news: Callable[[], None]) -> None:
        """In `wait`, call `on_news` whenever there is something to read from `source`."""
        self._selector.register(source, selectors.EVENT_READ, on_news)

    def ignore(self, source: Any) -> None:
        self._selector.unregister(source)

    def wait(self, timeout_s: float) -> list[Child]:
        """Pass on what the processes print, for at most this long; returns the processes that have ended."""
        now_s = time.monotonic()
        if now_s >= self._kill_at_s:
            self.kill()
        for key, _ in self._selector.select(max(0.0, min(timeout_s, self._kill_at_s - now_s))):
            key.data()
        ended, self._ended = self._ended, []
        for child in ended:
            self._kill(child)
            self._pass_on(child, child.last_output)
            self._pass_on_errors(child, child.last_errors)
            self._reap(child)
        return ended

    def _read(self, pipe: LinePipe, pass_on: Callable[[list[str]], None]) -> None:
        lines = pipe.read()
        if lines is None:
            self._stop_reading(pipe)
        else:
            pass_on(lines)

    def _pass_on(self, child: Child, lines: list[str]) -> None:
        for line in lines:
            self._logs.write(child.rank, line)
            self._on_output(child.rank, line)

    def _pass_on_errors(self, child: Child, lines: list[str]) -> None:
        for line in lines:
            printed, code = split_report(line)
            if printed or code is None:
                self._logs.write(child.rank, printed)
            shown = child.hear_error(line)
            if shown is not None:
                self._on_line(child.rank, shown)

    # Ending

    def stop(self, grace_s: float) -> None:
        """Tell every process to end; after the grace, kill those that have not."""
        if self.stopping:
            return
        self.stopping = True
        self._kill_at_s = time.monotonic() + grace_s
        self._abandon_fork_server()
        for child in self.running:
            child.signal(local.END)

    def ask_to_leave(self, number: int = local.ASK) -> None:
        """Let every process finish its step, save and leave."""
        for child in self.running:
            child.signal(number)

    def kill(self) -> None:
        """Kill every process, and all that it has started, now."""
        self.stopping = True
        self._kill_at_s = _NEVER
        self._abandon_fork_server()
        for child in self.running:
            self._kill(child)

    def _kill(self, child: Child) -> None:
        """What comes from it after that is no more than the complaints of resource trackers."""
        if not child.is_killed:
            for pipe in (child.output, child.error, child.stack):
                self._stop_reading(pipe)
            child.kill(self._killed)

    def _stop_reading(self, pipe: LinePipe) -> None:
        with contextlib.suppress(KeyError):  # one that has ended is out already
            self.ignore(pipe.fd)

    def _abandon_fork_server(self) -> None:
        if forking := self._forget_fork_server():
            forking.abandon()

    def _reap(self, child: Child) -> None:
        self.ignore(child.pidfd)
        self.page.end(child.rank)
        self._logs.end(child.rank)
        child.reap()
        self.running.remove(child)

    def _end_all(self) -> None:
        self.kill()
        for child in list(self.running):
            self._reap(child)
        self._killed.finish()
