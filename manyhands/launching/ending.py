"""The end of a run, told to a person: how it ended, where its directory is, and what goes on with it."""

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from manyhands.checkpoint.index import latest
from manyhands.cluster.launcher.blame import Outcome
from manyhands.cluster.launcher.worker_logs import FOLDER
from manyhands.cluster.launchers import local
from manyhands.launching.words import say

_BY_SIGNAL = 128
CHECKPOINTS = "checkpoints"

WayOn = Callable[[str], str]
"""Given the run's directory, how a person goes on from its checkpoint, as the second half of a sentence."""


def train_goes_on(run: str) -> str:
    return f"manyhands train --out {run} --resume goes on with it"


def script_goes_on(run: str) -> str:
    place = f"{run}/{CHECKPOINTS}"
    return f'start the same command again: session.resume("{place}") in the script goes on'


def function_goes_on(run: str) -> str:
    return f'call mh.run again: session.resume("{run}/{CHECKPOINTS}") in the function goes on'


def with_way_out(outcome: Outcome, run: Path, way_on: WayOn) -> Outcome:
    """The same; where nothing but a checkpoint is left of a run, the message says which, and how it goes on."""
    if not outcome.is_lost:
        return outcome
    saved = latest(run / CHECKPOINTS)
    way = (
        f"the newest checkpoint is {saved.name}, {way_on(shown(run))}"
        if saved
        else "there is no checkpoint: start again"
    )
    return replace(outcome, message=f"{outcome.message}; {way}")


def end_of_run(outcome: Outcome, run: Path, way_on: WayOn) -> int:
    """Say how a run ended, if it did not end well, and where it is; returns the exit code."""
    outcome = with_way_out(outcome, run, way_on)
    if is_stop(outcome):
        say(_stopped(outcome, run, way_on))
        return outcome.exit_code
    is_refused = say_ending(outcome, _saved(run, way_on))
    if run.exists() and not is_refused:
        log = run / FOLDER / f"{outcome.process.replace(' ', '-')}.log"
        if outcome.process and log.exists():
            say(f"the whole output of {outcome.process}: {shown(log)}")
        if not (outcome.ok or _names(outcome, run)):
            say_run(run)
    return outcome.exit_code


def _names(outcome: Outcome, run: Path) -> bool:
    """Whether what was said has named the run's directory already."""
    return outcome.exit_code == local.EXIT_SAVED and latest(run / CHECKPOINTS) is not None


def say_run(run: Path) -> None:
    """Where it is, if anything was written there."""
    if run.exists():
        say(f"run       {shown(run)}")


def say_ending(outcome: Outcome, saved: str = "") -> bool:
    """Say how it ended, if there is anything to say; returns whether a worker has refused what was asked."""
    if outcome.exit_code == local.EXIT_SAVED:
        say(f"{outcome.message}{saved}")
    elif outcome.note:
        say(outcome.note)
    elif not outcome.ok:
        refusal = [line for line in outcome.tail if line.startswith("error: ")]
        if outcome.exit_code == local.EXIT_REFUSED and refusal:
            say(refusal[-1])
            return True
        for line in outcome.tail:
            say(line)
        say(f"error: {outcome.message}")
    return False


def is_stop(outcome: Outcome) -> bool:
    """Whether a person, or the system, has ended the run by a signal to the launcher: that is no error."""
    return outcome.rank is None and outcome.exit_code > _BY_SIGNAL


def signal_name(outcome: Outcome) -> str:
    name = signal.Signals(outcome.exit_code - _BY_SIGNAL).name
    return "Ctrl-C" if name == "SIGINT" else name


def _stopped(outcome: Outcome, run: Path, way_on: WayOn) -> str:
    when = f"in step {outcome.step:,}" if outcome.step else "before the first step"
    said = f"stopped by {signal_name(outcome)} {when}"
    if outcome.waited_for:
        said += f", while it waited for {outcome.waited_for}"
    if outcome.unsaved:
        said += f", without saving since {outcome.unsaved}"
    if not run.exists():
        return said
    saved = latest(run / CHECKPOINTS)
    said += f"; the newest checkpoint is {saved.name}, {way_on(shown(run))}" if saved else "; no checkpoint"
    return f"{said}; run in {shown(run)}"


def _saved(run: Path, way_on: WayOn) -> str:
    """Where it is saved; a script may save where the launcher does not know."""
    if latest(run / CHECKPOINTS) is None:
        return (
            " where the script saves; start the same command again: session.resume(…) in the script goes on"
        )
    return f" in {shown(run)}; {way_on(shown(run))}"


def shown(path: Path) -> str:
    """As a person would type it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
