"""What the pages say is true: blocks run or parse, names are those of the tables, links lead somewhere."""

import doctest
import re
import shlex
import sys
from pathlib import Path

import pytest

from manyhands import cli, placement, spec, strategies
from manyhands.cluster.launchers import slurm
from manyhands.comm.collectives import TOPOLOGIES
from manyhands.data import DATASETS
from manyhands.job.plan import AUTO
from manyhands.models import MODELS
from tests.end_to_end.commands import run
from tests.pages import DOCS, PAGES, README, ROOT, Block, blocks, rows

BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = [
    (block, line) for block in BLOCKS if block.language == "sh" for line in block.text.splitlines() if line
]

# What need not run: drawings, and changes to files (the page on adding a strategy has a test of its own).
SHOWN = {"text", "diff"}

# `manyhands` after these is a worker of their world.
LAUNCHERS = {"torchrun", "mpirun"}


def described(value: object) -> str:
    return str(value).strip()


@pytest.mark.parametrize("block", BLOCKS, ids=described)
def test_every_block_is_of_a_known_kind(block: Block) -> None:
    # Blocks of toml are read by test_spec_file.py.
    assert block.language in {"python", "sh", "toml"} | SHOWN


@pytest.mark.processes
@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=described)
def test_python_blocks_run(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(block.text)
    done = run([sys.executable, str(script)], tmp_path)
    assert done.code == 0, done.err
    if block.page == README:
        accuracy = float(done.out.rpartition("'accuracy': ")[2].strip(" }\n"))
        assert accuracy > 0.9


@pytest.mark.parametrize(("block", "line"), COMMANDS, ids=described)
def test_commands_are_understood(block: Block, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
        return
    if words[0] == ".venv/bin/pre-commit":
        assert (ROOT / ".pre-commit-config.yaml").exists()
        return
    if words[0] in LAUNCHERS:
        words = words[words.index("manyhands") :]
    assert words[0] == "manyhands", f"{block}: what kind of command is {line!r}?"
    options = cli.build().parse_args(words[1:])
    if options.verb == "list":
        assert cli.main(words[1:]) == 0
        assert capsys.readouterr().out
    elif options.verb == "launch":
        module = options.module and options.module[0].replace(".", "/") + ".py"
        assert options.join or (ROOT / (module or options.script)).exists()
        strategies.parse(options.strategy)
    elif options.verb == "train":
        assert options.spec is None or (ROOT / options.spec).exists()
        assert options.strategy in (None, AUTO) or strategies.parse(options.strategy)
        workers = 2 if options.workers in (None, AUTO) else options.workers[0]
        placement.parse(options.placement or placement.DEFAULT).mesh(workers)
        assert options.model is None or spec.split(options.model)[0] in MODELS
        assert options.data is None or spec.split(options.data)[0] in DATASETS


def named(page: Path, heading: str) -> set[str]:
    """What the first column of a page's first table under a heading names."""
    return {name for row in rows(page, heading) for name in re.findall(r"`([^`]+)`", row[0])}


OWN = "package.module:callable"


def test_the_page_on_strategies_names_every_topology() -> None:
    """Every strategy and placement: test_strategy_pages.py and test_placement_pages.py."""
    text = (DOCS / "strategies" / "README.md").read_text()
    assert {f"`{name}`" for name in TOPOLOGIES} <= set(re.findall(r"`[^`]+`", text))


def test_a_page_names_every_model() -> None:
    assert named(DOCS / "models.md", "# Models") == {*MODELS, OWN}


def test_a_page_names_all_data() -> None:
    found = named(DOCS / "data.md", "# Data")
    assert {spec.split(text)[0] for text in found - {OWN}} == set(DATASETS)
    assert OWN in found


def test_a_page_names_every_command() -> None:
    known = next(action.choices for action in cli.build()._actions if action.dest == "verb")
    assert known
    assert named(DOCS / "commands.md", "# Commands") == {f"manyhands {verb}" for verb in known}


def test_the_readme_leads_to_every_page() -> None:
    """Directly, or by the page that lists a folder."""
    targets = re.findall(r"\]\(([^)\s#]+)", README.read_text())
    linked = {(README.parent / target).resolve() for target in targets if not target.startswith("https://")}
    assert {page for page in PAGES if page.parent == DOCS} <= linked
    assert DOCS / "strategies" / "README.md" in linked


def test_the_site_has_every_page_in_its_menu() -> None:
    menu = set(re.findall(r"[\w/.-]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {str(page.relative_to(DOCS)) for page in PAGES if DOCS in page.parents} <= menu


def test_the_first_result_is_on_the_first_screen() -> None:
    head = README.read_text().splitlines()[:24]
    assert [line for line in head if line.startswith("make ")] == ["make train", "make test"]
    assert any(line.startswith("![") for line in head), "the picture"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith("https://"):
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("module", [spec, slurm], ids=lambda module: module.__name__)
def test_docstring_examples_run(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted
    assert not result.failed
