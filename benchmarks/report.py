"""docs/benchmarks.md, README's table and its picture, made from the summaries in benchmarks/results: `make numbers`.

python -m benchmarks.report            write them
python -m benchmarks.report --check    end with an error if one of them is not what the summaries give
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims import CLAIMS, DDP, FAMILIES, FASTER
from benchmarks.picture import Bar, draw

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURE = ROOT / "docs" / "images" / "speed.svg"
BEGIN, END = "<!-- numbers: made by `make numbers` -->", "<!-- end of numbers -->"
COLUMNS = 100
SPREAD = "median, lowest, highest, rounds"
SAME = "the same"  # command, as in the row above

Summary = dict[str, Any]


_INTRODUCTION = """# Benchmarks

`make numbers` makes this page and README's table from the summaries in
[`benchmarks/results`](../benchmarks/results); a test compares them. `make bench` measures
everything again and writes the summaries. Raw runs go to `benchmarks/raw`, which git ignores.

A ratio is taken in each round, in which all contenders have their turn. The tables give the median
of the rounds' ratios, and in brackets the lowest and the highest. A summary also has every round's
ratio and the settings. The machine shares its processors with others, so its speed changes from
minute to minute and the ranges are wide.
"""


def load(folder: Path = RESULTS) -> dict[str, Summary]:
    return {
        path.stem: json.loads(path.read_text())
        for path in sorted(folder.glob("*.json"), key=lambda path: path.stem)
    }


# README's table


def claims(summaries: dict[str, Summary]) -> str:
    """The table, without what surrounds it."""
    rows: list[list[str]] = []
    before = ""
    for claim in CLAIMS:
        summary = summaries[claim.summary]
        found = find(summary, claim.ratio, claim.of)
        number = f"**{_spread(found['median'], found['low'], found['high'])}**"
        result = claim.result.format(number, **_went_on(summary))
        link = f"[{result}](benchmarks/results/{claim.summary}.json)"
        command = summary["command"]
        rows.append([claim.says, claim.against, link, SAME if command == before else f"`{command}`"])
        before = command
    return table(["claim", "against", "result: median round (range)", "command"], rows)


def picture(summaries: dict[str, Summary]) -> str:
    """README's picture: the claims on training beside DDP."""
    bars = []
    for claim in CLAIMS:
        if claim.ratio == FASTER:
            found = find(summaries[claim.summary], claim.ratio, claim.of)
            name = claim.says.partition(", ")[2].removesuffix(", 2 workers")
            bars.append(Bar(name=name, median=found["median"], low=found["low"], high=found["high"]))
    return draw(f"Samples per second of 2 workers ÷ {DDP}: median round and range", "equal to DDP", bars)


def find(summary: Summary, ratio: str, of: str | None = None) -> dict[str, Any]:
    """The one ratio of that name."""
    found = [line for line in summary["ratios"] if line["ratio"] == ratio and of in (None, line["of"])]
    if len(found) != 1:
        raise SystemExit(f"{summary['benchmark']} has {len(found)} ratios {ratio!r} of {of!r}; want one")
    return dict(found[0])


def _went_on(summary: Summary) -> dict[str, str]:
    counts = [each for each in summary.get("counts", {}).values() if isinstance(each, dict)]
    names = ("ours_on", "theirs_on")
    return {name: f"{each['went on']} of {each['runs']}" for name, each in zip(names, counts, strict=False)}


