"""The words of the pages: one per idea, those of the field; what they name is in the tree."""

import ast
import builtins
import re
from pathlib import Path

import pytest

from tests.pages import DOCS, PAGES, ROOT, rows

PACKAGE = ROOT / "manyhands"
ARCHITECTURE = DOCS / "architecture.md"
MOST_LINES = 400  # read in fifteen minutes

GLOSSARY = DOCS / "glossary.md"
MOST_WORDS = 26  # of a group
GROUPS = ("## Words that you meet", "## Words of the code")
COLUMNS = 100


# Words that this project once had for what the field has a name for: use the field's.
RETIRED = (
    r"diary|journals?|nursery|brood|nest|hatch(?:es|ed)?|stations?|rosters?|heirs?|attendance|part(?:y|ies)|"
    r"deserted|roaming|drawers?|cupboards?|kept back|circle|crews?|dealings?|shelf|knocks?|strangers?|"
    r"innocence|last words|spills?|guests?|these wires"
)
# Run directories hold this counter under its old name.
COUNTER = 'count("strangers", 1)'
# A sentence about processes names one.
NO_PROCESS = r"whoever|nobody|everybody|anyone|someone|somebody"
IN_CODE = re.compile(rf"\b(?:{RETIRED}|{NO_PROCESS})\b", re.IGNORECASE)
PARTS = sorted(
    path.name
    for path in PACKAGE.iterdir()
    if path.suffix == ".py" or (path.is_dir() and path.name[0].isalpha())
)

# What the page on adding a strategy adds, and what benchmarks leave.
IMAGINED = {"manyhands/strategies/averaging.py", "averaging.py", "benchmarks/raw"}


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
    groups = [[row[0] for row in rows(GLOSSARY, heading)] for heading in GROUPS]
    assert all(len(words) <= MOST_WORDS for words in groups)
    words = [word for words in groups for word in words]
    assert len(set(words)) == len(words)
    assert GLOSSARY.read_text().count("\n| word |") == len(GROUPS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_ends_at_a_hundred_columns(page: Path) -> None:
    long = {number: line for number, line in prose(page) if len(line) > COLUMNS}
    assert long == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_the_words_of_the_field_and_name_processes(page: Path) -> None:
    lines = enumerate(page.read_text().splitlines(), 1)
    found = {
        number: match[0]
        for number, line in lines
        if (match := re.search(rf"\b(?:{RETIRED}|{NO_PROCESS})\b", line, re.IGNORECASE))
    }
    assert found == {}


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_the_code_uses_the_words_of_the_field_and_names_processes(part: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{number}": match[0]
        for path in sorted((PACKAGE / part).rglob("*.py")) or [PACKAGE / part]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := IN_CODE.search(words(line.replace(COUNTER, ""))))
    }
    assert found == {}


def test_words_are_found_inside_of_names() -> None:
    for line in ("self._guests = 1", "class ServerParty:", "from x.last_words import y", "kept_back = 2"):
        assert IN_CODE.search(words(line)), line
    assert not IN_CODE.search(words("theirs = nested + partial(circles)"))


def words(line: str) -> str:
    """A line of code with the names in it taken apart: `_lastWords`, `last_words` and `LastWords` are last words."""
    return re.sub(r"_|(?<=[a-z])(?=[A-Z])", " ", line)


def named(page: Path) -> list[str]:
    """What a page has between backticks, outside of its blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    folders = {path.name for path in (*ROOT.iterdir(), *PACKAGE.iterdir()) if path.is_dir()} - {"runs"}
    for name in named(page):
        if name in IMAGINED or not re.fullmatch(r"[\w./-]+", name) or name.startswith(("events/", ".")):
            continue
        if name.endswith(".py") or (
            (name.endswith("/") or "/" in name) and name.partition("/")[0] in folders
        ):
            known = (ROOT / name).exists() or list(PACKAGE.rglob(name.rstrip("/")))
            assert known, f"{page.name} names {name}"


def test_classes_that_the_architecture_names_are_there() -> None:
    classes = {
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    found = {name for name in named(ARCHITECTURE) if re.fullmatch(r"[A-Z][a-z]+\w*", name)}
    assert found <= classes | set(vars(builtins))


def test_the_architecture_is_read_in_fifteen_minutes() -> None:
    text = ARCHITECTURE.read_text()
    assert text.count("\n") < MOST_LINES
    drawings = re.findall(r"^```text$", text, re.MULTILINE)
    assert len(drawings) == 5, "one of each process and one of the step"


def anchors(page: Path) -> set[str]:
    """What a link into a page may name, as GitHub makes it from headings."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", page.read_text()):
        other = page.parent / target if target else page
        assert anchor in anchors(other), f"{page.name} links to {target}#{anchor}"
