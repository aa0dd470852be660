"""Numbers on pages come from stored summaries, and from nowhere else."""

import copy
import json
import re
import statistics
import subprocess
from pathlib import Path

import pytest

from benchmarks import report, summaries
from tests.pages import README, ROOT

STORED = sorted(report.RESULTS.glob("*.json"))
KEYS = {"benchmark", "title", "command", "commit", "time", "machine", "settings", "measured"}
MACHINE = {"processor", "cores", "memory", "kernel", "python", "torch", "load", "stolen"}
MOST_CLAIMS = 10


def stored(path: Path) -> report.Summary:
    found: report.Summary = json.loads(path.read_text())
    return found


def claimed() -> list[list[str]]:
    """The cells of README's table."""
    inside = README.read_text().partition(report.BEGIN)[2].partition(report.END)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in inside.split("\n")[3:] if line]


def test_the_page_is_what_the_summaries_give() -> None:
    assert report.PAGE.read_text() == report.page(report.load()), "use: make numbers"


def test_the_readme_is_what_the_summaries_give() -> None:
    text = README.read_text()
    assert text == report.readme(text, report.load()), "use: make numbers"


def test_the_picture_is_what_the_summaries_give() -> None:
    assert report.PICTURE.read_text() == report.picture(report.load()), "use: make numbers"


def test_another_number_makes_other_pages() -> None:
    """The comparisons above can fail."""
    found = report.load()
    other = copy.deepcopy(found)
    claim = report.CLAIMS[0]
    for line in other[claim.summary]["ratios"]:
        line["median"] += 1
    assert report.claims(other) != report.claims(found)
    assert report.page(other) != report.page(found)
    assert report.picture(other) != report.picture(found)


def test_every_claim_has_its_number_its_command_and_its_summary() -> None:
    table = claimed()
    assert len(table) == len(report.CLAIMS) <= MOST_CLAIMS
    before = ""
    for says, against, result, command in table:
        assert says
        assert against
        number = re.search(r"\*\*([\d.]+) \(([\d.]+)–([\d.]+)\)\*\*", result)
        link = re.search(r"\]\((benchmarks/results/[\w-]+\.json)\)", result)
        assert number
        assert link
        summary = stored(ROOT / link[1])
        assert command == (report.SAME if summary["command"] == before else f"`{summary['command']}`")
        before = summary["command"]
        digits = len(number[1].partition(".")[2])
        shown = [
            tuple(f"{value(line['rounds']):.{digits}f}" for value in (statistics.median, min, max))
            for line in summary["ratios"]
        ]
        assert number.groups() in shown, "a ratio of that summary, by its rounds"


def test_a_command_of_several_summaries_is_written_once() -> None:
    found = report.load()
    text, table = report.page(found), report.claims(found)
    commands = {name: summary["command"] for name, summary in found.items()}
    repeated = {command for command in commands.values() if list(commands.values()).count(command) > 1}
    assert repeated
    for name, command in commands.items():
        families = {report.family(other) for other in commands if commands[other] == command}
        assert text.count(f"\n`{command}`\n") == len(families), name
        assert table.count(f"`{command}`") <= 1


def test_the_readme_has_no_measured_number_outside_its_table() -> None:
    before, _, rest = README.read_text().partition(report.BEGIN)
    prose = re.sub(
        r"^```.*?^```$", "", before + rest.partition(report.END)[2], flags=re.MULTILINE | re.DOTALL
    )
    assert not re.findall(r"(?<!Python )\b\d+\.\d\d|\d+ (?:ms|µs|%)", prose)


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_summary_is_small_complete_and_agrees_with_its_rounds(path: Path) -> None:
    text = path.read_text()
    summary = stored(path)
    assert text.count("\n") <= summaries.MOST_LINES
    assert text == summaries.encode(summary), "the form in which benchmarks write it"
    assert summary.keys() >= KEYS
    assert summary["machine"].keys() >= MACHINE
    assert summary["benchmark"] == path.stem
    program, script, *_ = summary["command"].split()
    assert program == "python"
    assert (ROOT / script).exists()
    for line in summary.get("ratios", []):
        rounds = line["rounds"]
        # Four digits were kept of each, so the median of an even number may be off in the last.
        assert line["median"] == pytest.approx(statistics.median(rounds), rel=1e-3)
        assert (line["low"], line["high"]) == (min(rounds), max(rounds))


@pytest.mark.processes
def test_raw_runs_stay_out_of_the_tree() -> None:
    asked = subprocess.run(
        ["git", "check-ignore", "-q", "benchmarks/raw/training.json"], cwd=ROOT, check=False
    )
    assert asked.returncode == 0


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    """Not the ratio of the medians, which is 1.0 here."""
    found = summaries.ratio("ours ÷ theirs", [1.0, 2.0, 9.0], [2.0, 1.0, 3.0], 2.5, of="sums")
    assert (found.median, found.low, found.high) == (2.0, 0.5, 3.0)
    assert found.rounds == (0.5, 2.0, 3.0)
    assert found.reached is False


def test_a_summary_of_too_many_lines_is_refused() -> None:
    with pytest.raises(ValueError, match="the summary big has 65 lines; 60 are allowed"):
        summaries.encode({"benchmark": "big", "ratios": [{}] * 60})


def test_a_summary_without_a_family_is_refused() -> None:
    with pytest.raises(SystemExit, match="no family for the summary surprise"):
        report.family("surprise")


def test_a_claim_whose_ratio_is_gone_is_refused() -> None:
    claim = report.CLAIMS[0]
    found = report.load()
    found[claim.summary]["ratios"] = []
    with pytest.raises(SystemExit, match=f"{claim.summary} has 0 ratios"):
        report.claims(found)
