"""How long training stands still after `kill -9` of a worker: ours beside `torchrun --max-restarts=1` with DDP.

python benchmarks/recovery.py
"""

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from common import arguments, interleave, show, table, write
from processes import HERE, SCRIPTS, loopback
from summaries import Findings, Measured, ratio

WORKERS = 2
NOTICED_S, RESUMED_S = 0.5, 1.5  # what ours should keep to, as medians
GIVE_UP_S = 45.0
START_S = 60.0
OURS, DDP = "manyhands launch", "torchrun --max-restarts=1, DDP"


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill, and what came of it."""

    resumed_s: float | None
    """From the kill to the end of the next step; None if there was none."""
    steps_lost: int
    """Steps that had been made before the kill and had to be made again; all, if the run did not go on."""
    same_processes: bool


def command(contender: str, folder: Path) -> list[str]:
    script = [str(HERE / "recovery_worker.py"), "ours" if contender == OURS else "ddp", str(folder)]
    if contender == OURS:
        options = ["--workers", str(WORKERS), "--threads", "1", "--out", str(folder / "run")]
        return [str(SCRIPTS / "manyhands"), "launch", *options, *script]
    place = loopback()
    meeting = ["--master-addr", place["MASTER_ADDR"], "--master-port", place["MASTER_PORT"]]
    options = ["--nproc-per-node", str(WORKERS), "--max-restarts", "1", *meeting]
    return [str(SCRIPTS / "torchrun"), *options, *script]


def logs(folder: Path) -> dict[int, list[tuple[float, int]]]:
    """By process: when each step ended."""
    found = {}
    for path in folder.glob("steps-*"):
        lines = [line.split() for line in path.read_text().split("\n")[:-1]]
        found[int(path.name.partition("-")[2])] = [(float(at), int(step)) for at, step in lines]
    return found


def wait_until(condition: "object", within_s: float) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


def kill_one(contender: str, draw: random.Random) -> Kill:
    """Start a run, kill one of its workers at a random instant, and see how it goes on."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **(loopback() if contender == DDP else {})}
        for variable in ("MASTER_ADDR", "MASTER_PORT"):
            environ.pop(variable, None)
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
        launcher = subprocess.Popen(command(contender, folder), env=environ, process_group=0, **silent)
        try:
            begun = wait_until(
                lambda: sum(len(log) > 20 for log in logs(folder).values()) == WORKERS, START_S
            )
            assert begun, f"{contender} did not start"
            time.sleep(draw.uniform(0.2, 1.2))
            before = logs(folder)
            victim = draw.choice(sorted(before))
            os.kill(victim, signal.SIGKILL)
            killed_s = time.monotonic()
            time.sleep(0.05)  # a step that was under way is not the next one
            most = max(step for log in logs(folder).values() for _, step in log)

            def later() -> list[tuple[float, int]]:
                return [
                    row
                    for pid, log in logs(folder).items()
                    if pid != victim
                    for row in log
                    if row[0] > killed_s
                ]

            def resumed() -> list[tuple[float, int]]:
                fresh = [row for row in later() if row[0] > killed_s + 0.05 or contender == OURS]
                return fresh if contender == DDP else [row for row in fresh if row[1] > most]

            if not wait_until(lambda: resumed() or launcher.poll() is not None, GIVE_UP_S) or not resumed():
                return Kill(resumed_s=None, steps_lost=most, same_processes=False)
            at, step = min(resumed())
            survivors = set(before) - {victim}
            same = all(any(row[0] >= at for row in logs(folder)[pid]) for pid in survivors)
            return Kill(resumed_s=at - killed_s, steps_lost=max(0, most - step + 1), same_processes=same)
        finally:
            launcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            for pid in logs(folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            launcher.wait()


def row(name: str, kills: list[Kill]) -> list[str]:
    good = [kill.resumed_s for kill in kills if kill.resumed_s is not None]
    took = f"{statistics.median(good):.2f} ({min(good):.2f}–{max(good):.2f})" if good else "never"
    lost = ", ".join(str(kill.steps_lost) for kill in kills if kill.resumed_s is not None)
    kept = sum(kill.same_processes for kill in kills)
    return [name, f"{len(good)} of {len(kills)}", took, lost, f"{kept} of {len(kills)}"]


def findings(kills: dict[str, list[Kill]]) -> Findings:
    """Seconds and steps lost are those of runs that went on: the others have no next step."""
    on = {name: [kill for kill in each if kill.resumed_s is not None] for name, each in kills.items()}
    both = [
        (ours.resumed_s, theirs.resumed_s)
        for ours, theirs in zip(kills[OURS], kills[DDP], strict=True)
        if ours.resumed_s is not None and theirs.resumed_s is not None
    ]
    ours_s, theirs_s = [ours for ours, _ in both], [theirs for _, theirs in both]
    title = "kill -9 of one of two workers, runs that went on"
    return Findings(
        title=title,
        counts={
            name: {
                "runs": len(each),
                "went on": len(on[name]),
                "kept the others' processes": sum(kill.same_processes for kill in each),
            }
            for name, each in kills.items()
        },
        measured=[
            Measured(
                of="from the kill to the end of the next step",
                unit="s",
                values={name: [kill.resumed_s or 0.0 for kill in each] for name, each in on.items()},
            ),
            Measured(
                of="steps made before the kill and made again",
                unit="steps",
                values={name: [kill.steps_lost for kill in each] for name, each in on.items()},
            ),
        ],
        ratios=[ratio(f"{OURS} ÷ {DDP}, rounds in which both went on", ours_s, theirs_s)] if both else [],
    )


def main() -> None:
    parser = arguments("Kill a worker: how many runs go on, and how soon.", rounds=12)
    parser.add_argument("--seed", type=int, default=1, help="of the instants and victims (default 1)")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    draw = random.Random(options.seed)
    kills = interleave(
        {OURS: lambda: kill_one(OURS, draw), DDP: lambda: kill_one(DDP, draw)}, options.rounds, "kill -9"
    )
    header = ["", "went on", "next step after, s", "steps lost, each", "survivors kept"]
    print(table("kill -9 of a worker", header, [row(name, each) for name, each in kills.items()]))
    ours = [kill.resumed_s for kill in kills[OURS] if kill.resumed_s is not None]
    verdict = len(ours) == len(kills[OURS]) and statistics.median(ours) <= RESUMED_S
    print(f"next step within {RESUMED_S} s (median): {'reached' if verdict else 'missed'}")
    results = {name: [asdict(kill) for kill in each] for name, each in kills.items()}
    found = findings(kills)
    show(found)
    write(options, benchmark="recovery", results=results, summaries={"recovery": found})
    sys.exit(0 if verdict or options.quick else 1)


if __name__ == "__main__":
    main()
