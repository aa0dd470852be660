"""How long a save stops training: ours beside a copy of the state into memory, and beside `torch.save`.

python benchmarks/saving.py

All three are made in turns by the same two workers, which train in between. A save of ours is written by another
process meanwhile; how long the steps take then is told as well.
"""

import statistics
from typing import Any

from common import arguments, say, show, write
from jobs import JOBS, Job
from processes import run_ours
from summaries import Findings, Measured, Ratio, ratio

from manyhands.cluster.launcher import cores

WORKERS = 2
TITLES = {
    "stopped_s": "a save of ours stops training",
    "copy_s": "a copy of the state into memory",
    "plain_s": "torch.save, and the disk",
    "step_s": "a step",
    "meanwhile_s": "a step while a checkpoint is written",
}


def main() -> None:
    parser = arguments("How long a save stops training.")
    parser.add_argument("--job", choices=JOBS, default="alexnet")
    parser.add_argument("--steps", type=int, default=4, help="between two saves (default 4)")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.job, options.steps = 1, "small-mlp", 2
    say(f"{JOBS[options.job].title}: {options.rounds} saves in one run")
    settings = ["--job", options.job, "--saves", str(options.rounds), "--steps", str(options.steps)]
    workers: list[dict[str, Any]] = run_ours("saving_worker.py", settings, cores.layout(WORKERS, 1))
    # Training stands still until the last worker goes on.
    seconds = {
        name: [max(values) for values in zip(*(each[name] for each in workers if each[name]), strict=True)]
        for name in TITLES
    }
    found = findings(JOBS[options.job], workers[0]["state_bytes"], seconds)
    show(found)
    results = {
        "seconds": seconds,
        "state_bytes": workers[0]["state_bytes"],
        "ratios": [line.record() for line in found.ratios],
    }
    write(options, benchmark="saving", results=results, summaries={f"saving-{options.job}": found})


def findings(job: Job, state_bytes: int, seconds: dict[str, list[float]]) -> Findings:
    title = f"{job.title}, {state_bytes / 1e6:.0f} MB of state"

    def per_save(name: str) -> list[float]:
        """One number for each save: of the steps beside it, their median."""
        each, saves = seconds[name], len(seconds["stopped_s"])
        size = len(each) // saves
        return [statistics.median(each[number * size : (number + 1) * size]) for number in range(saves)]

    def over(mine: str, other: str, target: float | None = None) -> Ratio:
        name = f"{TITLES[mine]} ÷ {TITLES[other]}"
        return ratio(name, per_save(mine), per_save(other), target, at_most=True)

    return Findings(
        title=title,
        measured=[
            Measured(of=title, unit="s", values={TITLES[name]: each for name, each in seconds.items()})
        ],
        ratios=[
            over("stopped_s", "copy_s", 1.0),
            over("stopped_s", "plain_s"),
            over("meanwhile_s", "step_s"),
        ],
    )


if __name__ == "__main__":
    main()
