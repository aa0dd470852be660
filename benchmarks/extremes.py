"""Where a step is unlike most: 5,000 tiny parameters, a model of 1.5 GB, 16 workers on 2 cores, beside plain PyTorch.

python benchmarks/extremes.py
"""

from collections.abc import Mapping
from typing import Any

from common import arguments, show, write
from jobs import EXTREMES
from processes import loopback, run_each, run_ours
from summaries import Findings, Measured, Ratio, ratio
from training import BATCH, samples_per_second
from turns import Start, Turn, in_turns

from manyhands.cluster.launcher import cores
from manyhands.cluster.launcher.cores import CoreLayout

SCRIPT = "train_worker.py"
PLAIN, ALONE = "plain PyTorch, 2 threads", "plain PyTorch, 1 thread"


def ours(job: str, layout: CoreLayout) -> tuple[Start, int]:
    def start(more: list[str]) -> object:
        survives = len(layout.cores) > 1
        return run_ours(SCRIPT, ["ours", "--job", job, *more], layout, survives=survives)

    return start, len(layout.cores)


def plain(job: str, layout: CoreLayout, batch: int) -> tuple[Start, int]:
    def start(more: list[str]) -> object:
        words = ["plain", "--job", job, "--batch", str(batch), *more]
        return run_each(SCRIPT, words, layout, loopback())

    return start, len(layout.cores)


def contenders(job: str, workers: int) -> dict[str, tuple[Start, int]]:
    """Ours beside one process that makes the same batches with all cores; a small model also with one."""
    found = {
        f"ours, {workers} workers": ours(job, cores.layout(workers, 1)),
        PLAIN: plain(job, cores.layout(1, 2), workers * BATCH),
    }
    if job == "many-small":
        found |= {
            "ours, 1 worker": ours(job, cores.layout(1, 1)),
            ALONE: plain(job, cores.layout(1, 1), BATCH),
        }
    return found


CASES = {"many-small": 2, "large": 2, "small-mlp": 16}  # how many workers each has


def main() -> None:
    parser = arguments("Ours beside plain PyTorch where a step is unlike most.", rounds=7)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=4, help="timed steps per turn (default 4)")
    options = parser.parse_args()
    cases = options.cases
    if options.quick:
        options.rounds, options.steps, cases = 1, 2, ["small-mlp"]
    raw = {
        name: in_turns(
            contenders(name, CASES[name]), name, rounds=options.rounds, steps=options.steps, warm_up=2
        )
        for name in cases
    }
    found = findings(raw)
    show(found)
    results: dict[str, Any] = {"turns": raw, "ratios": [line.record() for line in found.ratios]}
    write(options, benchmark="extremes", results=results, summaries={"extremes": found})


def findings(raw: Mapping[str, dict[str, list[Turn]]]) -> Findings:
    measured: list[Measured] = []
    ratios: list[Ratio] = []
    for name, turns in raw.items():
        of = f"{EXTREMES[name].title}, {CASES[name]} workers"
        rates = {who: [samples_per_second(turn) for turn in each] for who, each in turns.items()}
        step_s = {who: [1e3 * _step_s(turn) for turn in each] for who, each in turns.items()}
        measured += [
            Measured(of=of, unit="samples/s", values=rates),
            Measured(of=of, unit="ms per step", values=step_s),
        ]
        mine = f"ours, {CASES[name]} workers"
        ratios.append(ratio(f"{mine} ÷ {PLAIN}", rates[mine], rates[PLAIN], of=of))
        if ALONE in rates:
            ratios.append(ratio(f"ours, 1 worker ÷ {ALONE}", rates["ours, 1 worker"], rates[ALONE], of=of))
    return Findings(title="unusual sizes beside plain PyTorch", measured=measured, ratios=ratios)


def _step_s(turn: Turn) -> float:
    """The mean over the steps of the slowest worker of each."""
    slowest = [max(each) for each in zip(*(worker["step_s"] for worker in turn), strict=True)]
    return sum(slowest) / len(slowest)


if __name__ == "__main__":
    main()
