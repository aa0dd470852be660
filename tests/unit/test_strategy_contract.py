"""The contract of a strategy is small, and strategies keep to it: every file is a page that reads like its paper."""

import ast
import dataclasses
import re
from pathlib import Path
from typing import cast

import pytest

from manyhands.strategies import STRATEGIES, extras, interface, parse
from manyhands.strategies.interface import CommView, Periodic, ReplicaView, Served, ServersView, Strategy
from manyhands.strategies.parameter_server import ParameterServer
from manyhands.strategies.traits import Traits
from manyhands.strategies.worker_groups import WorkerGroups
from tests.pages import DOCS, ROOT, rows

PAGE = DOCS / "adding-a-strategy.md"
FOLDER = ROOT / "manyhands" / "strategies"
PACKAGE = "manyhands.strategies"
FILES = {name: FOLDER / f"{kind.__module__.rpartition('.')[2]}.py" for name, kind in STRATEGIES.items()}

MOST_NAMES = 30
"""For one author, who needs the comm or the servers and never both."""
MOST_EXTRAS = 36
"""Most of them for one strategy each; see `extras.py`."""
MOST_EXTRAS_OF_ONE = 12
"""A tournament's."""
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


WITH_COMM = [*members(Strategy, Periodic), *TRAITS, *public(ReplicaView), *public(CommView)]
WITH_SERVERS = [*members(Strategy, Served), *TRAITS, *public(ReplicaView), *public(ServersView)]
ALL = [
    *members(Strategy, Periodic, Served),
    *TRAITS,
    *(name for view in VIEWS.values() for name in public(view)),
]


def test_an_author_must_know_few_names() -> None:
    """The limit is on each of two counts: a strategy has the comm, or servers in its place. Whoever wants to read all
    strategies must know both, which is more than the limit. Extras come on top, for the strategies that they name."""
    assert len(WITH_COMM) <= MOST_NAMES, sorted(WITH_COMM)
    assert len(WITH_SERVERS) <= MOST_NAMES, sorted(WITH_SERVERS)
    assert len(public(ReplicaView)) <= 8
    assert len(public(CommView)) <= 8


def test_the_page_says_how_many_names_there_are() -> None:
    text = " ".join(PAGE.read_text().split())
    of_each = [sum(len(public(kind)) for kind in extras_of(name)) for name in FILES]
    numbers = re.search(r"(\d+) names with the comm, (\d+) with servers, (\d+) in all", text)
    assert numbers
    assert [int(number) for number in numbers.groups()] == [len(WITH_COMM), len(WITH_SERVERS), len(ALL)]
    more = re.search(r"(\d+) of the (\d+) strategies need more, between (\d+) and (\d+) names", text)
    assert more
    some = [count for count in of_each if count]
    assert [int(number) for number in more.groups()] == [len(some), len(FILES), min(some), max(some)]


def test_the_contract_is_on_one_screen() -> None:
    assert len(Path(interface.__file__).read_text().splitlines()) <= SCREEN_LINES


def test_extras_are_few_and_say_for_which_strategy_they_are() -> None:
    assert sum(len(public(kind)) for kind in EXTRAS.values()) <= MOST_EXTRAS
    texts = {name: "".join(page.read_text() for page in pages(path)) for name, path in FILES.items()}
    for kind in EXTRAS.values():
        users = {name for name, text in texts.items() if re.search(rf"\b{kind.__name__}\b", text)}
        assert users == named(kind), kind.__name__
    for name in FILES:
        assert sum(len(public(kind)) for kind in extras_of(name)) <= MOST_EXTRAS_OF_ONE, name


def named(kind: type) -> set[str]:
    """The strategies that an extra's docstring says it is for."""
    return set(re.findall(r"`([\w-]+)`", kind.__doc__ or ""))


def extras_of(name: str) -> list[type]:
    """The extras that a strategy may use: those that name it, and those that are part of one that does."""
    own = [kind for kind in EXTRAS.values() if name in named(kind)]
    parts = {kind.__name__ for kind in own}
    within = [
        kind for kind in EXTRAS.values() if parts & set(re.findall(r"part of (\w+)", kind.__doc__ or ""))
    ]
    return [*own, *within]


def offered_to(name: str, noun: str) -> set[str]:
    """What a strategy may ask of the replica, the comm or the servers."""
    view = VIEWS[noun]
    return members(view, *(kind for kind in extras_of(name) if view in kind.__mro__))


def pages(path: Path) -> list[Path]:
    """A strategy's own file, and the helpers in the package which it imports, and theirs; other strategies and the
    contract are pages of their own."""
    others = {*FILES.values(), *(FOLDER / f"{name}.py" for name in ("__init__", "interface", "extras"))}
    found = [path]
    for page in found:
        for node in ast.walk(ast.parse(page.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE):
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                files = [FOLDER / f"{name.removeprefix(PACKAGE).strip('.')}.py" for name in names]
                found += [file for file in files if file.exists() and file not in {*others, *found}]
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_strategy_is_a_page(name: str) -> None:
    text = FILES[name].read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert re.search(r"\b(19|20)\d\d\b", text), "the paper"


def asked_for(text: str) -> list[tuple[str, str, int]]:
    """Every `replica.x`, `comm.x` and `servers.x` of a file, and the `x` of `servers.comm.x`: noun, name, line."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            noun = getattr(node.value, "id", getattr(node.value, "attr", ""))
            if noun in VIEWS:
                found.append((noun, node.attr, node.lineno))
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_strategy_uses_what_the_contract_offers(name: str) -> None:
    """The type checker sees to it as well; a parameter of type Any would get past it."""
    for page in pages(FILES[name]):
        for noun, member, line in asked_for(page.read_text()):
            assert member in offered_to(name, noun), f"{page.name}:{line}: {noun}.{member}"


def test_helpers_are_looked_at_and_extras_are_not_for_every_strategy() -> None:
    assert {"population.py", "partners.py", "refusals.py"} <= {
        page.name for page in pages(FILES["tournament"])
    }
    assert {"meetings.py", "partners.py"} <= {page.name for page in pages(FILES["ad-psgd"])}
    assert "score" in offered_to("tournament", "replica")
    assert "score" not in offered_to("gossip", "replica")
    assert "score" not in offered_to("tournament", "comm")
    assert "sum_of" in offered_to("sandblaster", "comm")
    assert asked_for("servers.comm.rank\nreplica.secret") == [
        ("comm", "rank", 1),
        ("replica", "secret", 2),
        ("servers", "comm", 1),
    ]


@pytest.mark.parametrize("name", FILES)
def test_a_strategy_with_servers_can_leave(name: str) -> None:
    """Before a pause the engine calls `leave` of what is `Served`."""
    found = parse(name)
    assert not found.traits.servers or isinstance(found, Served)


def test_groups_of_workers_leave_as_their_way_does(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[object] = []
    monkeypatch.setattr(ParameterServer, "leave", lambda self, *nouns: left.extend(nouns))
    replica, servers = cast(ReplicaView, "replica"), cast(ServersView, "servers")
    WorkerGroups().leave(replica, servers)
    assert left == ["replica", "servers"]


def test_the_page_names_all_of_it() -> None:
    bases = {row[1].strip("`") for row in rows(PAGE, "## The bases")}
    assert bases == members(Strategy, Periodic, Served)
    assert {row[0].strip("`") for row in rows(PAGE, "## The traits")} == TRAITS
    used = re.findall(
        r"`(replica|comm|servers)\.(\w+)", " ".join(row[0] for row in rows(PAGE, "## What a step may use"))
    )
    assert set(used) == {(noun, name) for noun, view in VIEWS.items() for name in public(view)}
