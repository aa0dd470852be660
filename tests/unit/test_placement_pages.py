"""Every placement has its page, and the pages name what there is."""

import dataclasses
import re

import pytest

from manyhands.placement import PLACEMENTS
from manyhands.placement.pipeline.timetable import SCHEDULES
from tests.pages import DOCS, blocks, rows

FOLDER = DOCS / "placements"


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_page_says_what_it_is_when_it_wins_and_when_it_loses(name: str) -> None:
    page = FOLDER / f"{name}.md"
    text = page.read_text()
    assert text.startswith(f"# {name}\n")
    assert re.search(r"It\s+wins", text)
    assert re.search(r"It\s+loses", text)
    assert [block for block in blocks(page) if block.language == "text"], "the arithmetic"
    assert f"--placement {name}" in text, "how to type it"
    for field in dataclasses.fields(PLACEMENTS[name]):
        assert f"`{field.name}`" in text, f"the setting {field.name}"


def test_the_index_names_every_placement() -> None:
    named = [re.findall(r"`([^`]+)`", row[0])[0] for row in rows(DOCS / "placements.md", "# Placements")]
    assert named == list(PLACEMENTS)


def test_the_schedules_are_named() -> None:
    text = (FOLDER / "pipeline.md").read_text()
    assert all(f"`{name}`" in text for name in SCHEDULES)
