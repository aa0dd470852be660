"""What a stranger without a key costs a run on several hosts, at the ports that are ours: coordinator and servers.

python benchmarks/attacks.py

Two emulated hosts train, each with a worker and a server. A process on a third one attacks for some seconds and is
quiet for as long, in turns within the one run. The emulated hosts share the machine's cores, so samples per second also
pay for the attacker's own processor time; the processor time of the run's processes per sample does not.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import arguments, say, show, write
from memory import pss
from processes import HERE, SCRIPTS
from summaries import Findings, Measured, ratio

from manyhands.lab.emulated_hosts import EmulatedHosts

KINDS = ("scan", "slow", "hold", "half-open", "garbage", "lengths", "replay")
STRATEGY = "parameter-server:sync,copies=1"
START_S = 60.0
SETTLE_S = 1.0
STRANGER = 2  # the host of the attacker
TICKS = os.sysconf("SC_CLK_TCK")


def wait_until(condition: "object", within_s: float = START_S) -> None:
    end = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        if time.monotonic() > end:
            raise SystemExit("the run has not begun")
        time.sleep(0.05)


@dataclass
class AttackedRun:
    """A run on the first two of the emulated hosts, and what can be seen of it from outside."""

    hosts: EmulatedHosts
    folder: Path
    launchers: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def recorded(self) -> Path:
        return self.folder / "recorded.json"

    def launch(self, host: int, *words: str) -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "MANYHANDS_CORES": ""}
        with (self.folder / f"said-{host}").open("wb") as said:
            self.launchers.append(
                subprocess.Popen(
                    [*self.hosts.command_prefix(host), str(SCRIPTS / "manyhands"), "launch", *words],
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                )
            )

    def begin(self, *script: str, strategy: str = STRATEGY, servers: int = 1) -> None:
        """Start it, and record what the second host says to the first."""
        serving = ["--servers", str(servers)] if servers else []
        place = ["--hosts", f"2@{self.hosts.address(0)}", "--strategy", strategy]
        words = [str(HERE / "attacked_worker.py"), str(self.folder), *script]
        self.launch(0, *place, "--workers", "1", *serving, "--out", str(self.run), *words)
        wait_until((self.run / "join.json").exists)
        with _python(self.hosts, 1, "record", self.hosts.interface(1), str(self.recorded)) as recorder:
            self.launch(1, "--join", str(self.run), "--workers", "1", *serving)
            wait_until(lambda: all(self.samples(worker, 0) for worker in (0, 1000)))
            assert recorder.stdin
            recorder.stdin.close()
            recorder.wait(10)

    def ports(self, protection: str) -> list[str]:
        """`address:port` with that protection on both hosts, as `manyhands doctor` prints them."""
        found = []
        for host in range(2):
            command = [*self.hosts.command_prefix(host), str(SCRIPTS / "manyhands"), "doctor", str(self.run)]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            rows = re.findall(rf"^(\d+) +(\S+) .*  {protection}$", said, re.MULTILINE)
            found += [f"{address}:{port}" for port, address in rows]
        return found

    def attack(
        self, kinds: Sequence[str], targets: Sequence[str], seconds: float
    ) -> "contextlib.AbstractContextManager[subprocess.Popen[bytes]]":
        named = ",".join(f"replay={self.recorded}" if kind == "replay" else kind for kind in kinds)
        return _python(self.hosts, STRANGER, "attack", str(seconds), named, *targets)

    def samples(self, worker: int, since_s: float, until_s: float = float("inf")) -> int:
        """What that worker has recorded between these times."""
        path, total = self.run / "events" / f"worker-{worker}.jsonl", 0
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if record["kind"] == "step" and since_s <= record["t"] < until_s:
                    total += record["samples"]
        return total

    def processes(self) -> dict[int, str]:
        """Those of the run, by process id: the kernel's names of them."""
        return {pid: _name(pid) for host in range(2) for pid in self.hosts.processes(host)}

    def end(self) -> list[int]:
        """Have the workers leave; says how the launchers have ended."""
        for one in reversed(self.launchers):
            one.send_signal(signal.SIGTERM)
        return [one.wait(60) for one in self.launchers]


@contextlib.contextmanager
def attacked(folder: Path) -> Iterator[AttackedRun]:
    """Three emulated hosts, of which two are for a run; leaving ends every process on them."""
    with EmulatedHosts(3) as hosts:
        made = AttackedRun(hosts, folder)
        try:
            yield made
        finally:
            for host in range(3):
                for pid in hosts.processes(host):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            for one in made.launchers:
                one.wait()


