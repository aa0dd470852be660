"""Faults put into small runs: does the first sentence of the diagnosis name the culprit and the cause?

python benchmarks/diagnosis.py

Every run is paced (a step sleeps for a while), so that its workers do not disturb each other on few cores and the fault
alone makes the difference. Hosts are emulated. Runs without a fault come between the others: they should have no
finding about their time. What other programs on the machine use is left out, since that is no fault of the run.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from common import arguments, say, table, write
from processes import HERE, SCRIPTS, run_commands
from summaries import Findings, Measured

from manyhands.diagnosis import Finding, diagnose
from manyhands.lab.emulated_hosts import EmulatedHosts, available

SCRIPT = str(HERE / "diagnosis_worker.py")
COMMAND = str(SCRIPTS / "manyhands")
STEPS, QUICK_STEPS = 40, 16
OUTSIDE = "busy-host"
LEAST_NAMED = 0.9
PER_HOST = 1000  # what the numbers of a host's workers begin with, times the host
FAST_MBIT, SLOW_MBIT = 1000.0, 50.0
MEGABYTES = "2"  # of gradients, where the link matters


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A run with a fault, and what the diagnosis should say first."""

    name: str
    launch: str = "--workers 3"
    script: Sequence[str] = ()
    kind: str
    process: str = ""
    says: str = ""
    hosts: int = 1
    slow_host: int | None = None
    fast_mbit: float = FAST_MBIT
    environ: dict[str, str] = field(default_factory=dict)

    def is_named(self, found: Sequence[Finding]) -> bool:
        if not found:
            return False
        first = found[0]
        is_there = not self.process or first.processes == (self.process,)
        return first.kind == self.kind and is_there and self.says in first.text


def late(part: str, at: int, seconds: float = 0.2) -> list[str]:
    return ["--fault", part, "--at", str(at), "--seconds", str(seconds)]


def backward(strategy: str, at: int, more: str = "", seconds: float = 0.2) -> Fault:
    return Fault(
        name=f"backward pass +{seconds * 1000:.0f} ms, {strategy}",
        launch=f"--workers 3 --strategy {strategy} {more}",
        script=late("backward", at, seconds),
        kind="slow-worker",
        process=f"worker {at}",
        says="backward pass",
    )


def slow_server(consistency: str, at: int, servers: int) -> Fault:
    return Fault(
        name=f"server {at} of {servers}, {consistency}",
        launch=f"--workers 3 --servers {servers} --strategy parameter-server:{consistency}",
        script=late("server", at, 0.05) + (["--width", "40000"] if servers > 1 else []),
        kind="server-bound",
        process=f"server {at}",
    )


def stalled(at: int, strategy: str, more: str = "") -> Fault:
    return Fault(
        name=f"input of worker {at}, {strategy}",
        launch=f"--workers 3 --strategy {strategy} {more}",
        script=late("input", at),
        kind="input-bound",
        process=f"worker {at}",
    )


def slow_link(hosts: int, launch: str, mbit: float = FAST_MBIT, slow_host: int | None = 1) -> Fault:
    return Fault(
        name=f"link of host {slow_host} of {hosts}" if slow_host is not None else f"links of {hosts} hosts",
        launch=launch,
        script=["--bulk-mb", MEGABYTES],
        kind="network-bound",
        hosts=hosts,
        slow_host=slow_host,
        fast_mbit=mbit,
    )


FAULTS = [
    backward("all-reduce", 1),
    backward("all-reduce:topology=ring", 2),
    backward("all-reduce", 0, seconds=0.02),
    backward("parameter-server:sync", 1, "--servers 1"),
    backward("parameter-server:stale", 2, "--servers 1"),
    backward("parameter-server:async", 0, "--servers 1"),
    backward("local-sgd:period=4", 1),
    Fault(
        name="forward pass +200 ms",
        script=late("forward", 2),
        kind="slow-worker",
        process="worker 2",
        says="forward pass",
    ),
    stalled(2, "all-reduce"),
    stalled(0, "parameter-server:sync", "--servers 1"),
    stalled(1, "local-sgd:period=4"),
    Fault(name="input of all workers", script=late("input", -1, 0.1), kind="input-bound"),
    slow_server("sync", 0, 1),
    slow_server("async", 0, 1),
    slow_server("stale", 0, 1),
    slow_server("async", 1, 2),
    slow_link(2, "--workers 1"),
    slow_link(3, "--workers 1"),
    slow_link(2, "--workers 1", mbit=SLOW_MBIT, slow_host=None),
    Fault(
        name="backward pass +200 ms, 2 hosts",
        launch="--workers 1",
        script=late("backward", PER_HOST),
        kind="slow-worker",
        process=f"worker {PER_HOST}",
        says="backward pass",
        hosts=2,
    ),
]
HEALTHY = [
    Fault(name="no fault, all-reduce", kind=""),
    Fault(
        name="no fault, server", launch="--workers 2 --servers 1 --strategy parameter-server:sync", kind=""
    ),
    Fault(name="no fault, local-sgd", launch="--workers 2 --strategy local-sgd:period=4", kind=""),
]


