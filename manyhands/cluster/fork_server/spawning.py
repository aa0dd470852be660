"""The fork server: loads PyTorch once, and forks the workers of this host.

Loading takes seconds and more than 100 MB. Forks share the pages that none of them changes, so a host pays that once.
The launcher sends one `SpawnRequest` and reads the process ids of the workers. The fork server forks each worker twice,
so that the launcher (which has asked the kernel for orphans) becomes its parent, and then ends. A worker begins once
the launcher knows of all workers; if the launcher has ended by then, the worker ends as well.
"""

import gc
import importlib
import os
import sys

import msgspec

from manyhands.cluster.fork_server.spawn_request import GO, SpawnRequest, WorkerSpec
from manyhands.cluster.launchers import local
from manyhands.cluster.worker import compiler


def main() -> None:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=SpawnRequest)
    pids = os.dup(1)
    os.dup2(2, 1)  # what modules print while they are loaded is no process id
    compiler.leave_unloaded()
    gc.disable()  # it would take an eighth of the loading time, and free next to nothing
    importlib.import_module(request.load)
    importlib.import_module("manyhands.cluster.worker.entry")
    gc.freeze()  # the collector would write to every object, and so copy every page
    gc.enable()
    sys.stdout.flush()  # else every fork would print it
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
    os._exit(0)  # an orderly end would only keep the workers waiting


def _become_worker(spec: WorkerSpec, request: SpawnRequest) -> None:
    os.dup2(request.stdin, 0)
    os.close(request.stdin)
    os.dup2(spec.output, 1)
    os.dup2(spec.error, 2)
    # The fork server's was made for a file, in which one can go back.
    encoding, errors = sys.stderr.encoding, sys.stderr.errors
    sys.stderr = sys.__stderr__ = open(2, "w", 1, encoding, errors, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for other in request.specs:
        for fd in {other.output, other.error, other.permission, other.stack} - {spec.permission, spec.stack}:
            os.close(fd)
    if os.read(spec.permission, 1) != GO:
        os._exit(0)  # the launcher has ended
    os.close(spec.permission)
    os.setpgid(0, 0)  # until now the launcher could kill it with the fork server
    os.environ.clear()
    os.environ.update(spec.environ)
    os.environ[local.STACK_FD] = str(spec.stack)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as Python's own generator does by itself after a fork
    if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # servers may have fewer
    sys.argv[1:] = request.command
    from manyhands.cluster.worker.entry import main as run_worker

    run_worker()


if __name__ == "__main__":
    main()
