"""The sum of a float32 vector over the processes of one machine: ours, Gloo and MPICH in turns.

Ours twice: with vectors where replicas have theirs (in the host's memory, from `comm.vector`), and in ordinary memory.

python benchmarks/collectives.py
python benchmarks/collectives.py --processes 2 --sizes 4kB 25MB
"""

from collections.abc import Callable
from typing import Any

from common import arguments, interleave, say, show, write
from processes import loopback, mpiexec, run_each, run_launched, run_ours
from summaries import Findings, Measured, ratio

from manyhands.cluster.launcher import cores

SIZES = {
    "4kB": 4_000,
    "64kB": 64_000,
    "256kB": 256_000,
    "1MB": 1_000_000,
    "4MB": 4_000_000,
    "25MB": 25_000_000,
    "100MB": 100_000_000,
    "233MB": 233_000_000,
}
OVER_GLOO = {2: 4.0, 4: 3.0}
OVER_MPICH_SMALLEST, OVER_MPICH_LARGE, LARGE_BYTES = 0.2, 1.0, 256_000

TITLES = {"ours": "ours", "ours-ordinary": "ours, ordinary memory"}

Turn = list[dict[str, Any]]


def contenders(processes: int, options: list[str]) -> dict[str, Callable[[], Turn]]:
    layout = cores.layout(processes, 1)
    script = "sum_worker.py"
    return {
        "ours": lambda: run_ours(script, ["ours", *options], layout),
        "ours-ordinary": lambda: run_ours(script, ["ours-ordinary", *options], layout),
        "gloo": lambda: run_each(script, ["gloo", *options], layout, loopback()),
        "mpich": lambda: run_launched(mpiexec(layout), script, ["mpich", *options]),
    }


def target(other: str, processes: int, size_bytes: int) -> float | None:
    if other == "gloo":
        return OVER_GLOO.get(processes)
    if size_bytes >= LARGE_BYTES:
        return OVER_MPICH_LARGE
    return OVER_MPICH_SMALLEST if size_bytes <= 4_000 else None


def main() -> None:
    parser = arguments("Sums over the processes of one machine: ours, Gloo and MPICH, taking turns.")
    parser.add_argument(
        "--sizes", nargs="+", metavar="SIZE", choices=SIZES, default=list(SIZES), help=" ".join(SIZES)
    )
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4], metavar="N", help="default 2 4")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
        options.sizes = ["4kB", "1MB"]
    sizes = {text: SIZES[text] for text in options.sizes}
    flags = ["--sizes", *map(str, sizes.values()), *(["--quick"] if options.quick else [])]
    results: dict[str, Any] = {}
    found: dict[str, Findings] = {}
    for processes in options.processes:
        say(cores.text(cores.layout(processes, 1)))
        raw = interleave(contenders(processes, flags), options.rounds, f"{processes} processes")
        # A sum has ended when it has on the last process.
        seconds = {
            name: {
                text: [max(process[str(size)]["seconds"] for process in turn) for turn in turns]
                for text, size in sizes.items()
            }
            for name, turns in raw.items()
        }
        found[f"collectives-{processes}"] = findings(processes, seconds)
        show(found[f"collectives-{processes}"])
        results[str(processes)] = {
            "seconds": seconds,
            "ratios": [line.record() for line in found[f"collectives-{processes}"].ratios],
            "turns": raw,
        }
        write(options, benchmark="collectives", results=results, summaries=found)


def findings(processes: int, seconds: dict[str, dict[str, list[float]]]) -> Findings:
    sizes = list(seconds["ours"])
    milliseconds = [
        Measured(
            of=text,
            unit="ms for a sum",
            values={name: [1e3 * each_s for each_s in each[text]] for name, each in seconds.items()},
        )
        for text in sizes
    ]
    ratios = [
        ratio(
            f"{TITLES[mine]} ÷ {other}",
            *speeds(seconds, mine, other, text),
            target(other, processes, SIZES[text]),
            of=text,
        )
        for mine in TITLES
        for other in ("gloo", "mpich")
        for text in sizes
    ]
    return Findings(title=f"sum of a vector over {processes} processes", measured=milliseconds, ratios=ratios)


def speeds(
    seconds: dict[str, dict[str, list[float]]], mine: str, other: str, text: str
) -> tuple[list[float], list[float]]:
    """Sums per second of ours and the other, one number per round."""
    return [1 / value for value in seconds[mine][text]], [1 / value for value in seconds[other][text]]


if __name__ == "__main__":
    main()
