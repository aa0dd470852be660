"""The words of the pages: one per idea, those of the field, on lines that end at 100 columns."""

import re
from pathlib import Path

import pytest

from tests.pages import DOCS, PAGES, rows

GLOSSARY = DOCS / "glossary.md"
MOST_WORDS = 35
COLUMNS = 100
DONE = [page for page in PAGES if page.stem not in ("adding-a-strategy", "architecture")]

# Words that this project once had for what the field has a name for: use the field's.
RETIRED = (
    r"diary|journals?|nursery|brood|nest|hatch(?:es|ed)?|stations?|rosters?|heirs?|attendance|part(?:y|ies)|"
    r"deserted|roaming|drawers?|cupboards?|kept back|circle|crews?|dealings?|shelf|knocks?|strangers?|"
    r"innocence|last words|spills?"
)


def prose(page: Path) -> list[tuple[int, str]]:
    """The lines of a page outside of blocks and tables, with their numbers; no commands, pictures, bare links."""
    found, fenced = [], False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and not re.fullmatch(r"\|.*|!\[.*|`[^`]*`|\s*\S+", line):
            found.append((number, line))
    return found


def test_the_glossary_is_short_and_has_no_word_twice() -> None:
    words = [row[0] for row in rows(GLOSSARY, "# Glossary")]
    assert len(words) <= MOST_WORDS
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("page", DONE, ids=lambda page: page.name)
def test_prose_ends_at_a_hundred_columns(page: Path) -> None:
    long = {number: line for number, line in prose(page) if len(line) > COLUMNS}
    assert long == {}


@pytest.mark.parametrize("page", DONE, ids=lambda page: page.name)
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    lines = enumerate(page.read_text().splitlines(), 1)
    found = {
        number: match[0]
        for number, line in lines
        if (match := re.search(rf"\b(?:{RETIRED})\b", line, re.IGNORECASE))
    }
    assert found == {}
