"""What `manyhands plan` prints: the table, the paragraph, bars, curves; or all of it as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from manyhands.planner import drawing, explain
from manyhands.planner.cluster_words import cluster_json, cluster_lines
from manyhands.planner.scaling import Curve, curves
from manyhands.planner.search import Choice

MOST_CURVES = 5
PIPE_COLUMNS = 220


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """What there is to show."""

    choice: Choice
    epochs: float
    curves: tuple[Curve, ...] = ()
    within_s: float | None = None


def with_curves(report: PlanReport, within_s: float | None) -> PlanReport:
    """Of the strategies in the table, over numbers of hosts."""
    choice = report.choice
    names = list(dict.fromkeys(each.way.strategy for each in (choice.best, *choice.table)))[:MOST_CURVES]
    found = curves(choice.facts, choice.wanted, names)
    return replace(report, curves=tuple(found), within_s=within_s)


def show(report: PlanReport, *, as_json: bool, explains: bool) -> None:
    if as_json:
        print(json.dumps(_json(report), indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False, soft_wrap=True)
    choice = report.choice
    # A pipe has no columns: no line of the table is broken.
    (console if console.is_terminal else Console(width=PIPE_COLUMNS)).print(_table(report))
    console.print()
    _bars(console, choice)
    console.print()
    Console(highlight=False).print(escape(explain.paragraph(choice)))
    for line in cluster_lines(choice.facts, report.curves, report.epochs, report.within_s):
        console.print(escape(line))
    for way, reason in choice.refused[:3]:
        console.print(escape(f"left out  {way}: {reason}"))
    for note in choice.facts.notes:
        console.print(escape(f"note: {note}"))
    if explains:
        console.print()
        console.print(escape(explain.terms_text(choice)))


def _table(report: PlanReport) -> Table:
    found = explain.rows(report.choice, report.epochs)
    table = Table(box=None, pad_edge=False, header_style="bold")
    epochs = f"{report.epochs:g} epoch{'s' if report.epochs != 1 else ''}"
    for name, justify in (
        ("", "left"),
        ("way", "left"),
        ("workers × threads", "left"),
        ("samples/s (90 %)", "right"),
        (epochs, "right"),
        ("per host", "right"),
        ("trains", "left"),
    ):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in found:
        cells = (row.mark, row.way, row.split, row.rate, row.time, row.memory, row.trains)
        table.add_row(*map(escape, cells), style="bold" if row.mark == "→" else "")
    return table


def _bars(console: Console, choice: Choice) -> None:
    """Stacked bars: in colours on a terminal, as blocks in a pipe."""
    ways = _drawn(choice)
    if not console.is_terminal:
        print(drawing.plain(ways))
        return
    for name, columns, total in drawing.bars(ways, width=max(20, min(60, console.width // 2))):
        line = Text(f"{name}\n  ")
        for term, count in columns:
            line.append("█" * count, style=drawing.COLOURS[term])
        console.print(line.append(f" {total}"))
    legend = Text("  ")
    for term, colour in drawing.COLOURS.items():
        legend.append("█ ", style=colour).append(f"{term}  ")
    console.print(legend.append("(per sample)"))


def _drawn(choice: Choice) -> Sequence[explain.Prediction]:
    """The best few, the chosen one among them."""
    first = list(choice.table[:5])
    return first if choice.best in first else [*first[:4], choice.best]


def _json(report: PlanReport) -> dict[str, object]:
    found: dict[str, object] = explain.as_json(report.choice, report.epochs)
    if report.curves:
        found["cluster"] = cluster_json(report.choice.facts, report.curves, report.epochs, report.within_s)
    return found
