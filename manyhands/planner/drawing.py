"""The predicted step of the best ways as stacked bars: for a terminal, and as SVG that needs nothing to be seen."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from manyhands.planner.price import Prediction
from manyhands.planner.walk import TERMS

COLOURS = {
    "compute": "#2a7f8e",
    "exchange": "#d9822b",
    "waiting": "#b0b0b0",
    "update": "#7a5195",
    "session": "#5b8c5a",
}
BLOCKS = {"compute": "█", "exchange": "▓", "waiting": "░", "update": "▒", "session": "·"}

ROW, BAR, LABEL, CHART = 34, 16, 20, 640


def microseconds(each: Prediction) -> dict[str, float]:
    """Per sample, so that ways with other numbers of workers compare."""
    return {name: each.terms[name] / each.samples * 1e6 for name in TERMS}


def bars(ways: Sequence[Prediction], width: int = 60) -> list[tuple[str, list[tuple[str, int]], str]]:
    """For each way: its name, how many columns each term has, and what the whole is."""
    longest = max(sum(microseconds(each).values()) for each in ways)
    found = []
    for each in ways:
        parts = microseconds(each)
        columns = [(name, round(value / longest * width)) for name, value in parts.items()]
        found.append((str(each.way), columns, f"{sum(parts.values()):,.0f} µs"))
    return found


def plain(ways: Sequence[Prediction], width: int = 60) -> str:
    """Without colours, for a pipe."""
    drawn = bars(ways, width)
    names = max(len(name) for name, _, _ in drawn)
    lines = [
        f"{name:{names}}  {''.join(BLOCKS[term] * count for term, count in columns)} {total}"
        for name, columns, total in drawn
    ]
    return "\n".join([*lines, "  ".join(f"{BLOCKS[term]} {term}" for term in TERMS) + "  (per sample)"])


def svg(ways: Sequence[Prediction], title: str) -> str:
    """The same as a picture; the same ways give the same bytes."""
    longest = max(sum(microseconds(each).values()) for each in ways)
    height = 70 + ROW * len(ways)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{CHART + 2 * LABEL + 100}" height="{height}" '
        'font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{LABEL}" y="20" font-size="14">{escape(title)}</text>',
    ]
    at = float(LABEL)
    for name in TERMS:
        parts.append(f'<rect x="{at:.0f}" y="30" width="11" height="11" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{at + 15:.0f}" y="40">{name}</text>')
        at += 30 + 7 * len(name)
    for index, each in enumerate(ways):
        parts += _bar(each, 52 + ROW * index, longest)
    return "\n".join([*parts, "</svg>\n"])


def _bar(each: Prediction, top: int, longest: float) -> list[str]:
    parts = [f'<text x="{LABEL}" y="{top + 10}">{escape(str(each.way))}</text>']
    at = float(LABEL)
    for name, value in microseconds(each).items():
        width = value / longest * CHART
        if width >= 0.05:
            parts.append(
                f'<rect x="{at:.1f}" y="{top + 14}" width="{width:.1f}" height="{BAR}" fill="{COLOURS[name]}">'
                f"<title>{name}: {value:,.1f} µs per sample</title></rect>"
            )
        at += width
    low, high = each.interval()
    parts.append(f'<text x="{at + 6:.1f}" y="{top + 26}">{each.rate:,.0f}/s ({low:,.0f}–{high:,.0f})</text>')
    return parts
