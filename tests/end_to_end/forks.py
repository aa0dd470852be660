"""In one process that has loaded PyTorch: a fork for each worker and server, on its emulated host.

Loading it takes seconds of a processor, and is not what tests on hosts are about.
"""

import ctypes
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from manyhands.cluster.launchers import local
from manyhands.cluster.worker import compiler

_NETWORK = 0x40000000  # CLONE_NEWNET: the kind of namespace that is entered
_PR_SET_PDEATHSIG = 1


def main() -> None:
    told = json.loads(sys.argv[1])
    compiler.leave_unloaded()
    import manyhands.engine.session  # noqa: F401  what all of them need

    pids = []
    for rank in range(len(told["namespaces"])):
        pid = os.fork()
        if pid == 0:
            _work(told, rank)
            return
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        sys.exit(f"exit codes by rank: {codes}")


def _work(told: dict[str, Any], rank: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with Path("/run/netns", told["namespaces"][rank]).open() as namespace:
        if libc.setns(namespace.fileno(), _NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace.name}")
    for kind, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{told['outputs']}/{rank}.{kind}", os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(told["world"] | {local.RANK: str(rank)})
    command = told["command"]
    if command[0].endswith(".py"):
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
    else:
        from manyhands.cli import main as manyhands

        sys.exit(manyhands(command))


if __name__ == "__main__":
    main()
