"""What runs in every worker, and in every server, before and after the user's script.

python -m manyhands.cluster.worker SCRIPT [arguments]
python -m manyhands.cluster.worker -m MODULE [arguments]
"""

import faulthandler
import importlib.util
import io
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from manyhands.cluster.launchers import host_page, local
from manyhands.cluster.launchers.detect import own_rank_info
from manyhands.cluster.launchers.parent_death import die_with_the_launcher
from manyhands.cluster.worker import children, compiler, leaving, own_steps, rank_variables
from manyhands.cluster.worker.hints import hint
from manyhands.errors import ManyhandsError, PeerLost, UsageError

before_termination: list[Callable[[], None]] = []
"""Called in order when the worker is told to end, within the second or so before it is killed."""

instead_of_failing: list[Callable[[], object]] = []
"""On a server that has made a session: what it does where the rest of the script, which is for workers, fails."""

_LEAVE_WITHIN_S = 1.0
_PACKAGE = Path(__file__).resolve().parents[2]  # of manyhands


def main() -> None:
    """Prepare this process, run the script as `__main__`, and end with an exit code that says how it went."""
    die_with_the_launcher(own_rank_info().name if local.RANK in os.environ else None)
    leaving.install(_terminate)
    faulthandler.enable()
    if local.STACK_FD in os.environ:
        stack = int(os.environ[local.STACK_FD])
        os.set_inheritable(stack, False)
        faulthandler.register(local.WHERE, stack, all_threads=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A pipe is buffered in blocks by default: a killed worker's last lines would be lost.
        sys.stdout.reconfigure(line_buffering=True)
    for name in (local.ARENA_FD, host_page.FD):
        if name in os.environ:
            os.set_inheritable(int(os.environ[name]), False)
    if local.RANK in os.environ:
        children.announce()
        rank_variables.announce_start(own_rank_info())
    own_steps.watch()
    compiler.leave_unloaded()
    try:
        _pin_to_cores()
        _run_or_serve(sys.argv[1:])
    except ManyhandsError as error:
        code = local.EXIT_PEER_LOST if isinstance(error, PeerLost) else local.EXIT_REFUSED
        sys.last_value = error  # as the interpreter does; what runs at exit sees that this is not a good end
        refuse(error, code)
    except SystemExit as end:
        if end.code in (None, 0):
            return
        sys.last_value = end  # told to end, or of its own accord: neither waits for the others
        if end.code in local.GOOD_ENDS:
            raise
        code = end.code & 0xFF if isinstance(end.code, int) else local.EXIT_CRASHED
        _begin_exit_report(code)
        if not isinstance(end.code, int):
            print(end.code, file=sys.stderr)  # as the interpreter does
    except (Exception, KeyboardInterrupt) as error:
        code = local.EXIT_CRASHED
        sys.last_value = error
        _begin_exit_report(code)
        _show(error)
    else:
        return
    # A thread that waits for a lost peer must not keep a failed worker, and with it the whole run, alive.
    deadline = threading.Timer(_LEAVE_WITHIN_S, os._exit, (code,))
    deadline.daemon = True
    deadline.start()
    sys.exit(code)


def _terminate() -> None:
    for number in (signal.SIGTERM, local.ASK, local.END):
        signal.signal(number, signal.SIG_IGN)
    for action in before_termination:
        try:
            action()
        except Exception:
            traceback.print_exc()
    sys.stdout.flush()
    # Not sys.exit: an exception raised here, between any two lines of the script, might be caught by it.
    os._exit(local.EXIT_TERMINATED)


def _pin_to_cores() -> None:
    cores = os.environ.get(local.CORES)
    if not cores:
        return
    try:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot pin a worker to cores {cores} ({error}); set {local.CORES}= for none."
        ) from None


def _run_or_serve(arguments: list[str]) -> None:
    try:
        run_command(arguments)
    except Exception:
        if not instead_of_failing:
            raise
        instead_of_failing[0]()


def run_command(arguments: list[str]) -> None:
    """Run a script, or `-m` and a module, with its arguments, as `__main__` of this process."""
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        module = arguments[1]
        _check_module(module)
        sys.argv[:] = arguments[1:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif arguments and arguments[0] != "-m":
        script = arguments[0]
        if not Path(script).exists():
            raise UsageError(f"there is no script {script!r} in {os.getcwd()}.")
        sys.argv[:] = arguments
        if not sys.flags.safe_path:
            sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")
    else:
        raise UsageError("nothing to run; name a script, or -m and a module.")


def _check_module(module: str) -> None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        # A parent package that is not there, as opposed to one that is there and misses something else.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        found = None
    if found is None:
        raise UsageError(f"there is no module {module!r} to run with -m.")
    if found.submodule_search_locations is not None and not importlib.util.find_spec(f"{module}.__main__"):
        raise UsageError(
            f"{module!r} is a package without a __main__; name a module in it, as {module}.train."
        )


def refuse(error: ManyhandsError, code: int) -> None:
    """Print why this worker ends, in one sentence."""
    _begin_exit_report(code)
    print(f"error: {error}", file=sys.stderr, flush=True)


def _begin_exit_report(code: int) -> None:
    sys.stdout.flush()
    if local.RANK in os.environ and local.TERMINAL not in os.environ:
        print(f"{local.EXIT_REPORT}{code}", file=sys.stderr)


def _show(error: BaseException) -> None:
    """The traceback from the user's first frame on; all of it if there is none, since then it is our mistake."""
    trace = error.__traceback__
    while trace is not None and not _is_the_users(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if trace is None and not isinstance(error, SyntaxError):  # which names its place itself
        trace = error.__traceback__
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    if more := hint(error):
        print(more, file=sys.stderr)
    sys.stderr.flush()


def _is_the_users(filename: str) -> bool:
    """Whether the file is neither ours, nor `runpy`, nor of PyTorch, which calls the user's modules."""
    if filename == runpy.__file__ or filename.startswith("<frozen "):
        return False
    return not any(filename.startswith(str(place)) for place in (_PACKAGE, _torch()))


def _torch() -> Path:
    module = sys.modules.get("torch")
    return Path(module.__file__).parent if module and module.__file__ else _PACKAGE
