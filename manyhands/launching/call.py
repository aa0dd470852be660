"""`mh.run(function)`: a function of this program, or of a notebook's cell, in several workers."""

import inspect
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from manyhands.cluster.launcher.blame import Outcome
from manyhands.cluster.launchers import local
from manyhands.cluster.launchers.detect import own_rank_info
from manyhands.comm.transports.free_memory import available_bytes
from manyhands.errors import MemoryShort, RunFailed, UsageError
from manyhands.launching.copied import anonymous_file, take_values, write_call
from manyhands.launching.display import in_notebook
from manyhands.launching.ending import function_goes_on, with_way_out
from manyhands.launching.run import read_summary
from manyhands.launching.user_code import WORKERS, LaunchSettings, from_keywords, launch

_BY_SIGNAL = 128
_NOTHING_BACK = (
    "note: the function uses a model of this program, and each worker had a copy of it; the model here is as it was "
    "before. Return what was learned, as session.model_state(), and load it here"
)
_OPTION = re.compile(r"--(strategy|placement|codec|workers|servers|threads|out)\b( -?\d[\d:]*)?")


class Results(list[Any]):
    """What the workers returned, by rank."""

    out: Path
    """The run's directory; it is not there any more if the run has left nothing in it."""
    summary: dict[str, Any]
    """What `summary.json` says; empty where the function made no session."""


def run(function: Callable[..., Any], *arguments: Any, **settings: Any) -> Results:
    """Call `function(*arguments)` in every worker of a new run, and return what the workers return, by rank.

    The function makes a session and trains, as a script under `manyhands launch` does, and `settings` are the options
    of that command: `workers` (2; `"2:6"` lets others join), `servers`, `strategy`, `placement`, `codec`, `threads` and
    `out`. It may be defined in a cell or anywhere else, and be a lambda or a method. Workers get copies of it, of its
    arguments and of all that it uses; what it changes does not come back unless it returns it. What comes back is a
    list, with the run's `summary` and its directory `out`.

    An exception in a worker ends the run, and is a `RunFailed` here; an interrupt ends it, and is a KeyboardInterrupt.
    """
    _refuse(function)
    _refuse_call(function, arguments, settings)
    asked = from_keywords(settings)
    results = Results()
    with anonymous_file("call") as call, anonymous_file("values") as returned:
        has_model = write_call(call, function, arguments)
        _admit_copies(call.tell(), asked)
        files = (os.getpid(), call.fileno(), returned.fileno())

        def at_end(out: Path, outcome: Outcome) -> None:
            results.out, results.summary = out, read_summary(out) or {}

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            ended = launch(
                asked,
                ["-m", "manyhands.launching.called", *map(str, files)],
                _name(function),
                stream=_stream(),
                at_end=at_end,
            )
        except UsageError as error:
            error.args = (_in_python(str(error)),)
            raise error.with_traceback(None) from None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)  # the launcher has raised it
        values, workers = take_values(returned)
    outcome = with_way_out(ended, results.out, function_goes_on)
    results += [values[rank] for rank in range(workers) if rank in values]
    _raise_failure(outcome, results)
    _refuse_missing(sorted(set(range(workers or (asked.workers or WORKERS)[0])) - set(values)), results)
    if has_model and all(value is None for value in results):
        print(_NOTHING_BACK, file=_stream())
    return results


run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # what editors and notebooks offer
    [
        inspect.Parameter("function", inspect.Parameter.POSITIONAL_ONLY),
        inspect.Parameter("arguments", inspect.Parameter.VAR_POSITIONAL),
        *(
            inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default)
            for one in fields(LaunchSettings)
        ),
    ]
)


def _refuse(function: Any) -> None:
    """What cannot be called in workers, and places from which no run can begin."""
    if not callable(function):
        raise UsageError(
            f"mh.run calls a function in every worker, and {function!r} is none; give the function without calling it, "
            "as in mh.run(train, workers=2)"
        )
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise UsageError(
            f"calling {_name(function)} runs nothing yet, since it is a generator or a coroutine; give a function that "
            "returns its values, as in mh.run(lambda: list(generate()))"
        )
    info = own_rank_info()
    if local.RANK in os.environ or info.size > 1:
        raise UsageError(
            f"this process is {info.name} of a run of {info.size} processes already, and mh.run would start another "
            "run in each of them; call the function itself here, or start the program as `python program.py`"
        )
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "mh.run has to be called from the main thread, which gets the interrupts that end a run; this is "
            f"{threading.current_thread().name}"
        )


def _refuse_call(function: Callable[..., Any], arguments: tuple[Any, ...], settings: dict[str, Any]) -> None:
    """What the function does not take: here, and not in every worker."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # it does not say what it takes
        return
    name = _name(function)
    known = {one.name for one in fields(LaunchSettings)}
    if mine := [one for one in settings if one in signature.parameters and one not in known]:
        raise UsageError(
            f"mh.run has no setting {mine[0]!r}, which is an argument of {name}; bind it to the function, as in "
            f"mh.run(functools.partial({name}, {mine[0]}=…))"
        )
    try:
        signature.bind(*arguments)
    except TypeError as error:
        given = f"{len(arguments)} argument{'s' * (len(arguments) != 1)}"
        raise UsageError(
            f"{name}{signature} cannot be called with the {given} that mh.run was given: {error}; give arguments after "
            f"the function, as in mh.run({name}, data, workers=2), and those with a name by functools.partial"
        ) from None


def _admit_copies(size: int, settings: LaunchSettings) -> None:
    """Refuse what the copies of the workers have no room for."""
    copies = max(settings.workers or WORKERS) + (settings.servers or 0)
    if 2 * size * copies > (free := available_bytes()):  # of bytes and of what is made from them
        raise MemoryShort(
            f"the function, its arguments and what it uses are {size / 1e9:.1f} GB, and {copies} processes with a copy "
            f"each need, while they make it, more than the {free / 1e9:.1f} GB that are free; "
            "load the data inside the function"
        )


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _stream() -> TextIO:
    """Where a run is shown: a notebook would put standard error on a red ground."""
    return sys.stdout if in_notebook() else sys.stderr


def _in_python(sentence: str) -> str:
    """A refusal of the command line, for a person who has written a call: `workers=2` for `--workers 2`."""
    return _OPTION.sub(lambda match: match[1] + (f"={match[2].strip()}" if match[2] else ""), sentence)


def _raise_failure(outcome: Outcome, results: Results) -> None:
    if outcome.ok:
        return
    if outcome.rank is None:
        number = signal.SIGTERM if outcome.exit_code == local.EXIT_SAVED else outcome.exit_code - _BY_SIGNAL
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number in (signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)  # it was for this program, which may end now
    refusals = [line for line in outcome.tail if line.startswith("error: ")]
    if outcome.exit_code == local.EXIT_REFUSED and refusals:
        raise UsageError(_in_python(refusals[-1].removeprefix("error: ")))
    printed = "\n".join(outcome.tail) if outcome.exit_code <= _BY_SIGNAL else ""  # else it has been shown
    raise RunFailed(outcome.message, worker=outcome.rank, traceback=printed, results=results)


def _refuse_missing(ranks: list[int], results: Results) -> None:
    if ranks:
        names = ", ".join(map(str, ranks))
        raise RunFailed(
            f"worker{'s' if len(ranks) > 1 else ''} {names} returned nothing, not even None: the function left by "
            "sys.exit, or the worker died where it had no session and could not be replaced",
            worker=ranks[0],
            results=results,
        )
