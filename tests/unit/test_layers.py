"""Imports point downward, as the table of layers in docs/architecture.md says."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import DOCS, ROOT, rows

PACKAGE = ROOT / "manyhands"

# Imports that point upward, for a type only: (the file, what it imports).
UPWARD = {("resuming", "sessions"), ("recovery", "sessions")}

FACE = "manyhands"
"""The package itself: the public names."""


def layers() -> dict[str, int]:
    """Each part and its layer; 1 is the top."""
    return {
        part: int(number)
        for number, parts in rows(DOCS / "architecture.md", "## Layers")
        for part in re.findall(r"`([\w.]+)`", parts)
    }


LAYERS = layers()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def part_of(module: str) -> str:
    """The part that a module belongs to: the longest name in the table that it begins with."""
    inside = module.removeprefix(FACE).lstrip(".")
    found = [part for part in LAYERS if f"{inside}.".startswith(f"{part}.")]
    return max(found, key=len) if found else inside or FACE


def imports(module: str, path: Path) -> Iterator[tuple[str, int]]:
    """Every module of ours that a file imports, anywhere in it, and the line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] == FACE:
                yield name if name in MODULES else name.rpartition(".")[0] or name, node.lineno


def test_every_part_has_a_layer() -> None:
    assert {part_of(module) for module in MODULES} == set(LAYERS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downward(module: str) -> None:
    mine = part_of(module)
    for imported, line in imports(module, MODULES[module]):
        other = part_of(imported)
        if other != mine and (mine, other) not in UPWARD:
            assert LAYERS[other] > LAYERS[mine], (
                f"{MODULES[module].relative_to(ROOT)}:{line}: {mine} (layer {LAYERS[mine]}) imports {other} "
                f"(layer {LAYERS[other]})"
            )


def test_upward_imports_are_for_types_only() -> None:
    for mine, other in UPWARD:
        path = MODULES[f"{FACE}.{mine}"]
        tree = ast.parse(path.read_text())
        guarded = {
            id(node)
            for block in tree.body
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for node in ast.walk(block)
        }
        upward = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == f"{FACE}.{other}"
        ]
        assert upward, f"{mine} no longer imports {other}; take it out of UPWARD"
        assert all(id(node) in guarded for node in upward)
