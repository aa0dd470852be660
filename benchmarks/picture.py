"""A bar for each ratio, with its range, as a small SVG: what README shows."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT = 800, 290, 140
ROW, TOP, BOTTOM = 34, 44, 28
STYLE = """text { font: 14px sans-serif; fill: #24292f }
  .title { font-weight: bold }
  .small { font-size: 12px; fill: #57606a }
  .bar { fill: #2f81c1 }
  .range { stroke: #24292f; stroke-width: 1.5 }
  .even { stroke: #57606a; stroke-dasharray: 4 3 }"""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One ratio: the median round, and the lowest and the highest."""

    name: str
    median: float
    low: float
    high: float


def draw(title: str, even: str, bars: Sequence[Bar]) -> str:
    """Bars from zero, whiskers from the lowest to the highest round, and a line at 1 with its meaning."""
    height = TOP + ROW * len(bars) + BOTTOM
    scale = (WIDTH - LEFT - RIGHT) / max(bar.high for bar in bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}">',
        f"<style>\n  {STYLE}\n</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="26" class="title">{escape(title)}</text>',
    ]
    for row, bar in enumerate(bars):
        middle = TOP + ROW * row + ROW / 2
        low, high = (f"{LEFT + value * scale:.1f}" for value in (bar.low, bar.high))
        label = f"{bar.median:.2f} ({bar.low:.2f}–{bar.high:.2f})"
        parts += [
            f'<text x="{LEFT - 12}" y="{middle + 5}" text-anchor="end">{escape(bar.name)}</text>',
            f'<rect x="{LEFT}" y="{middle - 9}" width="{bar.median * scale:.1f}" height="18" class="bar"/>',
            f'<line x1="{low}" y1="{middle}" x2="{high}" y2="{middle}" class="range"/>',
            f'<text x="{WIDTH - RIGHT + 10}" y="{middle + 5}" class="small">{label}</text>',
        ]
    one, end = f"{LEFT + scale:.1f}", TOP + ROW * len(bars)
    parts += [
        f'<line x1="{one}" y1="{TOP - 4}" x2="{one}" y2="{end + 4}" class="even"/>',
        f'<text x="{one}" y="{end + 19}" text-anchor="middle" class="small">{escape(even)}</text>',
        "</svg>\n",
    ]
    return "\n".join(parts)
