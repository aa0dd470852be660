"""Strategies are named in their own package only; launcher and workers load only what they run."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.strategies import STRATEGIES
from tests.pages import ROOT

PACKAGE = ROOT / "manyhands"
PLACEMENTS = PACKAGE / "placement" / "__init__.py"  # has a placement of the same name as a strategy
OTHERS = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.parent != PACKAGE / "strategies" and path != PLACEMENTS
]


def names_a_strategy(text: str) -> str | None:
    """The strategy that a string constant names, by itself, with settings, or as a word of a longer text."""
    for name in STRATEGIES:
        if text == name or text.startswith(f"{name}:"):
            return name
        if re.search(rf'--strategy[ =]{re.escape(name)}(?![\w-])|"{re.escape(name)}[":]', text):
            return name
    return None


def strings(path: Path) -> list[tuple[int, str]]:
    """String constants, pieces of f-strings included; not docstrings, which are for people."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_strategy_is_named_outside_its_package(path: Path) -> None:
    found = [(line, names_a_strategy(text)) for line, text in strings(path)]
    assert not [(line, name) for line, name in found if name]


def test_the_check_sees_what_it_should() -> None:
    for name in STRATEGIES:
        for text in (name, f"{name}:key=1", f"try --strategy {name} next", f'  name = "{name}"\n'):
            assert names_a_strategy(text) == name
    assert names_a_strategy("a single number") is None


@pytest.mark.processes
def test_the_command_line_starts_without_torch() -> None:
    code = "import manyhands.cli; manyhands.cli.build()"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "manyhands.cli" in loaded
    assert not {name for name in loaded if name.partition(".")[0] in ("torch", "numpy")}


@pytest.mark.processes
def test_a_worker_loads_nothing_that_only_a_server_runs() -> None:
    code = "import sys, manyhands; manyhands.session; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "manyhands.engine.session" in loaded
    assert not [name for name in loaded if name.startswith(("manyhands.servers.process.", "PIL"))]
