"""The time from the command to the end of the first step: `manyhands launch` beside `torchrun` with DDP.

python benchmarks/startup.py
"""

import time

from common import arguments, interleave, show, write
from processes import Launcher, launch, run_launched, torchrun
from summaries import Findings, Measured, ratio

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
    found = findings(seconds)
    show(found)
    results = {"seconds": seconds, "ratios": [line.record() for line in found.ratios]}
    write(options, benchmark="startup", results=results, summaries={"startup": found})


def findings(seconds: dict[str, list[float]]) -> Findings:
    title = "from the command to the end of the first step"
    return Findings(
        title=title,
        measured=[Measured(of=title, unit="s", values=seconds)],
        ratios=[ratio(f"{OURS} ÷ {DDP}", seconds[OURS], seconds[DDP], TARGET, at_most=True)],
    )


if __name__ == "__main__":
    main()
