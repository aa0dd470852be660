"""One way of dividing a host, alive while it is probed: a launcher of its own with the workers that a run would have.

It is a process that may die: a model that crashes, traps on an instruction or does not fit takes its contender with it,
and the others go on. It dies with the process that probes.
"""

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from manyhands.cluster.launcher import cores, supervisor
from manyhands.cluster.launcher.launch_plan import LaunchPlan
from manyhands.cluster.launchers import local
from manyhands.cluster.launchers.parent_death import die_with_the_launcher
from manyhands.cluster.launchers.rank_info import SERVERS

_TAIL_LINES = 20
_WORKER = "manyhands.planner.probed_worker"


class Divided(msgspec.Struct, frozen=True, kw_only=True):
    """Workers × threads of this host, and what they run."""

    workers: int
    threads: int
    strategy: str
    servers: int = 0
    command: tuple[str, ...]
    """As the workers of a run would get it: a script, or `-m` and a module, with arguments."""

    def __str__(self) -> str:
        return f"{self.workers} × {self.threads}"


class ContenderEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a contender has ended, as its launcher saw it."""

    ok: bool
    message: str
    tail: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """One sentence: the error that the worker said itself, if it did."""
        errors = [line.removeprefix("error: ") for line in self.tail if line.startswith("error: ")]
        if errors:
            return errors[-1]
        return self.message


class Contender:
    """The process of a contender, as the one that probes sees it."""

    def __init__(self, divided: Divided, path: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if name not in _OF_A_RUN}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "manyhands.planner.contender", path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**inherited, local.LAUNCHER_PID: str(os.getpid())},
        )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(msgspec.json.encode(divided))
        self.sentinel = os.pidfd_open(self._process.pid)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def join(self, timeout: float | None = None) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """It has ended: give the descriptors back."""
        assert self._process.stdout is not None
        self._process.stdout.close()
        os.close(self.sentinel)

    def end(self) -> ContenderEnd:
        """How it ended; call this once, after that."""
        assert self._process.stdout is not None
        try:
            return msgspec.json.decode(self._process.stdout.read(), type=ContenderEnd)
        except msgspec.DecodeError:
            return ContenderEnd(ok=False, message=_how(self._process.returncode))


_OF_A_RUN = frozenset(
    (local.RANK, local.SIZE, local.RUN_DIR, local.STRATEGY, local.PLACEMENT, local.CORES, SERVERS)
)


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its launcher was ended by {signal.Signals(-code).name}"
    return f"its launcher ended with exit code {code}"


def _launch(divided: Divided, path: str) -> ContenderEnd:
    """Start the workers, and wait until they have ended."""
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    outcome = supervisor.run(
        LaunchPlan(
            command=["-m", _WORKER, path, *divided.command],
            workers=divided.workers,
            servers=divided.servers,
            layout=cores.layout(divided.workers, divided.threads, divided.servers),
            environ={local.STRATEGY: divided.strategy},
            run_dir=None,
            load="manyhands.engine.session",
        ),
        on_tick=lambda: None,
        on_line=lambda rank, line: tail.append(line),
        on_output=lambda rank, line: None,
    )
    return ContenderEnd(ok=outcome.ok, message=outcome.message, tail=outcome.tail or tuple(tail))


def main(arguments: Sequence[str]) -> None:
    """`python -m manyhands.planner.contender SOCKET`, with what to run on standard input."""
    die_with_the_launcher(None)
    divided = msgspec.json.decode(sys.stdin.buffer.read(), type=Divided)
    said: Any
    try:
        said = msgspec.to_builtins(_launch(divided, arguments[0]))
    except Exception as error:
        said = {"ok": False, "message": str(error)}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