@contextlib.contextmanager
def _python(hosts: EmulatedHosts, host: int, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    command = [*hosts.command_prefix(host), sys.executable, str(HERE / "attack_worker.py"), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def processor_s(pid: int) -> float:
    with contextlib.suppress(OSError, ValueError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / TICKS
    return 0.0


@dataclass(frozen=True, kw_only=True)
class Window:
    """Some seconds of the run."""

    samples_per_second: float
    processor_us_per_sample: float
    memory_bytes: int
    """Proportional set sizes at its end, of all processes of the run."""


def measure(run: AttackedRun, seconds: float) -> Window:
    pids = run.processes()
    before = sum(map(processor_s, pids))
    began_s = time.time()
    time.sleep(seconds)
    ended_s, spent_s = time.time(), sum(map(processor_s, pids)) - before
    time.sleep(0.5)  # until it is recorded
    samples = sum(run.samples(worker, began_s, ended_s) for worker in (0, 1000))
    return Window(
        samples_per_second=samples / (ended_s - began_s),
        processor_us_per_sample=1e6 * spent_s / max(1, samples),
        memory_bytes=sum(map(pss, pids)),
    )


def rounds(
    run: AttackedRun, options: Any, targets: Sequence[str]
) -> tuple[dict[str, list[Window]], Counter[str]]:
    """Attacked and quiet windows in turns, each round beginning with the other; and what the attacker has done."""
    windows: dict[str, list[Window]] = {"attacked": [], "quiet": []}
    done: Counter[str] = Counter()
    for number in range(options.rounds):
        say(f"round {number + 1} of {options.rounds}")
        for kind in ("attacked", "quiet") if number % 2 else ("quiet", "attacked"):
            if kind == "quiet":
                time.sleep(SETTLE_S)
                windows[kind].append(measure(run, options.seconds))
                continue
            with run.attack(KINDS, targets, options.seconds + 2 * SETTLE_S) as attacker:
                time.sleep(SETTLE_S)
                windows[kind].append(measure(run, options.seconds))
                assert attacker.stdout
                done.update(json.loads(attacker.stdout.read()))
    return windows, done


def main() -> None:
    parser = arguments("What a stranger without a key costs a run on several hosts.", rounds=8)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each window (default 4)")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 1, 0.5
    with TemporaryDirectory() as name, attacked(Path(name)) as run:
        run.begin()
        targets = run.ports("keys of the run")
        pids = run.processes()
        windows, done = rounds(run, options, targets)
        same = run.processes() == pids
        codes = run.end()
    found = findings(windows, done, processes_same=same, codes=codes, ports=len(targets))
    show(found)
    results = {kind: [vars(window) for window in each] for kind, each in windows.items()}
    write(
        options,
        benchmark="attacks",
        results={**results, "counts": found.counts},
        summaries={"attacks": found},
    )


def findings(
    windows: dict[str, list[Window]],
    done: Counter[str],
    *,
    processes_same: bool,
    codes: list[int],
    ports: int,
) -> Findings:
    def each(kind: str, name: str) -> list[float]:
        return [getattr(window, name) for window in windows[kind]]

    rows = (
        ("samples per second", "samples_per_second", 0.95, False),
        ("processor time of the run per sample", "processor_us_per_sample", 1.05, True),
        ("memory of the run", "memory_bytes", None, True),
    )
    units = {"samples_per_second": "samples/s", "processor_us_per_sample": "µs", "memory_bytes": "bytes"}
    counts = {name: round(number, 2) for name, number in sorted(done.items())}
    return Findings(
        title=f"two hosts, {STRATEGY}, a process without a key at {ports} ports",
        measured=[
            Measured(of=of, unit=units[name], values={kind: each(kind, name) for kind in windows})
            for of, name, _, _ in rows
        ],
        ratios=[
            *(
                ratio(
                    "attacked ÷ quiet",
                    each("attacked", name),
                    each("quiet", name),
                    target,
                    at_most=at_most,
                    of=of,
                )
                for of, name, target, at_most in rows
            ),
            ratio(
                "after all attacks ÷ before the first",
                each("quiet", "memory_bytes")[-1:],
                each("quiet", "memory_bytes")[:1],
                1.02,
                at_most=True,
                of="memory of the run",
            ),
        ],
        counts={"attacker": counts, "the same processes at the end": processes_same, "exit codes": codes},
    )


if __name__ == "__main__":
    main()
