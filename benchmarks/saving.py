"""How long a save stops training: ours beside a copy of the state into memory, and beside `torch.save`.

python benchmarks/saving.py --out saving.json

All three are made in turns by the same two workers, which train in between. A save of ours is written by another
process meanwhile; how long the steps take then is told as well.
"""

import statistics
from typing import Any

from common import RATIO_HEADER, arguments, ratio, say, table, write
from jobs import JOBS
from processes import run_ours

from manyhands.cluster import cores

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
    rows = [
        [TITLES[name], f"{statistics.median(each):.3f}", f"{min(each):.3f}–{max(each):.3f}"]
        for name, each in seconds.items()
    ]
    size_mb = workers[0]["state_bytes"] / 1e6
    print(
        table(f"{JOBS[options.job].title}, {size_mb:.0f} MB of state", ["seconds", "median", "spread"], rows)
    )
    found = [
        ratio(
            f"{TITLES['stopped_s']} ÷ {TITLES['copy_s']}",
            seconds["stopped_s"],
            seconds["copy_s"],
            1.0,
            at_most=True,
        ),
        ratio(f"{TITLES['stopped_s']} ÷ {TITLES['plain_s']}", seconds["stopped_s"], seconds["plain_s"]),
    ]
    print(table("", RATIO_HEADER, [line.cells() for line in found]))
    write(
        options, benchmark="saving", results={"seconds": seconds, "ratios": [line.record() for line in found]}
    )


if __name__ == "__main__":
    main()
