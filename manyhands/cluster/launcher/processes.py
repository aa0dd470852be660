"""The worker processes of one launcher: started together, heard together, ended together.

Every process is held by a file descriptor (pidfd), so exits and output arrive through one selector: no
threads, no polling for deaths, no process id that may meanwhile belong to someone else.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from manyhands.cluster.launcher import fork_server
from manyhands.cluster.launcher.exits import ending
from manyhands.cluster.launchers import local
from manyhands.errors import ManyhandsError

_TAIL_LINES = 40
_LAST_WORDS_LINES = 1000  # a traceback is shown whole
_READ_BYTES = 1 << 16
_NEVER = float("inf")

# The kernel ends the workers when the launcher is killed (worker.py), but not what the workers have started.
# This shell reads their process groups from its standard input and ends them when the launcher's end closes.
_GUARD = 'while read -r pid; do groups="$groups -$pid"; done; kill -s KILL -- $groups'


class Worker:
    """One process: its descriptors, its exit code and its last lines on standard error."""

    def __init__(self, rank: int, pid: int, output: int, error: int) -> None:
        self.rank = rank
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.code = 0
        """As in `subprocess`: negative for a signal. Known once the worker has ended."""
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.last_words: int | None = None
        """The exit code with which it said that it ends, in the lines of `tail`; None while it has not."""
        self.streams = (_Stream(self, output), _Stream(self, error))

    @property
    def ending(self) -> str:
        """How it has ended, in words."""
        return ending(self.code, self.tail if self.last_words is not None else ())

    def signal(self, number: int) -> None:
        """Send a signal to this process alone."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill_group(self) -> None:
        """End the worker and all it has started; only before it is reaped, while the group is its own."""
        self.signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def hear_error(self, line: str) -> str | None:
        """Keep a line of standard error; gives what of it should be shown now."""
        before, mark, code = line.partition(local.EXIT_REPORT)
        if mark and code.isdecimal():
            self.last_words = int(code)
            self.tail = deque(maxlen=_LAST_WORDS_LINES)
            return before or None  # a progress bar, for example, does not end its line
        self.tail.append(line)
        return line if self.last_words is None else None


class _Stream:
    """One pipe of a worker, cut into lines."""

    def __init__(self, worker: Worker, fd: int) -> None:
        self.worker, self.fd = worker, fd
        self._rest = b""
        os.set_blocking(fd, False)

    def read(self) -> list[str] | None:
        """The lines that have come; None if there is nothing to read, now or ever."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _READ_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        return [_text(line) for line in lines]

    def read_all(self) -> list[str]:
        """Everything that an ended worker has left in the pipe, with a last line that has no end."""
        lines: list[str] = []
        # A pipe holds at most 1 MB by default; what a runaway grandchild goes on writing is not waited for.
        for _ in range(16):
            new = self.read()
            if new is None:
                break
            lines += new
        return [*lines, _text(self._rest)] if self._rest else lines


def _text(line: bytes) -> str:
    # What a terminal would still show of a line that a progress bar has written over and over.
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


class _Ends:
    """Both ends of a worker's pipes, until it has its own and the worker's `_Stream`s have ours."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.output, self.their_output = os.pipe()
        self.error, self.their_error = os.pipe()
        self.their_permission, self.permission = os.pipe()
        self._open = {self.output, self.error, self.permission}
        self._theirs = {self.their_output, self.their_error, self.their_permission}

    def __enter__(self) -> "_Ends":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def hand_over(self) -> None:
        """The worker may begin, and its streams are someone else's to close."""
        with contextlib.suppress(BrokenPipeError):
            fork_server.permit(self.permission)
        self._open = {self.permission}
        self.close()

    def close_theirs(self) -> None:
        while self._theirs:
            os.close(self._theirs.pop())

    def close(self) -> None:
        self.close_theirs()
        while self._open:
            os.close(self._open.pop())


