"""`manyhands list`: everything that can be named, with one line on each and the paper it comes from."""

import argparse
import dataclasses
import inspect
from typing import Any

KINDS = ["strategies", "placements", "models", "data"]


def add_to(verbs: Any) -> None:
    parser = verbs.add_parser(
        "list",
        help="what can be named: strategies, placements, models, data",
        description="Everything that can be named on the command line and in a spec file.",
        epilog="examples:\n" + "\n".join(f"  manyhands list {kind}" for kind in KINDS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=KINDS, metavar="|".join(KINDS), help="what to list")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    tables = {"strategies": _strategies, "placements": _placements, "models": _models, "data": _data}
    rows = tables[options.what]()
    width = max(len(name) for name, _ in rows)
    for name, line in rows:
        print(f"{name:<{width}}  {line}")
    return 0


def _strategies() -> list[tuple[str, str]]:
    from manyhands.comm.collectives import TOPOLOGIES
    from manyhands.strategies import PRESETS, STRATEGIES

    rows = [(_with_settings(name, kind), _first_line(kind)) for name, kind in STRATEGIES.items()]
    rows += [(f"  topology={name}", _first_line(make)) for name, make in TOPOLOGIES.items()]
    rows += [(name, f"{preset.line} ({preset.paper}): {preset.strategy}") for name, preset in PRESETS.items()]
    return rows


def _placements() -> list[tuple[str, str]]:
    from manyhands.placement import PLACEMENTS

    return [(_with_settings(name, kind), _first_line(kind)) for name, kind in PLACEMENTS.items()]


def _with_settings(name: str, kind: Any) -> str:
    fields = [f"{field.name}={_shown(field.default)}" for field in dataclasses.fields(kind)]
    return f"{name}:{','.join(fields)}" if fields else name


def _shown(default: Any) -> str:
    """As one would type it; where nothing is typed, nothing that cannot be."""
    return "…" if default in (None, ()) else str(default)


def _models() -> list[tuple[str, str]]:
    from manyhands.models import MODELS

    own = ("package.module:callable", "your own: called with the shape of a sample and the number of classes")
    return [*((name, _first_line(make)) for name, make in MODELS.items()), own]


def _data() -> list[tuple[str, str]]:
    from manyhands.data import DATASETS

    own = ("package.module:callable", "your own: returns a data set, or a pair (train, test)")
    return [*((source.form, source.description) for source in DATASETS.values()), own]


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").splitlines()[0]
