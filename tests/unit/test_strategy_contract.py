"""The contract of a strategy is small, and strategies keep to it: every file is a page that reads like its paper."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from manyhands.strategies import STRATEGIES, extras, interface
from manyhands.strategies.interface import CommView, Periodic, ReplicaView, Served, ServersView, Strategy
from manyhands.strategies.traits import Traits
from tests.pages import DOCS, ROOT, rows

PAGE = DOCS / "adding-a-strategy.md"
FOLDER = ROOT / "manyhands" / "strategies"
FILES = {name: FOLDER / f"{kind.__module__.rpartition('.')[2]}.py" for name, kind in STRATEGIES.items()}

MOST_NAMES = 30
MOST_EXTRAS = 36
"""Most of them for one strategy each; see `extras.py`."""
MOST_LINES = 80
SCREEN_LINES = 150
"""Of the contract, comments included."""

VIEWS = {"replica": ReplicaView, "comm": CommView, "servers": ServersView}


def public(kind: type) -> set[str]:
    """What a class itself declares: attributes, properties and methods."""
    names = {*vars(kind), *vars(kind).get("__annotations__", {})}
    return {name for name in names if not name.startswith("_")}


def members(*bases: type) -> set[str]:
    return set().union(*(public(base) for base in bases))


TRAITS = {field.name for field in dataclasses.fields(Traits)}
EXTRAS = {
    name: kind
    for name, kind in vars(extras).items()
    if isinstance(kind, type) and kind.__module__ == extras.__name__
}


def test_an_author_must_know_few_names() -> None:
    contract = [
        *members(Strategy, Periodic, Served),
        *TRAITS,
        *public(ReplicaView),
        *public(CommView),
    ]
    assert len(contract) <= MOST_NAMES, sorted(contract)
    assert len(public(ReplicaView)) <= 8
    assert len(public(CommView)) <= 8


def test_an_author_of_a_strategy_with_servers_must_know_no_more() -> None:
    served = [*members(Strategy, Served), *TRAITS, *public(ReplicaView), *public(ServersView)]
    assert len(served) <= MOST_NAMES, sorted(served)


def test_the_contract_is_on_one_screen() -> None:
    assert len(Path(interface.__file__).read_text().splitlines()) <= SCREEN_LINES


def test_extras_are_few_and_say_for_which_strategy_they_are() -> None:
    assert sum(len(public(kind)) for kind in EXTRAS.values()) <= MOST_EXTRAS
    for kind in EXTRAS.values():
        named = re.findall(r"`([\w-]+)`", kind.__doc__ or "")
        users = {name for name, path in FILES.items() if re.search(rf"\b{kind.__name__}\b", reachable(path))}
        assert users == set(named), kind.__name__


def reachable(path: Path) -> str:
    """A strategy's own text, and that of the helpers in the package which it imports."""
    text = path.read_text()
    helpers = [FOLDER / f"{name}.py" for name in re.findall(r"manyhands\.strategies\.(\w+) import", text)]
    contract = {FOLDER / f"{name}.py" for name in ("interface", "extras")}
    return text + "".join(other.read_text() for other in helpers if other not in {*contract, *FILES.values()})


@pytest.mark.parametrize("name", FILES)
def test_a_strategy_is_a_page(name: str) -> None:
    text = FILES[name].read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert re.search(r"\b(19|20)\d\d\b", text), "the paper"


@pytest.mark.parametrize("name", FILES)
def test_a_strategy_uses_what_the_contract_offers(name: str) -> None:
    """The type checker sees to it as well; a parameter of type Any would get past it."""
    more = {member for kind in EXTRAS.values() for member in public(kind)}
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in VIEWS:
            offered = public(VIEWS[node.value.id]) | more
            assert node.attr in offered, f"{FILES[name].name}:{node.lineno}: {node.value.id}.{node.attr}"


def test_the_page_names_all_of_it() -> None:
    bases = {row[1].strip("`") for row in rows(PAGE, "## The bases")}
    assert bases == members(Strategy, Periodic, Served)
    assert {row[0].strip("`") for row in rows(PAGE, "## The traits")} == TRAITS
    used = re.findall(
        r"`(replica|comm|servers)\.(\w+)", " ".join(row[0] for row in rows(PAGE, "## What a step may use"))
    )
    assert set(used) == {(noun, name) for noun, view in VIEWS.items() for name in public(view)}
