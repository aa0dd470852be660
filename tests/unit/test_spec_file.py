"""The page on the spec file has every word with its default, and every spec on a page is a good plan."""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from manyhands import models, spec
from manyhands.cli import build
from manyhands.cli.planned import check as refuse
from manyhands.cli.planned import note_on, planned
from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.data import DATASETS
from manyhands.errors import UsageError
from manyhands.job import learning_rate, optimizers
from manyhands.job import plan as plans
from manyhands.job.plan import Cluster, Plan, Train
from tests.pages import DOCS, PAGES, ROOT, Block, blocks, rows

PAGE = DOCS / "spec-file.md"
SPECS = [block for page in PAGES for block in blocks(page) if block.language == "toml"]
FILES = sorted((ROOT / "examples").glob("*.toml"))


def value(cell: str) -> Any:
    return None if cell == "none" else tomllib.loads(f"x = {cell.strip('`')}")["x"]


def table(heading: str) -> dict[str, Any]:
    return {row[0].strip("`"): value(row[1]) for row in rows(PAGE, heading)}


@pytest.mark.parametrize(("heading", "kind"), [("## [cluster]", Cluster), ("## [train]", Train)])
def test_every_word_is_there_with_its_default(heading: str, kind: type[msgspec.Struct]) -> None:
    assert table(heading) == msgspec.structs.asdict(kind())


def test_the_sections_that_name_something() -> None:
    plan = Plan()
    assert table("## Model, data, strategy, placement") == {
        "model": plan.model,
        "data": plan.data,
        "strategy": plan.strategy,
        "placement": plan.placement,
        "codec": plan.codec,
    }


def test_optimizers_are_those_of_the_code() -> None:
    text = " ".join(PAGE.read_text().partition("Optimizers: ")[2].split())
    assert set(re.findall(r"`(\w+)`", text.partition(", with")[0])) == set(optimizers.OPTIMIZERS)
    assert {learning_rate.BASE, *learning_rate.BASE_OF.values()} == set(re.findall(r"`(\w+:lr=[^`]+)`", text))
    assert set(learning_rate.BASE_OF) == set(
        re.findall(r"`(\w+)`", text.partition("momentum=0.9`; for")[2].partition(". Under")[0])
    )


def check(path: Path) -> Plan:
    plan = plans.read(path)
    plan.check()
    assert spec.split(plan.model)[0] in models.MODELS
    assert spec.split(plan.data)[0] in DATASETS
    return plan


@pytest.mark.parametrize("block", SPECS, ids=str)
def test_specs_on_pages_are_good_plans(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(block.text)
    check(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_specs_among_the_examples_are_good_plans(path: Path) -> None:
    check(path)


def test_one_line_instead_of_a_section_and_nothing_at_all(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text('model = "mlp:hidden=512-512"')
    line = plans.read(path)
    path.write_text('[model]\nname = "mlp"\nhidden = [512, 512]')
    assert plans.read(path) == line
    path.write_text("")
    assert plans.read(path) == Plan()


@pytest.mark.parametrize(("name", "text"), [("p.json", "{}"), ("empty.toml", "# nothing yet\n")])
def test_a_file_that_says_nothing_trains_the_default_job_and_that_is_said(
    name: str, text: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    options = build().parse_args(["train", str(path)])
    assert note_on(options) == f"note: {path} says nothing, so this is the default job, cnn on digits"
    path.write_text('{"model": "cnn"}' if path.suffix == ".json" else 'model = "cnn"')
    assert note_on(options) == ""


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        ("[train]\nepochs = 0", [], "{path}: epochs=0: it must be at least 1"),
        ("[train]\nepochs = 0", ["--epochs", "-1"], "--epochs -1: it must be at least 1"),
        ("[train]\nepochs = 3", ["--workers", "0"], "--workers 0: it must be at least 1"),
        ('[strategy]\nname = "local-sgd"\nperiod = -3', [], "{path}: period=-3: it must be at least 1"),
        ('[model]\nname = "nope"', [], "{path}: unknown model 'nope'"),
        ('[data]\nname = "nope"', ["--model", "mlp"], "{path}: unknown data 'nope'"),
        ('[data]\nname = "digits"', ["--optimizer", "nope"], "unknown optimizer 'nope'"),
    ],
)
def test_a_refusal_names_the_file_or_the_flag_that_is_wrong(
    text: str, flags: list[str], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(text)
    options = build().parse_args(["train", str(path), *flags])
    with pytest.raises(UsageError, match="^" + re.escape(said.format(path=path))):
        refuse(planned(options, RankInfo(rank=0, size=1, launcher="alone")), options)
