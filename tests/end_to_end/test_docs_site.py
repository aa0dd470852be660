"""The site that `make docs` builds: every page, every link, searchable, and nothing from another host."""

import html
import inspect
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import manyhands as mh
from tests.end_to_end.commands import run
from tests.pages import DOCS, ROOT, blocks

pytestmark = pytest.mark.processes

CONFIG = ROOT / "mkdocs.yml"


class References(HTMLParser):
    """What a browser would fetch to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        known = dict(attributes)
        if tag in ("script", "img", "iframe", "source"):
            self.fetched += [known.get("src") or ""]
        if tag == "link" and known.get("rel") not in ("canonical", "prev", "next"):
            self.fetched += [known.get("href") or ""]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(CONFIG), "-d", str(out)]
    done = run(command, ROOT)
    assert done.code == 0, done.err  # strict: a link that leads nowhere, or a page in no menu, is an error
    return out


def test_every_page_is_there(site: Path) -> None:
    pages = {
        path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md") if path.name != "README.md"
    }
    built = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    assert pages <= built
    assert Path("index") in built


def test_the_site_fetches_nothing_from_another_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        found = References()
        found.feed(page.read_text())
        assert [target for target in found.fetched if re.match(r"(https?:)?//", target)] == [], page


def test_it_can_be_searched_from_the_disk(site: Path) -> None:
    text = (site / "search" / "search_index.js").read_text()
    index = json.loads(text.removeprefix("var __index = "))
    found = [entry["location"] for entry in index["docs"] if "elastic-averaging" in entry["location"]]
    assert found


def test_the_python_page_shows_every_public_name(site: Path) -> None:
    text = html.unescape(re.sub(r"<[^>]+>", "", (site / "api.html").read_text()))
    for name in set(mh.__all__) - {"__version__"}:
        assert re.search(rf"\b{name}\b", text), name
    methods = [name for name, _ in inspect.getmembers(mh.Session) if not name.startswith("_")]
    assert [name for name in methods if not re.search(rf"\bsession\.{name}\s*(?:property)?\s*¶", text)] == []
    for name in ("Loss", "Measure", "Batches", "World", "ManyhandsStrategy", "ManyhandsTrainer"):
        assert re.search(rf"\b{name}\s*(?:module-attribute)?\s*¶", text), name
    for name in ("data.load", "models.build", "strategies.parse"):
        assert re.search(rf"\b{re.escape(name)}\s*¶", text), name


@pytest.mark.parametrize("page", sorted((DOCS / "how-to").glob("from-*.md")), ids=lambda page: page.stem)
def test_the_change_that_a_page_shows_makes_the_script_that_follows(page: Path) -> None:
    """Its own block, or the example that it links to, which other tests run."""
    kinds = {block.language: block.text for block in blocks(page)}
    after = kinds.get("python", "")
    for example in re.findall(r"\]\(\.\./\.\./(examples/\w+\.py)\)", page.read_text()):
        after += (ROOT / example).read_text()
    assert after
    kept = [line[1:].strip() for line in kinds.get("diff", "").splitlines() if line[:1] != "-"]
    assert [line for line in kept if line not in after] == []
