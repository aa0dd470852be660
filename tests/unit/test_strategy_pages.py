"""Every strategy has its page, and the pages name what there is."""

import dataclasses
import re

import pytest

from manyhands import spec
from manyhands.strategies import PRESETS, STRATEGIES
from tests.pages import DOCS, blocks, rows

FOLDER = DOCS / "strategies"
INDEX = FOLDER / "README.md"


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_page_says_what_it_is_when_it_wins_and_when_it_loses(name: str) -> None:
    page = FOLDER / f"{name}.md"
    text = page.read_text()
    assert text.startswith(f"# {name}\n")
    assert re.search(r"It\s+wins", text)
    assert re.search(r"It\s+loses", text)
    assert [block for block in blocks(page) if block.language == "text"], "the mathematics"
    assert f"--strategy {name}" in text, "how to type it"
    for field in dataclasses.fields(STRATEGIES[name]):
        assert f"`{field.name}" in text, f"the setting {field.name}"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_explained_on_the_page_of_its_strategy(name: str) -> None:
    text = (FOLDER / f"{spec.split(PRESETS[name].strategy)[0]}.md").read_text()
    section = re.split(r"^## ", text.partition(f"\n## {name}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    assert re.search(r"\bwins\b", section)
    assert re.search(r"\bloses\b", section)
    assert f"--strategy {name}" in section


def test_the_index_names_every_strategy_and_preset() -> None:
    named = [re.findall(r"`([^`]+)`", row[0]) for row in rows(INDEX, "# Strategies")]
    assert [name for names in named for name in names] == _listed()


def _listed() -> list[str]:
    """Each strategy followed by its presets."""
    names = []
    for name in STRATEGIES:
        names += [name, *(key for key, preset in PRESETS.items() if spec.split(preset.strategy)[0] == name)]
    return names
