"""Public scripts as patches: what a port changes, under which ways it runs, and whether it is right.

python benchmarks/porting.py                          all of them, from the named commits of their repositories
python benchmarks/porting.py --sources FOLDER         from FOLDER/owner__name/path instead
python benchmarks/porting.py show mnist               what a port changes, as a diff; `show mnist ddp` the DDP form

The sources are not in this repository, nor a line of them. Data is tiny and made up; torchvision, matplotlib, requests
and tqdm are stand-ins of ours (`benchmarks/ported/stand_ins`), for the original as for its port.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import arguments, say, show, write
from line_edits import Changed, apply, blob_hash, count, readable
from ported_scripts import BY_NAME, DDP, OURS, PORTED, QUICK, SCRIPTS, Script
from porting_cells import (
    FAILED,
    LIMIT,
    REFUSED,
    RUNS,
    WAYS,
    Outcome,
    Way,
    difference,
    run_ddp,
    run_ported,
    run_reference,
)
from summaries import RAW, Findings, Measured

CACHE = RAW / "sources"
MOST_LINES = 12
DDP_FORM = "DDP form"
Sources = Mapping[str, bytes]
Results = dict[str, Any]


# The sources


def load(script: Script, folder: Path | None) -> dict[str, bytes]:
    """The files of a script by their paths, from a folder of repositories or from the repository itself."""
    found = {}
    for source in script.sources:
        if not script.repository:
            found[source.path] = (PORTED / "own" / script.own / source.path).read_bytes()
        elif folder:
            path = folder / script.repository.replace("/", "__") / source.path
            if not path.exists():
                sys.exit(f"there is no {path}; it is {source.path} of {script.repository} at {source.commit}")
            found[source.path] = path.read_bytes()
        else:
            found[source.path] = _fetched(script.repository, source.commit, source.path)
        if (has := blob_hash(found[source.path])) != source.blob:
            sys.exit(f"{source.path} of {script.repository} has the hash {has}; the port is of {source.blob}")
    return found


def _fetched(repository: str, commit: str, path: str) -> bytes:
    home = CACHE / repository.replace("/", "__")
    url = f"https://github.com/{repository}"

    def git(*words: str) -> bytes:
        return subprocess.run(["git", "-C", str(home), *words], capture_output=True, check=True).stdout

    home.mkdir(parents=True, exist_ok=True)
    try:
        git("init", "--quiet")
        try:
            return git("show", f"{commit}:{path}")
        except subprocess.CalledProcessError:
            git("fetch", "--quiet", "--depth", "1", url, commit)
            return git("show", f"{commit}:{path}")
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(
            f"cannot fetch {path} at {commit} from {url} ({error}); give a folder that has it: --sources FOLDER"
        )


# What is measured


def lines(script: Script) -> dict[str, Changed]:
    return {form: count(script.patch(form) or "") for form in (OURS, DDP)}


def measure(script: Script, sources: Sources, ways: Sequence[Way]) -> Results:
    """The DDP form, and the port under every way; the synchronous ones beside one process of plain PyTorch."""
    with TemporaryDirectory() as name:
        home = Path(name)
        references: dict[tuple[int, int], Path] = {}
        cells = {DDP_FORM: _timed(script, "its DDP form", lambda: run_ddp(script, sources, home / "ddp"))}
        for way in ways:
            cells[way.name] = _timed(
                script, way.name, lambda way=way: _cell(script, way, sources, home, references)
            )
    return {name: asdict(outcome) for name, outcome in cells.items()}


def _cell(
    script: Script, way: Way, sources: Sources, home: Path, references: dict[tuple[int, int], Path]
) -> Outcome:
    folder = home / way.name.replace(":", "-")
    if not way.times:
        return run_ported(script, way, sources, folder)
    state = home / f"{folder.name}-state"
    state.mkdir()
    outcome = run_ported(script, way, sources, folder, state)
    if outcome.kind != RUNS:
        return outcome
    key = (way.times, way.parts)
    if key not in references:
        references[key] = home / f"reference-{way.times}-{way.parts}-state"
        references[key].mkdir()
        plain = run_reference(
            script, way, sources, home / f"reference-{way.times}-{way.parts}", references[key]
        )
        if plain.kind != RUNS:
            raise SystemExit(f"{script.name} does not run in one process of plain PyTorch: {plain.says}")
    return Outcome(kind=RUNS, steps=outcome.steps, difference=difference(state, references[key]))


def _timed(script: Script, what: str, run: Callable[[], Outcome]) -> Outcome:
    began = time.monotonic()
    outcome = run()
    took = time.monotonic() - began
    say(f"{script.name}, {what}: {outcome.cell()} ({took:.0f} s) {outcome.says}")
    return Outcome(**{**asdict(outcome), "seconds": took})


# What was found


def findings(results: Mapping[str, Results]) -> Findings:
    """For each script what it changes and what became of it under each way; every sentence of a refusal once."""
    outcomes = {
        name: {way: Outcome(**each) for way, each in found.items()} for name, found in results.items()
    }
    cells = [each for found in outcomes.values() for way, each in found.items() if way != DDP_FORM]
    compared = [cell.difference for cell in cells if cell.difference is not None]
    changed = {name: lines(BY_NAME[name]) for name in results}
    return Findings(
        title="public scripts as patches, run by 2 workers",
        measured=[
            Measured(
                of=f"{name}, {BY_NAME[name].about}",
                unit="lines changed",
                values={"ours": [each[OURS].lines], "DDP": [each[DDP].lines]},
            )
            for name, each in changed.items()
        ],
        counts={
            "scripts": len(results),
            f"ports of at most {MOST_LINES} lines": sum(
                each[OURS].lines <= MOST_LINES for each in changed.values()
            ),
            "ways": len(cells),
            "run": sum(cell.kind == RUNS for cell in cells),
            "refused before the first step": sum(cell.kind == REFUSED for cell in cells),
            "failed": sum(cell.kind == FAILED for cell in cells),
            "compared with one process": len(compared),
            f"within {LIMIT:g}": sum(each <= LIMIT for each in compared),
        },
        texts=[
            {
                "script": f"{name} ({changed[name][OURS]})",
                **{way: outcome.cell() for way, outcome in found.items() if way != DDP_FORM},
            }
            for name, found in outcomes.items()
        ],
        notes=_notes(outcomes),
    )


def _notes(outcomes: Mapping[str, Mapping[str, Outcome]]) -> list[str]:
    """Why something was refused or failed, each reason once, and what is particular about the scripts."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for name, found in outcomes.items():
        for way, outcome in found.items():
            if outcome.says:
                places = reasons.setdefault(f"{outcome.kind}: {_of_any(outcome.says)}", {})
                places.setdefault(name, []).append(way)
    said = []
    for reason, places in reasons.items():
        where = [f"{name} under {', '.join(ways)}" for name, ways in places.items()]
        said.append(f"{'; '.join(where)}: {reason}")
    particular = [f"{name}: {BY_NAME[name].note}" for name in outcomes if BY_NAME[name].note]
    return said + ["; ".join(particular)] * bool(particular)


