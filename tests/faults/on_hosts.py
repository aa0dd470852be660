"""Runs on emulated hosts, with faults. A fault is data, `(where, when, kind)`, and the run says whether it fired.

`when` is seconds after the first step. `where` is for the kind `kill` a host and a process of it, the servers after the
workers; a host for `host` (every process of it is killed) and `vanish` (the same, with its cable pulled first); and
hosts, for some seconds, for `cut` (each from all others), `deaf` and `mute` (the same in one direction), `slow` and
`part` (these from the others).
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.lab.emulated_hosts import EmulatedHosts
from tests.end_to_end.commands import BIN, clean_environment
from tests.faults import harness

PATIENCE_S = 110.0
SLOW_MBIT = 2.0


@dataclass(frozen=True)
class Fault:
    """One place, one moment, one kind."""

    where: tuple[int, ...]
    when: float
    kind: str = "kill"
    for_s: float = 0.0


@dataclass
class Ran(harness.Logs):
    """How a run with faults went."""

    fired: list[Fault]
    killed: list[int]  # by their ids: the processes that the faults have ended
    events: list[dict[str, Any]] = field(default_factory=list)
    said: str = ""

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    fields_of = of


def run(
    folder: Path,
    layout: Sequence[int],
    faults: Sequence[Fault],
    *,
    inside: Sequence[harness.Fault] = (),
    strategy: str = "all-reduce",
    servers: Sequence[int] = (),
    code: int = 0,
    **settings: Any,
) -> Ran:
    """Train on so many workers and servers of each host, with these faults, and those `inside` that workers do to
    themselves; `settings` are for the script, and `code` is how the launchers are to end."""
    told = [[fault.who, fault.when, fault.kind] for fault in inside]
    script = [str(harness.SCRIPT), str(folder), json.dumps({"faults": told, **settings})]
    with ExitStack() as stack:
        net = stack.enter_context(EmulatedHosts(len(layout)))
        launchers: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, net, launchers)
        out = folder / "run"

        def launch(host: int, *words: str) -> None:
            said = stack.enter_context((folder / f"said-{host}").open("wb"))
            command = [*net.command_prefix(host), str(BIN / "manyhands"), "launch", *words]
            environ = clean_environment(OMP_NUM_THREADS="1", MANYHANDS_CORES="")
            launchers.append(
                subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
            )

        place = f"{len(layout)}@{net.address(0)}"
        first = ["--hosts", place, "--workers", str(layout[0]), "--threads", "1", "--strategy", strategy]
        serving = [["--servers", str(count)] if count else [] for count in servers or [0] * len(layout)]
        launch(0, *first, *serving[0], "--out", str(out), *script)
        _wait_for((out / "join.json").exists)
        for host, workers in enumerate(layout[1:], start=1):
            launch(host, "--join", str(out), "--workers", str(workers), *serving[host])
        fired, killed = _watch(net, launchers, folder, layout, list(faults))
        said = (folder / "said-0").read_text()
        doomed = {host for fault in fired if fault.kind in ("host", "vanish") for host in fault.where}
        codes = {host: one.wait(20) for host, one in enumerate(launchers) if host not in doomed}
        assert set(codes.values()) == {code}, (
            codes,
            [(folder / f"said-{h}").read_text()[-3000:] for h in codes],
        )
        left = [pid for host in range(len(layout)) for pid in net.processes(host)]
        assert not left, "a process is left"
    logs = harness.logs_in(folder)
    lines = (out / "events" / "launcher.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return Ran(folder=folder, logs=logs, fired=fired, killed=killed, events=events, said=said)


def _watch(
    net: EmulatedHosts,
    launchers: list[subprocess.Popen[bytes]],
    folder: Path,
    layout: Sequence[int],
    pending: list[Fault],
) -> tuple[list[Fault], list[int]]:
    """Until the first launcher has ended; does what is due, and says when that is all and everyone is back."""
    events = folder / "run" / "events" / "launcher.jsonl"
    away = [host for one in pending if one.for_s and one.kind != "slow" for host in one.where]
    back = sum(layout[1:]) + sum(layout[host] for host in away)
    fired: list[Fault] = []
    killed: list[int] = []
    healing: list[tuple[float, Fault]] = []
    began_s, first_step_s = time.monotonic(), 0.0
    while launchers[0].poll() is None:
        now = time.monotonic()
        assert now < began_s + PATIENCE_S, _said(folder)
        if not first_step_s and any(harness.has_stepped(log) for log in harness.logs_in(folder).values()):
            first_step_s = now
        for fault in [one for one in pending if first_step_s and now - first_step_s >= one.when]:
            killed += _do(net, fault, folder)
            pending.remove(fault)
            fired.append(fault)
            if fault.for_s:
                healing.append((now + fault.for_s, fault))
        for at_s, fault in [entry for entry in healing if entry[0] <= now]:
            healing.remove((at_s, fault))
            for host in fault.where:
                net.heal(host)
        if not pending and not healing and events.exists() and events.read_text().count('"join"') >= back:
            (folder / "enough").touch()
        time.sleep(0.05)
    return fired, killed


def _do(net: EmulatedHosts, fault: Fault, folder: Path) -> list[int]:
    """Returns whom it has killed."""
    if fault.kind == "kill":
        host, index = fault.where
        here = net.processes(host)
        logs = sorted(harness.logs_in(folder).items())
        victim: int = [log[0]["pid"] for _, log in logs if log[0]["pid"] in here][index]
        os.kill(victim, signal.SIGKILL)
        return [victim]
    killed: list[int] = []
    if fault.kind == "part":
        net.part(fault.where)
    for host in fault.where:
        if fault.kind in ("cut", "vanish"):
            net.cut(host)
        if fault.kind == "deaf":
            net.deafen(host)
        if fault.kind == "mute":
            net.mute(host)
        if fault.kind == "slow":
            net.slow(host, SLOW_MBIT)
        if fault.kind in ("host", "vanish"):
            for pid in net.processes(host):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
    return killed


def _end(net: EmulatedHosts, launchers: list[subprocess.Popen[bytes]]) -> None:
    for host in range(net.count):
        for pid in net.processes(host):
            os.kill(pid, signal.SIGKILL)
    for launcher in launchers:
        launcher.wait()


def _wait_for(condition: Any) -> None:
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() < began_s + PATIENCE_S
        time.sleep(0.02)


def _said(folder: Path) -> str:
    return "the run hangs:\n" + "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("said-*")))
