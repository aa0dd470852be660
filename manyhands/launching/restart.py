"""Runs that end with any of their workers, because each has only a part of the model: all are started again."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from manyhands.checkpoint.index import latest
from manyhands.cluster.launcher.blame import Outcome
from manyhands.cluster.launcher.events import Event
from manyhands.cluster.launchers import local

_BY_SIGNAL = 128  # exit codes above it: a worker was killed; those below it has chosen itself


@dataclass(frozen=True, kw_only=True)
class Restart:
    """What is started, what is added to it to go on from the newest checkpoint, and how often that may be."""

    command: list[str]
    resume: list[str]
    times: int

    def run(
        self, attempt: Callable[[list[str]], Outcome], run: Path, on_event: Callable[[Event], None]
    ) -> Outcome:
        """Make attempts until one ends otherwise than by a death, or nothing is left to go on from."""
        command, left = self.command, self.times
        while True:
            outcome = attempt(command)
            if not _is_death(outcome):
                return outcome
            saved = latest(run / "checkpoints")
            if saved is None or not left:
                return replace(outcome, message=f"{outcome.message}{self._way_out(saved)}")
            left -= 1
            command = [*self.command, *self.resume]
            on_event(
                Event(
                    kind="again",
                    text=f"{outcome.message}; its replica is not whole without it: "
                    f"all workers begin again from {saved.name}",
                    fields={"worker": outcome.rank, "checkpoint": saved.name, "left": left},
                )
            )

    def _way_out(self, saved: Path | None) -> str:
        why = "; its replica is not whole without it, and"
        if saved is None:
            return f"{why} there is no checkpoint yet: start again"
        way = (
            "--resume goes on"
            if self.resume
            else f'start the same command again, and session.resume("{saved.parent}") in the script goes on'
        )
        return f"{why} {self.times} new beginnings were made: {way} from {saved.name}"


def _is_death(outcome: Outcome) -> bool:
    """Whether a worker was killed: an error of its own it would meet again."""
    code = outcome.exit_code
    return outcome.rank is not None and code > _BY_SIGNAL and code != local.EXIT_TERMINATED