def _of_any(says: str) -> str:
    """A sentence without what only one script or way has in it."""
    says = re.sub(r"^\S+\.py, line \d+: ", "", says)
    says = re.sub(r"(no more than a part of) [^;]+", r"\1 a parameter", says)
    return re.sub(r"--placement \S+|\b(sharded|tensor|pipeline)(?= spreads it)", "the placement", says)


def main() -> None:
    if sys.argv[1:2] == ["show"]:
        show_port(sys.argv[2:])
        return
    parser = arguments("Public scripts as patches: how many lines a port changes, and what runs.", rounds=1)
    parser.add_argument(
        "--scripts", nargs="+", choices=BY_NAME, default=[script.name for script in SCRIPTS], metavar="SCRIPT"
    )
    parser.add_argument(
        "--sources", type=Path, metavar="FOLDER", help="has owner__name/path; else git fetches"
    )
    parser.add_argument("--add", action="store_true", help="to what the raw file has of other scripts")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="scripts at the same time")
    options = parser.parse_args()
    names = [QUICK.name] if options.quick else options.scripts
    ways = [way for way in WAYS if way.name in ("all-reduce", "sharded")] if options.quick else WAYS
    loaded = {name: load(BY_NAME[name], options.sources) for name in names}
    kept = (options.out or RAW / "porting.json") if options.add else None
    results: dict[str, Results] = json.loads(kept.read_text())["results"] if kept and kept.exists() else {}
    # Where the sources lie on this machine says nothing about the numbers.
    options.sources = None

    def one(name: str) -> None:
        results[name] = measure(BY_NAME[name], loaded[name], ways)
        done = {each: results[each] for each in BY_NAME if each in results}
        write(options, benchmark="porting", results=done, summaries={"porting": findings(done)})

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(one, names))
    results = {each: results[each] for each in BY_NAME if each in results}
    found = findings(results)
    show(found)
    for row in found.texts:
        print("  ".join(f"{key}: {text}" for key, text in row.items()))


def show_port(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="What a port changes.", prog="benchmarks/porting.py show")
    parser.add_argument("script", choices=BY_NAME, metavar="SCRIPT")
    parser.add_argument("form", choices=(OURS, DDP), nargs="?", default=OURS)
    parser.add_argument("--sources", type=Path, metavar="FOLDER")
    options = parser.parse_args(words)
    script = BY_NAME[options.script]
    source = load(script, options.sources)[script.changed.path]
    patched = apply(source, script.patch(options.form) or "", script.changed.blob)
    print(readable(source, patched, script.changed.path), end="")


if __name__ == "__main__":
    main()