def readme(text: str, summaries: dict[str, Summary]) -> str:
    """README with its table made anew."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"README needs one {BEGIN} and one {END}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{claims(summaries)}{END}{rest.split(END)[1]}"


# The page


def page(summaries: dict[str, Summary]) -> str:
    ordered = {
        prefix: [summary for name, summary in summaries.items() if family(name) == prefix]
        for prefix in FAMILIES
    }
    machines = list(dict.fromkeys(machine(summary) for summary in summaries.values()))
    named = {text: f"machine {number}" for number, text in enumerate(machines, 1)}
    parts = [_INTRODUCTION, "".join(fill(f"* {name}: {text}", "  ") for text, name in named.items())]
    parts += ["## At a glance\n", overview([each for members in ordered.values() for each in members])]
    for prefix, members in ordered.items():
        heading, about = FAMILIES[prefix]
        if members:
            sections = [section(summary, named[machine(summary)], members) for summary in members]
            parts += [f"## {heading}\n", fill(about), *sections]
    return "\n".join(parts)


def overview(summaries: Sequence[Summary]) -> str:
    """One ratio of each summary that has any: the first with a target, missed or not, else the first."""
    rows = []
    for summary in summaries:
        lines = sorted(summary.get("ratios", []), key=lambda line: "target" not in line)
        for line in lines[:1]:
            name = f"{line['of']}: {line['ratio']}" if line["of"] else line["ratio"]
            link = f"[{summary['benchmark']}](#{summary['benchmark']})"
            rows.append([link, name, _ratio_cell(line), str(len(line["rounds"])), _target(line)])
    return table(["summary", "one of its ratios", "median round (range)", "rounds", "target"], rows)


def machine(summary: Summary) -> str:
    known = dict(summary["machine"])
    rest = [f"{key} {known[key]}" for key in known if key not in ("processor", "cores", "load", "stolen")]
    return f"{known['processor']}, {known['cores']} cores, {', '.join(rest)}"


def family(name: str) -> str:
    fitting = [prefix for prefix in FAMILIES if name == prefix or name.startswith(f"{prefix}-")]
    if not fitting:
        raise SystemExit(f"no family for the summary {name}: add it to FAMILIES in benchmarks/claims.py")
    return max(fitting, key=len)


def section(summary: Summary, on: str, members: Sequence[Summary] = ()) -> str:
    """A summary; a command that has made several of its family is written at the first of them."""
    name, command = summary["benchmark"], summary["command"]
    first = next((each["benchmark"] for each in members if each["command"] == command), name)
    parts = [
        f"### {name}\n",
        fill(f"{summary['title']} ([summary](../benchmarks/results/{name}.json))."),
        f"`{command}`\n" if first == name else f"The command of [{first}](#{first}).\n",
        fill(_origin(summary, on)),
        *(fill(note) for note in summary.get("notes", [])),
        *_counted(summary),
    ]
    if texts := summary.get("texts"):
        parts.append(table(list(texts[0]), [list(row.values()) for row in texts]))
    if summary.get("ratios"):
        parts.append(_ratios(summary["ratios"]))
    for unit in dict.fromkeys(line["unit"] for line in summary["measured"]):
        parts.append(_measured(unit, [line for line in summary["measured"] if line["unit"] == unit]))
    return "\n".join(parts)


def _origin(summary: Summary, on: str) -> str:
    commit, load, stolen = summary["commit"], *(summary["machine"][key] for key in ("load", "stolen"))
    taken = stolen if isinstance(stolen, str) else f"{stolen:.1%}"
    return (
        f"Commit `{commit['hash']}` ({commit['is']}), {summary['time']}, {on}, load {load}, "
        f"time taken by other machines {taken}."
    )


def _counted(summary: Summary) -> list[str]:
    lines = []
    for name, value in summary.get("counts", {}).items():
        text = (
            ", ".join(f"{key}: {count}" for key, count in value.items()) if isinstance(value, dict) else value
        )
        lines.append(f"* {name}: {text}\n")
    return ["".join(lines)] if lines else []


def _measured(unit: str, lines: list[dict[str, Any]]) -> str:
    """Contenders in rows, or in columns where several things were measured."""
    if len(lines) == 1:
        rows = [[name, *_numbers(each)] for name, each in lines[0][SPREAD].items()]
        return table([f"{lines[0]['of']}: {unit}", "median", "range", "rounds"], rows)
    names = list(dict.fromkeys(name for line in lines for name in line[SPREAD]))
    rows = [
        [line["of"], *(_cell(line[SPREAD][name]) if name in line[SPREAD] else "" for name in names)]
        for line in lines
    ]
    return table([unit, *names], rows)


def _numbers(each: Sequence[float]) -> list[str]:
    median, low, high, rounds = each
    return [f"{median:.4g}", "" if rounds == 1 else f"{low:.4g}–{high:.4g}", f"{rounds:g}"]


def _cell(each: Sequence[float]) -> str:
    median, spread, _ = _numbers(each)
    return f"{median} ({spread})" if spread else median


def _ratios(lines: list[dict[str, Any]]) -> str:
    """What was measured in rows and ratios in columns, where all have the same ratios; else one row each."""
    measured = list(dict.fromkeys(line["of"] for line in lines))
    names = {of: [line["ratio"] for line in lines if line["of"] == of] for of in measured}
    if len(measured) > 1 and all(each == names[measured[0]] for each in names.values()):
        by_name = {(line["of"], line["ratio"]): line for line in lines}
        rows = [[of, *(_ratio_cell(by_name[of, name]) for name in names[measured[0]])] for of in measured]
        return table(["ratio: median round (range)", *names[measured[0]]], rows)
    rows = [
        [
            f"{line['of']}: {line['ratio']}" if len(measured) > 1 else line["ratio"],
            _ratio_cell(line),
            str(len(line["rounds"])),
            _target(line),
        ]
        for line in lines
    ]
    return table(["ratio", "median round (range)", "rounds", "target"], rows)


def _target(line: dict[str, Any]) -> str:
    return f"{line['target']}, {'reached' if line['reached'] else 'missed'}" if "target" in line else ""


def _ratio_cell(line: dict[str, Any]) -> str:
    if len(line["rounds"]) == 1:
        return _ratio(line["median"])
    return _spread(line["median"], line["low"], line["high"])


# Text


def _ratio(value: float) -> str:
    return f"{value:.0f}" if value >= 20 else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def _spread(median: float, low: float, high: float) -> str:
    return f"{_ratio(median)} ({_ratio(low)}–{_ratio(high)})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(header), ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def fill(text: str, indent: str = "") -> str:
    """Lines of at most so many columns; all but the first are indented."""
    lines = textwrap.wrap(
        text, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines) + "\n"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Make docs/benchmarks.md, README's table and its picture from summaries."
    )
    parser.add_argument("--check", action="store_true", help="change nothing; fail where something differs")
    options = parser.parse_args(words)
    summaries = load()
    made = {
        PAGE: page(summaries),
        README: readme(README.read_text(), summaries),
        PICTURE: picture(summaries),
    }
    for path, text in made.items():
        if path.exists() and path.read_text() == text:
            continue
        if options.check:
            sys.exit(f"{path.relative_to(ROOT)} is not what the summaries give; use: make numbers")
        path.write_text(text)
        print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
