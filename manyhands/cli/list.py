"""`manyhands list`: everything that can be named, with one line on each and the paper it comes from.

On a terminal: headings, lines that break between words, and the settings below each name. In a pipe: one line for each
name, which comes first.
"""

import argparse
import dataclasses
import inspect
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

KINDS = ["strategies", "placements", "codecs", "models", "data"]
MOST_COLUMNS = 110


@dataclasses.dataclass(frozen=True, kw_only=True)
class Named:
    """A name, the line on it, and what may be said after it."""

    name: str
    line: str
    settings: str = ""


Groups = dict[str, list[Named]]


def add_to(verbs: Any) -> None:
    parser = verbs.add_parser(
        "list",
        help="what can be named: strategies, placements, codecs, models, data",
        description="Everything that can be named on the command line and in a spec file.",
        epilog="examples:\n" + "\n".join(f"  manyhands list {kind}" for kind in KINDS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=KINDS, metavar="|".join(KINDS), help="what to list")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    listed = {
        "strategies": _strategies,
        "placements": _placements,
        "codecs": _codecs,
        "models": _models,
        "data": _data,
    }
    groups = listed[options.what]()
    width = max(len(one.name) for one in _all(groups))
    if sys.stdout.isatty():
        columns = min(shutil.get_terminal_size().columns, MOST_COLUMNS)
        print("\n\n".join(_for_person(heading, rows, width, columns) for heading, rows in groups.items()))
    else:
        for one in _all(groups):
            print(f"{one.name:<{width}}  {one.line}{one.settings and f'  {one.settings}'}")
    return 0


def _all(groups: Groups) -> Iterable[Named]:
    return (one for rows in groups.values() for one in rows)


def _for_person(heading: str, rows: list[Named], width: int, columns: int) -> str:
    """A table with a heading; where there is no room for two columns, each line stands below its name."""
    is_narrow = columns < width + 40
    indent = " " * (4 if is_narrow else width + 2)
    lines = [heading]
    for one in rows:
        first = indent if is_narrow else f"{one.name:<{width}}  "
        lines += [one.name] if is_narrow else []
        lines += _wrapped(one.line, first, indent, columns)
        lines += _wrapped(one.settings, indent, f"{indent}  ", columns) if one.settings else []
    return "\n".join(lines)


def _wrapped(text: str, first: str, indent: str, columns: int) -> list[str]:
    return textwrap.wrap(
        text,
        columns,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _strategies() -> Groups:
    from manyhands.comm.collectives import TOPOLOGIES
    from manyhands.strategies import PRESETS, STRATEGIES

    return {
        "strategies": [_configurable(name, kind) for name, kind in STRATEGIES.items()],
        "topologies of all-reduce": [
            Named(name=f"topology={name}", line=_first_line(make)) for name, make in TOPOLOGIES.items()
        ],
        "presets": [
            Named(
                name=name, line=f"{preset.line} ({preset.paper})", settings=f"the same as {preset.strategy}"
            )
            for name, preset in PRESETS.items()
        ],
    }


def _placements() -> Groups:
    from manyhands.placement import PLACEMENTS

    return {"placements": [_configurable(name, kind) for name, kind in PLACEMENTS.items()]}


def _codecs() -> Groups:
    from manyhands.comm.codecs import CODECS

    return {"codecs": [_configurable(name, kind) for name, kind in CODECS.items()]}


def _configurable(name: str, kind: Any) -> Named:
    fields = [f"{field.name}={_shown(field.default)}" for field in dataclasses.fields(kind)]
    return Named(
        name=name, line=_first_line(kind), settings=f"settings: {' '.join(fields)}" if fields else ""
    )


def _shown(default: Any) -> str:
    """As one would type it; where nothing is typed, nothing that cannot be."""
    return "…" if default in (None, ()) else str(default)


def _models() -> Groups:
    from manyhands.models import MODELS

    own = Named(
        name="package.module:callable",
        line="your own: called with the shape of a sample and the number of classes",
    )
    return {"models": [*(Named(name=name, line=_first_line(make)) for name, make in MODELS.items()), own]}


def _data() -> Groups:
    from manyhands.data import DATASETS

    own = Named(name="package.module:callable", line="your own: returns a data set, or a pair (train, test)")
    return {
        "data": [*(Named(name=one.form, line=one.description) for one in DATASETS.values()), own],
    }


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").splitlines()[0]
