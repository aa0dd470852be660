"""The live display of a run in the terminal; it only reads the records that the workers write.

On a terminal: a bar and a few figures that stay at the bottom. In a notebook's cell: the same as plain text.
Elsewhere (a file, a CI log): a plain line now and then. It draws when `refresh` is called, about eight times a second,
and has no thread.
"""

import math
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from manyhands.launching.words import breaks, width_of
from manyhands.telemetry.digest import Digest
from manyhands.telemetry.lines import Record, number
from manyhands.telemetry.read import Tail

PLAIN_PERIOD_S = 5.0
CELL_PERIOD_S = 0.5
CELL_WIDTH = 100
WORKERS_LISTED = 8
BAR_WIDTH = (8, 40)

Piece = tuple[int, Text]  # how soon it may be left out on a narrow terminal (0: never), and what it says


class Display:
    """Shows the run in `run` while its workers train; make it before they start.

    >>> with Progress(run, workers=2) as progress:  # doctest: +SKIP
    ...     while workers_are_alive():
    ...         progress.refresh()
    """

    def __init__(self, run: Path, workers: int, *, stream: TextIO | None = None) -> None:
        self.digest = Digest(workers)
        self._tail = Tail(run, skip_existing=True)
        stream = stream or sys.stderr
        self._display: _Terminal | _Plain = _of(stream)
        self._began_s = time.monotonic()

    def __enter__(self) -> Self:
        self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.refresh()
        with suppress(OSError):
            self._display.stop(self.digest, self._elapsed_s())

    def refresh(self) -> None:
        """Read what is new and draw."""
        self.digest.add(self._tail.poll())
        with suppress(OSError):  # a terminal that went away must not end the run
            self._display.show(self.digest, self._elapsed_s())

    def print_line(self, text: str) -> None:
        """Print a line, such as a worker's output, above the bar."""
        with suppress(OSError):
            self._display.print_line(text)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s


class _Terminal:
    """Draws over the last lines of a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console = Console(file=stream, force_terminal=True)
        # Standard output stays untouched: it may be a pipe that wants the summary and nothing else.
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False)

    def start(self) -> None:
        self._live.start()

    def stop(self, digest: Digest, elapsed_s: float) -> None:
        self._live.stop()

    def show(self, digest: Digest, elapsed_s: float) -> None:
        options = self._console.options
        lines = draw(digest, elapsed_s, width=options.max_width - 1, ascii_only=options.ascii_only)
        self._live.update(Group(*lines), refresh=True)

    def print_line(self, text: str) -> None:
        parts = []
        for line in Text.from_ansi(text).split("\n", allow_blank=True):
            for part in line.divide(breaks(line.plain, self._columns())):
                part.rstrip()
                parts.append(part)
        self._console.print(Text("\n").join(parts), soft_wrap=True)

    def _columns(self) -> int:
        """Of this terminal, which need not be that of standard output."""
        return width_of(self._stream) or self._console.width


class _Plain:
    """Prints whole lines: every few seconds, at each epoch and at each evaluation."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._printed_s = 0.0
        self._printed_step = 0
        self._epoch = 0
        self._evaluation: Record | None = None

    def start(self) -> None:
        pass

    def stop(self, digest: Digest, elapsed_s: float) -> None:
        if digest.step > self._printed_step:
            self._print_state(digest, elapsed_s)

    def show(self, digest: Digest, elapsed_s: float) -> None:
        due = elapsed_s - self._printed_s >= PLAIN_PERIOD_S and digest.step > self._printed_step
        if due or digest.epoch != self._epoch:
            self._print_state(digest, elapsed_s)
        if digest.evaluation is not None and not _same_evaluation(digest.evaluation, self._evaluation):
            self._evaluation = digest.evaluation
            self.print_line(f"step {digest.evaluation.get('step', digest.step)}  {_evaluation(digest)}")

    def print_line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def _print_state(self, digest: Digest, elapsed_s: float) -> None:
        self._printed_s, self._printed_step, self._epoch = elapsed_s, digest.step, digest.epoch
        pieces = [_epoch(digest), f"step {_steps(digest)}", _loss(digest), _rate(digest)]
        self.print_line("  ".join([piece for piece in pieces if piece] + _times(digest, elapsed_s)))


