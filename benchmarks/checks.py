"""What looking at people's own code costs: at the start beside an earlier commit, and in every step by itself.

python benchmarks/checks.py --before 7e05b3b
.adapters/bin/python benchmarks/checks.py --before 7e05b3b     also with transformers imported

Whole steps beside those of an earlier commit are `benchmarks/training.py --before COMMIT --jobs small-mlp`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import arguments, interleave, say, show, write
from jobs import JOBS, Job, build, loss, make_batches
from processes import HERE
from summaries import Findings, Measured, ratio
from training import checkout

import manyhands as mh
from manyhands.engine import sample_count

CASES = {
    "plain": "SGD",
    "optimizer": "an optimizer that nothing is known of",
    "objects": "300,000 objects",
    "transformers": "transformers imported",
}
OURS, BEFORE = "this commit", "earlier commit"
MOST_AT_START_S, MOST_PER_STEP = 0.2, 0.01

_RUN = """
import json, sys
from processes import run_ours
from manyhands.cluster.launcher import cores
print(json.dumps(run_ours(sys.argv[1], sys.argv[2:], cores.layout(2, 1), survives=True)))
"""


def start(folder: Path, case: str, *, counted: bool = False) -> list[dict[str, Any]]:
    """What 2 workers of a checkout say of their start."""
    options = ["--case", case, *(["--counted"] if counted else [])]
    command = [sys.executable, "-c", _RUN, str(HERE / "checks_worker.py"), *options]
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        command, cwd=folder / "benchmarks", env=environ, stdout=subprocess.PIPE, text=True, check=True
    )
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def starts(options: argparse.Namespace, cases: list[str]) -> dict[str, Any]:
    with checkout(options.before) as folder:
        results: dict[str, Any] = {}
        for case in cases:
            turns: dict[str, Callable[[], Any]] = {
                OURS: partial(start, HERE.parent, case),
                BEFORE: partial(start, folder, case),
            }
            results[case] = interleave(turns, options.rounds, case)
            results[case]["counted"] = [start(HERE.parent, case, counted=True) for _ in range(options.rounds)]
        return results


def slowest(workers: list[dict[str, Any]]) -> float:
    return float(max(worker["session_s"] + worker["step_s"] for worker in workers))


def looked(workers: list[dict[str, Any]]) -> float:
    return float(max(sum(worker["spent"].values()) for worker in workers))


def findings_of_start(results: dict[str, Any]) -> Findings:
    measured, notes = [], []
    for case, found in results.items():
        values = {
            f"{OURS}: mh.session and the first step": [slowest(each) for each in found[OURS]],
            f"{BEFORE}: the same": [slowest(each) for each in found[BEFORE]],
            "the checks alone": [looked(each) for each in found["counted"]],
        }
        measured.append(Measured(of=CASES[case], unit="s", values=values))
        parts = sorted(found["counted"][0][0]["spent"].items(), key=lambda each: -each[1])
        text = ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in parts[:4])
        notes.append(f"{CASES[case]}, the longest checks of one worker: {text}.")
    ratios = [
        ratio(
            f"the checks alone ÷ {MOST_AT_START_S} s",
            line.values["the checks alone"],
            [MOST_AT_START_S] * len(line.values["the checks alone"]),
            1.0,
            at_most=True,
            of=line.of,
        )
        for line in measured
    ]
    title = "the start of 2 workers, small MLP, the first batch from a DataLoader of the script's own"
    return Findings(title=title, measured=measured, ratios=ratios, notes=notes)


# Every step


def checks_of(session: Any, batch: Any) -> dict[str, Callable[[], object]]:
    """What looks at the script in every step, after the first ones."""
    engine = session.engine
    script = engine.script
    return {
        "is_touched": script.is_touched,
        "refuse_moved": script.refuse_moved,
        "look": partial(script.look, is_early=False),
        "samples": partial(sample_count.count, engine, batch),
        "first_steps": lambda: engine.say_once(engine.first_steps.look(32)),
    }


def per_step(job: Job, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of one worker: of a step, and of each check."""
    session = mh.session(*build(job), loss)
    batch, *_ = make_batches(job, 32, rank=0)
    checks = checks_of(session, batch)
    for _ in range(3):
        session.step(batch)
    found: dict[str, list[float]] = {"step": [], **{name: [] for name in checks}}
    for _ in range(options.rounds):
        found["step"].append(_seconds(partial(session.step, batch), options.steps))
        for name, check in checks.items():
            found[name].append(_seconds(check, 100 * options.steps))
    session.close()
    return found


def _seconds(call: Callable[[], object], times: int) -> float:
    """Of a processor, for one call."""
    began_s = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - began_s) / times


def findings_of_steps(results: dict[str, dict[str, list[float]]]) -> Findings:
    measured, ratios = [], []
    for title, found in results.items():
        checks = [sum(each) for each in zip(*(found[name] for name in found if name != "step"), strict=True)]
        values = {f"{name}": [1e6 * each for each in seconds] for name, seconds in found.items()}
        measured.append(
            Measured(
                of=title, unit="processor µs", values={**values, "all checks": [1e6 * s for s in checks]}
            )
        )
        ratios.append(
            ratio("all checks ÷ step", checks, found["step"], MOST_PER_STEP, at_most=True, of=title)
        )
    return Findings(title="what every step looks at, 1 worker, batch 32", measured=measured, ratios=ratios)


def main() -> None:
    parser = arguments("What looking at people's own code costs.", rounds=11)
    parser.add_argument("--before", metavar="COMMIT", help="the start beside that of an earlier commit")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=["small-mlp", "resnet50"], metavar="JOB")
    parser.add_argument("--steps", type=int, default=20, help="per turn (default 20)")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.jobs = 1, 1, ["small-mlp"]
    torch.set_num_threads(1)
    os.environ.setdefault("LD_LIBRARY_PATH", str(Path(torch.__file__).parents[3]))
    steps = {JOBS[name].title: per_step(JOBS[name], options) for name in options.jobs}
    summaries = {"checks-steps": findings_of_steps(steps)}
    cases = [name for name in CASES if name != "transformers" or find_spec("transformers")]
    if len(cases) < len(CASES):
        say("transformers is not installed: that start is left out")
    began = starts(options, cases[:1] if options.quick else cases)
    summaries["checks-start"] = findings_of_start(began)
    for found in summaries.values():
        show(found)
    write(options, benchmark="checks", results={"steps": steps, "starts": began}, summaries=summaries)


if __name__ == "__main__":
    main()
