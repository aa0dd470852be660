"""Starts the workers of a host as forks of one process that has loaded PyTorch.

Loading it takes seconds and more than 100 MB; here that is paid once per host, since forks share what nobody changes.
The launcher runs this module, hands it one `WorkerSpec` per worker and hears their process ids. Each worker is
forked twice, so that the launcher (which has asked the kernel for orphans) becomes its parent: from then on a worker is
the launcher's child like any other, and this process is gone. Workers begin once the launcher says that it knows of
them all; if the launcher is gone by then, so are they.
"""

import ctypes
import gc
import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import BinaryIO

import msgspec

from manyhands.cluster.worker import compiler

_PR_SET_CHILD_SUBREAPER = 36
_GO = b"!"


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker begins with."""

    environ: dict[str, str]
    output: int  # file descriptors: standard output, standard error, and where to hear that it may begin
    error: int
    permission: int


class SpawnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the nursery is told."""

    load: str  # the module to have loaded before the first fork
    command: list[str]
    specs: list[WorkerSpec]


def start(
    request: SpawnRequest, environ: dict[str, str], inherited: Sequence[int], error: BinaryIO
) -> "subprocess.Popen[bytes]":
    """In the launcher: start the nursery, whose standard output gives the pids of the workers, one per line."""
    adopt_orphans(True)
    descriptors = [fd for spec in request.specs for fd in (spec.output, spec.error, spec.permission)]
    process = subprocess.Popen(
        [sys.executable, "-m", "manyhands.cluster.launcher.fork_server"],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=error,
        pass_fds=[*inherited, *descriptors],
        process_group=0,
        bufsize=0,
    )
    assert process.stdin
    with process.stdin:
        process.stdin.write(msgspec.json.encode(request))
    return process


def adopt_orphans(yes: bool) -> None:
    """Whether processes whose parent ends become children of this one."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


def permit(fd: int) -> None:
    """In the launcher: let a worker begin."""
    os.write(fd, _GO)


def main() -> None:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=SpawnRequest)
    pids = os.dup(1)
    os.dup2(2, 1)  # what modules print while they are loaded is no process id
    compiler.leave_unloaded()
    gc.disable()  # an eighth of the time that it takes, for next to nothing
    importlib.import_module(request.load)
    importlib.import_module("manyhands.cluster.worker.entry")
    gc.freeze()  # the collector would write to every object, and so copy every page
    gc.enable()
    sys.stdout.flush()  # else every fork would say it
    for spec in request.specs:
        hear, tell = os.pipe()
        middle = os.fork()
        if middle == 0:
            pid = os.fork()
            if pid == 0:
                for fd in (hear, tell, pids):
                    os.close(fd)
                _become_worker(spec, request)
                return
            os.write(tell, f"{pid}\n".encode())
            os._exit(0)
        os.waitpid(middle, 0)  # from here on the launcher is the worker's parent
        os.write(pids, os.read(hear, 32))
        os.close(hear)
        os.close(tell)
    os._exit(0)  # taking down what was loaded would only keep the workers waiting


def _become_worker(spec: WorkerSpec, request: SpawnRequest) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(spec.output, 1)
    os.dup2(spec.error, 2)
    # Ours was made for a file, in which one can go back.
    encoding, errors = sys.stderr.encoding, sys.stderr.errors
    sys.stderr = sys.__stderr__ = open(2, "w", 1, encoding, errors, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for other in request.specs:
        for fd in {other.output, other.error, other.permission} - {spec.permission}:
            os.close(fd)
    if os.read(spec.permission, 1) != _GO:
        os._exit(0)  # the launcher is gone
    os.close(spec.permission)
    os.setpgid(0, 0)  # until now the launcher could end us with the nursery
    os.environ.clear()
    os.environ.update(spec.environ)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as Python's own generator does by itself after a fork
    if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # servers may have fewer
    sys.argv[1:] = request.command
    from manyhands.cluster.worker.entry import main as run_worker

    run_worker()


if __name__ == "__main__":
    main()