class _Cell(_Plain):
    """In a notebook: an output of the cell that changes, and the lines below it."""

    def start(self) -> None:
        from IPython.display import display

        self._drawn = ""
        self._drawn_s = -math.inf
        self._output = display({"text/plain": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def stop(self, digest: Digest, elapsed_s: float) -> None:
        self._put(_plain(digest, elapsed_s) if digest.step else "")

    def show(self, digest: Digest, elapsed_s: float) -> None:
        if elapsed_s - self._drawn_s >= CELL_PERIOD_S:
            self._drawn_s = elapsed_s
            self._put(_plain(digest, elapsed_s))

    def _put(self, text: str) -> None:
        if text != self._drawn:
            self._drawn = text
            self._output.update({"text/plain": text}, raw=True)


def _plain(digest: Digest, elapsed_s: float) -> str:
    return "\n".join(line.plain for line in draw(digest, elapsed_s, width=CELL_WIDTH))


def in_notebook() -> bool:
    """Whether this process is a notebook's."""
    ipython = sys.modules.get("IPython") if "ipykernel" in sys.modules else None
    return hasattr(ipython.get_ipython(), "kernel") if ipython else False


def _of(stream: TextIO) -> _Terminal | _Plain:
    if stream is sys.stdout and in_notebook():
        return _Cell(stream)
    return _Terminal(stream) if stream.isatty() else _Plain(stream)


def draw(digest: Digest, elapsed_s: float, *, width: int, ascii_only: bool = False) -> list[Text]:
    """The lines of the display, none wider than `width`."""
    if not digest.step:
        here = digest.workers_expected - len(digest.missing)
        waiting = f"starting {_count(digest.workers_expected, 'worker')}, {here} ready"
        return [_fit([(0, Text(waiting, "dim")), (1, Text(_duration(elapsed_s), "dim"))], width)]
    lines = [_main_line(digest, elapsed_s, width, ascii_only), _fit(_where_time_goes(digest), width)]
    lines.append(_fit(_per_worker(digest, width), width))
    return [line for line in lines if line]


def _main_line(digest: Digest, elapsed_s: float, width: int, ascii_only: bool) -> Text:
    narrowest, widest = BAR_WIDTH
    has_bar = digest.total_steps is not None
    pieces = _figures(digest, elapsed_s)
    if not _all_fit(_main_figures(pieces), width):
        pieces = _figures(digest, elapsed_s, is_short=True)
    # Loss and speed are worth more than the bar.
    if not (has_bar and _all_fit(_main_figures(pieces), width - narrowest - 2)):
        return _fit(pieces, width)
    line = _fit(pieces, width - narrowest - 2)
    bar_width = min(widest, width - line.cell_len - 2)
    return Text.assemble(_bar(digest, bar_width, ascii_only), "  ", line)


def _figures(digest: Digest, elapsed_s: float, *, is_short: bool = False) -> list[Piece]:
    times = _times(digest, elapsed_s)
    steps = ("" if digest.total_steps is not None else "step ") + _steps(digest)
    return [
        (4, Text(_epoch(digest), "bold")),
        (0, Text(steps)),
        (1, Text(_loss(digest, is_short), "magenta" if math.isfinite(digest.loss or 0.0) else "bold red")),
        (2, Text(_rate(digest, is_short), "cyan")),
        (5, Text(times[0], "dim")),
        *((3, Text(left, "green")) for left in times[1:]),
    ]


def _main_figures(pieces: Sequence[Piece]) -> list[Piece]:
    """Steps, loss and speed."""
    return [piece for piece in pieces if piece[0] <= 2]


def _all_fit(pieces: Sequence[Piece], width: int) -> bool:
    lengths = [text.cell_len for _, text in pieces if text]
    return sum(lengths) + 2 * (len(lengths) - 1) <= width


def _bar(digest: Digest, width: int, ascii_only: bool) -> Text:
    done = min(digest.step / max(digest.total_steps or 1, 1), 1.0)
    filled = int(done * width)
    full, empty = ("=", "-") if ascii_only else ("━", "─")
    return Text.assemble((full * filled, "green"), (empty * (width - filled), "bright_black"))


def _where_time_goes(digest: Digest) -> list[Piece]:
    pieces = [
        (1, Text(f"{part} {share:.0%}", "dim")) for part, share in digest.shares().items() if share >= 0.005
    ]
    if (speed := digest.bytes_per_second()) > 0:
        pieces.append((2, Text(f"sent {_bytes(speed)}/s", "dim")))
    pieces += [(2, Text(f"{name} {value:.4g}")) for name, value in digest.logged.items()]
    if evaluation := _evaluation(digest):
        pieces.append((0, Text(evaluation, "bold")))
    return pieces


def _per_worker(digest: Digest, width: int) -> list[Piece]:
    pieces: list[Piece] = []
    rates = digest.rates()
    if len(rates) > 1:
        listed = "samples/s by worker  " + "  ".join(
            f"{rank}: {_figure(rate)}" for rank, rate in rates.items()
        )
        if len(rates) > WORKERS_LISTED or len(listed) > width:
            slowest = min(rates, key=rates.__getitem__)
            fastest = max(rates.values())
            listed = (
                f"{_figure(rates[slowest])} (worker {slowest}) to {_figure(fastest)} samples/s per worker"
            )
        pieces.append((1, Text(listed, "dim")))
    missing = digest.missing
    if len(missing) == 1:
        pieces.append((0, Text(f"worker {missing[0]} has not reported", "yellow")))
    elif missing:
        pieces.append((0, Text(f"{len(missing)} workers have not reported", "yellow")))
    return pieces


def _fit(pieces: Sequence[Piece], width: int) -> Text:
    """The pieces side by side, leaving out the least needed until they fit."""
    kept = [piece for piece in pieces if piece[1]]
    while True:
        line = Text("  ", no_wrap=True).join(text for _, text in kept)
        droppable = [index for index, (order, _) in enumerate(kept) if order]
        if line.cell_len <= width or not droppable:
            line.truncate(max(width, 1), overflow="crop")
            return line
        del kept[max(droppable, key=lambda index: (kept[index][0], index))]


def _epoch(digest: Digest) -> str:
    of = f"/{digest.epochs}" if digest.epochs else ""
    return f"epoch {digest.epoch + 1}{of}"


def _steps(digest: Digest) -> str:
    if digest.total_steps is None:
        return str(digest.step)
    return f"{digest.step:>{len(str(digest.total_steps))}}/{digest.total_steps}"


def _loss(digest: Digest, is_short: bool = False) -> str:
    return "" if digest.loss is None else f"loss {digest.loss:#.{3 if is_short else 4}g}"


def _rate(digest: Digest, is_short: bool = False) -> str:
    rate = sum(digest.rates().values())
    return f"{_figure(rate)}{'/s' if is_short else ' samples/s'}" if rate else ""


def _times(digest: Digest, elapsed_s: float) -> list[str]:
    left_s = digest.left_s()
    return [f"{_duration(elapsed_s)} elapsed"] + ([f"{_duration(left_s + 0.99)} left"] if left_s else [])


def _evaluation(digest: Digest) -> str:
    record = digest.evaluation or {}
    accuracy, loss = number(record.get("accuracy")), number(record.get("loss"))
    if accuracy is not None:
        return f"accuracy {accuracy:.1%}"
    return f"held-out loss {loss:.4g}" if loss is not None else ""


def _same_evaluation(one: Record, other: Record | None) -> bool:
    """Every worker may report the same evaluation; its figures say nothing, since NaN differs from itself."""
    return other is not None and all(one.get(name) == other.get(name) for name in ("step", "epoch"))


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} GB"


def _duration(seconds: float) -> str:
    whole = int(min(seconds, 1e9))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
