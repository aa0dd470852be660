"""The launcher's side of the fork server: starts it, and hears which workers it has forked."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import BinaryIO

import msgspec

from manyhands.cluster.fork_server.spawn_request import SpawnRequest, WorkerSpec
from manyhands.cluster.launcher.child import TAIL_LINES
from manyhands.cluster.launcher.pipes import WorkerPipes, shown
from manyhands.errors import ManyhandsError

_PR_SET_CHILD_SUBREAPER = 36


class Forking:
    """Workers that the fork server starts: it tells their process ids one by one, and none begins before all exist.

    `inherited` are descriptors that the workers get under the same numbers.
    """

    def __init__(
        self,
        command: list[str],
        environs: list[dict[str, str]],
        *,
        load: str,
        inherited: Sequence[int],
        stdin: int,
    ) -> None:
        self.pipes = [WorkerPipes(rank) for rank in range(len(environs))]
        self.pids: list[int] = []
        self.output: list[str] = []
        """What the fork server printed while it loaded modules; known once it has ended."""
        specs = [
            WorkerSpec(
                environ=environ,
                output=pipes.their_output,
                error=pipes.their_error,
                permission=pipes.their_permission,
                stack=pipes.their_stack,
            )
            for pipes, environ in zip(self.pipes, environs, strict=True)
        ]
        # A file, not a pipe: the launcher reads it only when the fork server has ended, however long it is.
        self._printed = os.fdopen(os.memfd_create("fork-server", os.MFD_CLOEXEC), "r+b")
        try:
            request = SpawnRequest(load=load, command=command, specs=specs, stdin=stdin)
            self._process = _start(request, environs[0], inherited, self._printed)
        except OSError as error:
            _adopt_orphans(False)
            self._printed.close()
            self._close_pipes()
            raise ManyhandsError(f"cannot start the workers: {error}.") from error
        for pipes in self.pipes:
            pipes.close_theirs()

    def fileno(self) -> int:
        """Readable when the fork server has started a worker, or has ended."""
        assert self._process.stdout
        return self._process.stdout.fileno()

    @property
    def is_complete(self) -> bool:
        return len(self.pids) == len(self.pipes)

    def hear(self) -> bool:
        """Take the process id of one worker; says whether that was the last one."""
        assert self._process.stdout
        line = self._process.stdout.readline()  # lines are short and written at once
        if line:
            self.pids.append(int(line))
            return self.is_complete
        self.abandon()
        tail = "\n".join(self.output[-TAIL_LINES:])
        raise ManyhandsError(f"cannot start the workers: the process that loads PyTorch ended.\n{tail}")

    def finish(self) -> None:
        """Reap the fork server, which has started all workers."""
        with self._process as process:
            process.wait()
        _adopt_orphans(False)
        with self._printed as printed:
            printed.seek(0)
            self.output = [shown(line) for line in printed.read().split(b"\n") if line]

    def abandon(self) -> None:
        """Kill the fork server and the workers that it has started so far; none of them has begun."""
        group = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-group, 0)  # workers that have not begun are still in the fork server's group
        self.finish()
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipes in self.pipes:
            pipes.close()


def _start(
    request: SpawnRequest, environ: dict[str, str], inherited: Sequence[int], error: BinaryIO
) -> "subprocess.Popen[bytes]":
    """Start the fork server, whose standard output gives the process ids of the workers, one per line."""
    _adopt_orphans(True)
    descriptors = [
        fd for spec in request.specs for fd in (spec.output, spec.error, spec.permission, spec.stack)
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "manyhands.cluster.fork_server.spawning"],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=error,
        pass_fds=[*inherited, request.stdin, *descriptors],
        process_group=0,
        bufsize=0,
    )
    assert process.stdin
    with process.stdin:
        process.stdin.write(msgspec.json.encode(request))
    return process


def _adopt_orphans(yes: bool) -> None:
    """Whether processes whose parent ends become children of this one."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)
