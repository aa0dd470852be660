"""What the site has beside docs/: README as its first page, other pages, examples and summaries that pages link to.

A link in a page leads to a file of the repository; here it leads to the page of the site that shows this file.
"""

import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.structure.toc import AnchorLink

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(\))")

# Files of the repository, and the pages that show them.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
SHOWN = ("examples/*.py", "examples/*.toml", "examples/*.ipynb", "manyhands/data/digits.md", "LICENSE")
COPIED = ("benchmarks/results/*.json",)
FOLDERS = {"benchmarks/results": "benchmarks.md"}

# A member of a class, in the HTML of the Python page: its heading names the class, or the variable of all examples.
MEMBER = re.compile(
    r'(id="[\w.]+\.([A-Z]\w*)\.(\w+)" class="doc doc-heading">\s*<span class="doc doc-object-name doc-\w+-name">)\3<'
)
VARIABLES = {"Session": "session"}

# Pages that are their section's only one: a menu beside them would have one line.
ALONE = {"index.md", "tutorial.md"}

STYLE = "assets/site.css"

# What lets the search work from the disk; the plugin `offline` would have the reader's browser fetch it.
SHIM = "assets/iframe-worker.js"


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for path in _found(SHOWN):
        language = {".py": "python", ".toml": "toml", ".ipynb": "json"}.get(path.suffix, "text")
        text = path.read_text()
        content = text if path.suffix == ".md" else f"# {path.name}\n\n```{language}\n{text}\n```\n"
        page = File.generated(config, _page(path), content=content)
        page.inclusion = page.inclusion.NOT_IN_NAV
        files.append(page)
    for path in _found(COPIED):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    files.append(File.generated(config, STYLE, abs_src_path=str(ROOT / "docs/.site/site.css")))
    files.append(File.generated(config, SHIM, abs_src_path=str(ROOT / "docs/.site/iframe-worker/shim.js")))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    here = page.file.src_uri
    if here in ALONE:
        page.meta["hide"] = ["navigation"]
    origin = next((source for source, name in PAGES.items() if name == here), f"docs/{here}")

    def site_link(match: re.Match[str]) -> str:
        before, target, anchor, after = match.groups(default="")
        if not target or "://" in target:
            return match[0]
        found = _on_site(posixpath.normpath(posixpath.join(posixpath.dirname(origin), target)))
        return f"{before}{posixpath.relpath(found, posixpath.dirname(here) or '.')}{anchor}{after}"

    return LINK.sub(site_link, markdown)


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    for entry in _entries(page.toc):
        *_, owner, name = ["", *entry.id.split(".")]
        if owner[:1].isupper() and entry.title == name:
            entry.title = _member(owner, name)
    return MEMBER.sub(lambda match: f"{match[1]}{_member(match[2], match[3])}<", html)


def _member(owner: str, name: str) -> str:
    """`session.step`, `History.add`."""
    return f"{VARIABLES.get(owner, owner)}.{name}"


def _entries(toc: Iterable[AnchorLink]) -> Iterator[AnchorLink]:
    """All lines of a page's table of contents."""
    for entry in toc:
        yield entry
        yield from _entries(entry.children)


def _on_site(path: str) -> str:
    """Where the site has a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path in FOLDERS:
        return FOLDERS[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return _page(ROOT / path) if ROOT / path in _found(SHOWN) else path


def _page(path: Path) -> str:
    return f"{path.relative_to(ROOT)}".removesuffix(".md") + ".md"


def _found(patterns: tuple[str, ...]) -> list[Path]:
    return [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
