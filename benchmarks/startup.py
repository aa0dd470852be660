"""The time from the command to the end of the first step: `manyhands launch` beside `torchrun` with DDP.

python benchmarks/startup.py --out startup.json
"""

import statistics
import time

from common import RATIO_HEADER, arguments, interleave, ratio, table, write
from processes import Launcher, launch, run_launched, torchrun

TARGET = 1.2
OURS, DDP = "manyhands launch", "torchrun, DDP"


def seconds_to_first_step(contender: str, launcher: Launcher) -> float:
    start = time.monotonic()
    workers = run_launched(launcher, "train_worker.py", [contender, "--job", "small-mlp", "--steps", "1"])
    return float(max(worker["at"][1] for worker in workers)) - start


def main() -> None:
    parser = arguments("Time from command to first finished step, small MLP.")
    parser.add_argument("--workers", type=int, default=2, help="default 2")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    seconds = interleave(
        {
            OURS: lambda: seconds_to_first_step("ours", launch(options.workers)),
            DDP: lambda: seconds_to_first_step("ddp", torchrun(options.workers)),
        },
        options.rounds,
        "start",
    )
    found = ratio(f"{OURS} ÷ {DDP}", seconds[OURS], seconds[DDP], TARGET, at_most=True)
    rows = [
        [name, f"{statistics.median(each):.2f}", f"{min(each):.2f}–{max(each):.2f}"]
        for name, each in seconds.items()
    ]
    print(table("command to first step", ["seconds", "median", "per round"], rows))
    print(table("", RATIO_HEADER, [found.cells()]))
    write(options, benchmark="startup", results={"seconds": seconds, "ratios": [found.record()]})


if __name__ == "__main__":
    main()