class WorkerProcesses:
    """All workers of a run; leaving the context ends every process and closes every descriptor."""

    def __init__(
        self,
        on_line: Callable[[int, str], None],
        on_output: Callable[[int, str], None],
        *,
        arena: bool | int,
        name: Callable[[int], str] = lambda rank: f"worker {rank}",
    ) -> None:
        self.running: list[Worker] = []
        self.size = 0
        self.stopping = False
        self._on_line = on_line
        self._on_output = on_output
        self._arena = arena
        self._name = name
        self._kill_at = _NEVER
        self._nursery: subprocess.Popen[bytes] | None = None
        self._unhatched: list[_Ends] = []  # of workers that may not begin yet
        self._hatched: list[int] = []  # their process ids, as far as the nursery has told them
        self._complaints: list[str] = []  # of the nursery

    def __enter__(self) -> "WorkerProcesses":
        with contextlib.ExitStack() as stack:
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._inherited: list[int] = []
            if self._arena is not False:
                is_given = self._arena is not True
                memory = os.dup(self._arena) if is_given else os.memfd_create("manyhands", os.MFD_CLOEXEC)
                self._inherited.append(memory)
                stack.callback(os.close, self._inherited[0])
            self._guard = stack.enter_context(_start_guard())
            stack.callback(self._guard.kill)
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
        """Whether any worker runs or will."""
        return bool(self.running or self._unhatched)

    @property
    def is_hatching(self) -> bool:
        return bool(self._unhatched)

    def start(self, command: list[str], environ: dict[str, str], rank: int | None = None) -> int:
        """Start the next process, in its own process group so that a terminal's Ctrl-C reaches only us; its number.

        It is told that number as its rank, unless it takes another's.
        """
        with _Ends(self.size) as ends:
            try:
                process = subprocess.Popen(
                    command,
                    env=self._environ(self.size if rank is None else rank, environ),
                    stdin=subprocess.DEVNULL,
                    stdout=ends.their_output,
                    stderr=ends.their_error,
                    pass_fds=self._inherited,
                    process_group=0,
                )
            except OSError as error:
                raise ManyhandsError(f"cannot start {self._name(self.size)}: {error}.") from error
            process.returncode = 0  # reaping is our business, not that object's
            self.size += 1
            self._add(ends, process.pid)
            return ends.rank

    def spawn(self, command: list[str], environs: list[dict[str, str]], *, load: str) -> None:
        """Start all workers as forks of one process that has imported `load`; they appear while we `wait`."""
        self.size = len(environs)
        self._unhatched = [_Ends(rank) for rank in range(self.size)]
        request = fork_server.SpawnRequest(
            load=load,
            command=command,
            specs=[
                fork_server.WorkerSpec(
                    environ=self._environ(ends.rank, environ),
                    output=ends.their_output,
                    error=ends.their_error,
                    permission=ends.their_permission,
                )
                for ends, environ in zip(self._unhatched, environs, strict=True)
            ],
        )
        try:
            # A file, not a pipe: nobody reads what the nursery says before it ends, however much that is.
            said = os.fdopen(os.memfd_create("nursery", os.MFD_CLOEXEC), "r+b")
            try:
                self._nursery = fork_server.start(request, environs[0], self._inherited, said)
            except OSError:
                said.close()
                raise
            self._nursery_said = said
        except OSError as error:
            raise ManyhandsError(f"cannot start the workers: {error}.") from error
        for ends in self._unhatched:
            ends.close_theirs()
        assert self._nursery.stdout
        self._selector.register(self._nursery.stdout, selectors.EVENT_READ, self._nursery)

    def _environ(self, rank: int, environ: dict[str, str]) -> dict[str, str]:
        arena = {local.ARENA_FD: str(self._inherited[0])} if self._inherited else {}
        return {**environ, local.RANK: str(rank), **arena}

    def _add(self, ends: "_Ends", pid: int) -> None:
        """A worker is there: watch it from now on, and let it begin."""
        worker = Worker(ends.rank, pid, ends.output, ends.error)
        self.running.append(worker)
        assert self._guard.stdin
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(f"{pid}\n".encode())
        self._selector.register(worker.pidfd, selectors.EVENT_READ, worker)
        for stream in worker.streams:
            self._selector.register(stream.fd, selectors.EVENT_READ, stream)
        ends.hand_over()

    def listen(self, source: Any, on_news: Callable[[], None]) -> None:
        """While we `wait`, call `on_news` whenever there is something to read from `source`."""
        self._selector.register(source, selectors.EVENT_READ, on_news)

    def ignore(self, source: Any) -> None:
        self._selector.unregister(source)

    def _hear_nursery(self, process: "subprocess.Popen[bytes]") -> None:
        """One line for each worker that was started; they may begin when all are there."""
        assert process.stdout
        line = process.stdout.readline()  # lines are short and written at once
        if line:
            self._hatched.append(int(line))
        if line and len(self._hatched) < len(self._unhatched):
            return
        pids, specs = self._hatched, self._end_nursery()
        if len(pids) == len(specs):
            others = len(self.running)
            for ends, pid in zip(specs, pids, strict=True):
                self._add(ends, pid)
            self._pass_on(self.running[others].streams[1], self._complaints)
        else:
            tail = "\n".join(self._complaints[-_TAIL_LINES:])
            for ends in specs:
                ends.close()
            raise ManyhandsError(f"cannot start the workers: the process that loads PyTorch ended.\n{tail}")

    def _end_nursery(self) -> list["_Ends"]:
        """Reap the nursery and, if they are not complete, what it has started; gives the pipes of all."""
        process, self._nursery = self._nursery, None
        specs, self._unhatched = self._unhatched, []
        if process:
            assert process.stdout
            self._selector.unregister(process.stdout)
            if len(self._hatched) < len(specs):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            with process:
                process.wait()
            if len(self._hatched) < len(specs):
                with contextlib.suppress(ChildProcessError):
                    while True:
                        os.waitpid(-process.pid, 0)  # forks that may not begin yet are still in its group
            fork_server.adopt_orphans(False)
            with self._nursery_said as said:
                said.seek(0)
                self._complaints = [_text(line) for line in said.read().split(b"\n") if line]
        return specs

    def wait(self, timeout_s: float) -> list[Worker]:
        """Pass on what the workers say, for at most this long; gives the workers that have ended."""
        now = time.monotonic()
        if now >= self._kill_at:
            self.kill()
        ended: list[Worker] = []
        for key, _ in self._selector.select(max(0.0, min(timeout_s, self._kill_at - now))):
            if isinstance(key.data, Worker):
                ended.append(key.data)
                continue
            if isinstance(key.data, subprocess.Popen):
                self._hear_nursery(key.data)
                continue
            if not isinstance(key.data, _Stream):
                key.data()
                continue
            lines = key.data.read()
            if lines is None:
                self._selector.unregister(key.fd)
            else:
                self._pass_on(key.data, lines)
        for worker in ended:
            worker.kill_group()
            for stream in worker.streams:
                self._pass_on(stream, stream.read_all())
            self._reap(worker)
        return ended

    def stop(self, grace_s: float) -> None:
        """Tell every worker to end; whoever has not after the grace is killed."""
        if self.stopping:
            return
        self.stopping = True
        self._kill_at = time.monotonic() + grace_s
        self._forget_unhatched()
        for worker in self.running:
            worker.signal(local.END)

    def ask_to_leave(self, number: int = local.ASK) -> None:
        """Let every worker finish what it is doing, save and leave."""
        for worker in self.running:
            worker.signal(number)

    def kill(self) -> None:
        """End every worker, and what it has started, now."""
        self.stopping = True
        self._kill_at = _NEVER
        self._forget_unhatched()
        for worker in self.running:
            worker.kill_group()

    def _forget_unhatched(self) -> None:
        for ends in self._end_nursery():
            ends.close()

    def _pass_on(self, stream: _Stream, lines: list[str]) -> None:
        worker = stream.worker
        for line in lines:
            if stream is worker.streams[0]:
                self._on_output(worker.rank, line)
            elif (shown := worker.hear_error(line)) is not None:
                self._on_line(worker.rank, shown)

    def _reap(self, worker: Worker) -> None:
        for fd in (worker.pidfd, *(stream.fd for stream in worker.streams)):
            with contextlib.suppress(KeyError):  # a stream that ended before its process is out already
                self._selector.unregister(fd)
            os.close(fd)
        worker.code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if worker.code < 0 and worker.last_words is not None:
            worker.code = worker.last_words  # it was on its way out, and somebody did not wait for that
        self.running.remove(worker)

    def _end_all(self) -> None:
        self.kill()
        for worker in list(self.running):
            self._reap(worker)


def _start_guard() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        process_group=0,
        cwd="/",
    )