def run(fault: Fault, folder: Path, steps: int) -> list[Finding]:
    """What the diagnosis of a run with this fault says."""
    out = folder / "run"
    script = [SCRIPT, "--steps", str(steps), *fault.script]
    first = [COMMAND, "launch", "--out", str(out), "--threads", "1", *fault.launch.split()]
    if fault.hosts == 1:
        run_commands([[*first, *script]], {})
        return about_the_run(out)
    with EmulatedHosts(fault.hosts, bandwidth_mbit=fault.fast_mbit) as net:
        if fault.slow_host is not None:
            net.slow(fault.slow_host, SLOW_MBIT)
        # One core, so one thread: two on two busy cores would make every joining host slow by itself.
        wait = f'until [ -e "{out}/join.json" ]; do sleep 0.1; done; exec "$@"'
        join = [
            "taskset",
            "--cpu-list",
            "0",
            "sh",
            "-c",
            wait,
            "sh",
            COMMAND,
            "launch",
            "--join",
            str(out),
            "--workers",
            "1",
        ]
        commands = [[*net.command_prefix(host), *join] for host in range(1, fault.hosts)]
        hosts = ["--hosts", f"{fault.hosts}@{net.address(0)}"]
        commands.append([*net.command_prefix(0), *first, *hosts, *script])
        run_commands(commands, {"OMP_NUM_THREADS": "1"})
    return about_the_run(out)


def about_the_run(out: Path) -> list[Finding]:
    return [finding for finding in diagnose(out) if finding.kind != OUTSIDE]


def main() -> None:
    parser = arguments("Faults put into small runs, and whether the diagnosis names them.", rounds=1)
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="faults whose names have one of these words"
    )
    options = parser.parse_args()
    why = available()
    faults = [one for one in FAULTS + HEALTHY if why is None or one.hosts == 1]
    if options.only:
        faults = [one for one in faults if any(word in one.name for word in options.only)]
    if options.quick:
        faults = faults[:1]
    rows = []
    for fault in faults:
        for _ in range(options.rounds):
            with TemporaryDirectory() as name:
                found = run(fault, Path(name), QUICK_STEPS if options.quick else STEPS)
            is_right = fault.is_named(found) if fault.kind else not found
            first = found[0].text if found else "nothing is wrong"
            say(f"{fault.name}: {'right' if is_right else 'WRONG'}: {first}")
            rows.append({"fault": fault.name, "right": "yes" if is_right else "no", "first sentence": first})
    print(table("Diagnosis", ["fault", "right", "first sentence"], [list(row.values()) for row in rows]))
    findings = summed_up(rows, why)
    say(", ".join(f"{name}: {count}" for name, count in findings.counts.items()))
    write(options, benchmark="diagnosis", results=rows, summaries={"diagnosis": findings})
    injected, named = findings.counts["faults"], findings.counts["named rightly"]
    if not options.quick and not options.only and named < LEAST_NAMED * injected:
        sys.exit(f"{named} of {injected} faults are named rightly; {LEAST_NAMED:.0%} are wanted")


def summed_up(rows: list[dict[str, str]], why_no_hosts: str | None) -> Findings:
    """Counts over all faults, and which part of each kind is named rightly."""
    kind_of = {fault.name: fault.kind for fault in FAULTS + HEALTHY}
    right: dict[str, list[float]] = {}
    for row in rows:
        right.setdefault(kind_of[row["fault"]] or "no fault", []).append(float(row["right"] == "yes"))
    healthy = right.get("no fault", [])
    named = sum(sum(each) for kind, each in right.items() if kind != "no fault")
    counts = {
        "faults": len(rows) - len(healthy),
        "named rightly": round(named),
        "healthy runs": len(healthy),
        "false alarms": round(len(healthy) - sum(healthy)),
    }
    notes = [
        "The first sentence has to have the kind, the process and the part of the step in which the fault is."
    ]
    if why_no_hosts is not None:
        notes.append(f"Without the faults between hosts: {why_no_hosts}")
    measured = [Measured(of="diagnosis", unit="named rightly (1) or not (0)", values=right)]
    return Findings(
        title="Diagnosis of injected faults", counts=counts, notes=notes, texts=rows, measured=measured
    )


if __name__ == "__main__":
    main()
