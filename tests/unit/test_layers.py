"""Imports point downward, as the table of layers in docs/architecture.md says."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.pages import DOCS, ROOT, rows

PACKAGE = ROOT / "manyhands"

EVERYWHERE = {"telemetry", "errors", "foreign"}
"""What every part may import."""

MOST_LAYERS = 13

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
    if inside == "__main__":
        return "cli"  # `python -m manyhands` is the command
    found = [part for part in (*LAYERS, *EVERYWHERE) if f"{inside}.".startswith(f"{part}.")]
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
    assert {part_of(module) for module in MODULES} == set(LAYERS) | EVERYWHERE
    assert set(LAYERS.values()) == set(range(1, MOST_LAYERS + 1))


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downward(module: str) -> None:
    mine = part_of(module)
    for imported, line in imports(module, MODULES[module]):
        other = part_of(imported)
        if other == mine or other in EVERYWHERE:
            continue
        where = f"{MODULES[module].relative_to(ROOT)}:{line}"
        assert mine not in EVERYWHERE, f"{where}: {mine} imports {other}, and every part imports {mine}"
        assert LAYERS[other] > LAYERS[mine], (
            f"{where}: {mine} (layer {LAYERS[mine]}) imports {other} (layer {LAYERS[other]})"
        )


def test_no_file_imports_itself_over_others() -> None:
    graph = {module: {name for name, _ in imports(module, path)} for module, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' imports '.join(reversed(error.args[1]))}")
