"""The pages that a person reads, for the tests that keep them true."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = (README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md")))


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: where it is, what kind, and what it says."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(
            page=page,
            line=text.count("\n", 0, match.start()) + 1,
            language=match["language"].strip(),
            text=match["text"],
        )
        for match in re.finditer(
            r"^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", text, re.MULTILINE | re.DOTALL
        )
    ]


def rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    after = page.read_text().partition(f"{heading}\n")[2]
    assert after, f"{page.name} has no heading {heading!r}"
    section = re.split(r"^#", after, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
