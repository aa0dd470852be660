"""Progress bars for what happens before training: fetching and converting data."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

Report = Callable[[str, int, int | None], None]
"""As `manyhands.data.Progress`: what is being done, how much of it, of how much."""


@contextmanager
def transfers(*, visible: bool = True) -> Iterator[Report]:
    """A bar per file, in bytes."""
    with _bars(DownloadColumn(), TransferSpeedColumn(), visible=visible) as report:
        yield report


@contextmanager
def samples() -> Iterator[Report]:
    """A bar that counts samples."""
    with _bars(MofNCompleteColumn(), TimeRemainingColumn(), visible=True) as report:
        yield report


@contextmanager
def measuring() -> Iterator[Report]:
    """One bar, whose text says what is measured at the moment; it begins again when something else is counted."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring", total=None)

        def report(what: str, done: int, total: int | None) -> None:
            bar.update(task, description=f"measuring: {what}", completed=done, total=total)

        yield report


@contextmanager
def _bars(*figures: ProgressColumn, visible: bool) -> Iterator[Report]:
    # On standard error: standard output may be a pipe that wants the result and nothing else.
    columns = (TextColumn("{task.description}"), BarColumn(), *figures)
    console = Console(stderr=True)
    tasks: dict[str, Any] = {}
    with Progress(
        *columns, console=console, transient=True, disable=not (visible and console.is_terminal)
    ) as bar:

        def report(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield report
