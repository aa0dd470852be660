"""What happens to the processes of a run from outside: deaths, and others that use the processors."""

from collections import defaultdict
from dataclasses import dataclass, field

from manyhands.diagnosis.evidence import amount
from manyhands.diagnosis.finding import Finding
from manyhands.telemetry.lines import Record

OFTEN = 2  # deaths
LEAST_STOOD = 0.05  # of the run's time, for deaths
LEAST_OTHERS = 0.25  # of the processors, used by processes that are not of the run
LEAST_STOLEN = 0.05
MOST_IDLE = 0.1  # where more is left over, others take nothing away


class DeathsSeen:
    """Workers and servers that have died."""

    def __init__(self) -> None:
        self._deaths: list[tuple[str, str]] = []
        self._stood_s = 0.0

    def add(self, record: Record) -> None:
        what = "server" if record["kind"] == "server" else "worker"
        how = record.get("how")
        self._deaths.append((f"{what} {record['rank']}", how if isinstance(how, str) else "?"))
        self._stood_s += amount(record, "stood_s")

    def findings(self, passed_s: float) -> list[Finding]:
        share = min(1.0, self._stood_s / passed_s) if passed_s > 0 else 0.0
        count = len(self._deaths)
        if not count or (count < OFTEN and share < LEAST_STOOD):
            return []
        names = [name for name, _ in self._deaths]
        ways: defaultdict[str, int] = defaultdict(int)
        for _, how in self._deaths:
            ways[how[:80]] += 1
        how, times = max(ways.items(), key=lambda item: item[1])
        shown = ", ".join(names[:5]) + (f" and {count - 5} more" if count > 5 else "")
        which = how if count == 1 else f"{times} of {count} by {how}"
        return [
            Finding(
                kind="dying-worker",
                text=f"{count} process{'es' * (count > 1)} died ({shown}; {which}), and training stood still for "
                f"{self._stood_s:.1f} s, {share * 100:.0f} % of the time",
                advice="look at their last lines in logs/, and at the memory of the host (dmesg says which process "
                "the kernel has killed)",
                share=share,
                processes=tuple(dict.fromkeys(names)),
                numbers={"deaths": count, "stood_s": self._stood_s},
            )
        ]


@dataclass
class MachineUse:
    """A machine, which may be several emulated hosts: its counters at first and last, and those of its processes."""

    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    cores: int = 1
    ours: dict[str, tuple[float, float]] = field(default_factory=dict)  # by process: at first and last
    hosts: set[int] = field(default_factory=set)


class HostsSeen:
    """What the hosts of a run use, from the records of their launchers."""

    def __init__(self) -> None:
        self.host_of: dict[int, int] = {}
        """The host of each worker."""
        self._machines: defaultdict[str, MachineUse] = defaultdict(MachineUse)

    def add(self, record: Record) -> None:
        host = record["rank"]
        machine = self._machines[str(record.get("machine", host))]
        machine.hosts.add(host)
        cores = record.get("cores")
        machine.cores = cores if isinstance(cores, int) and cores > 0 else machine.cores
        counters = {name: amount(record, name) for name in _COUNTERS} | {"t": record["t"]}
        # Several hosts of a machine tell of the same processors: those of one of them will do.
        if host == min(machine.hosts):
            if not machine.first or counters["cpu_user_s"] < machine.last["cpu_user_s"]:
                machine.first, machine.ours = counters, {}
            machine.last = counters
        processes = record.get("processes")
        for name, used in processes.items() if isinstance(processes, dict) else ():
            if isinstance(used, dict):
                self._add_process(machine, host, str(name), used)

    def _add_process(self, machine: MachineUse, host: int, name: str, used: dict[str, object]) -> None:
        seconds = amount(used, "user_s") + amount(used, "system_s")
        key = f"{host} {name}"
        machine.ours[key] = (machine.ours.get(key, (seconds, 0.0))[0], seconds)
        kind, _, rank = name.partition(" ")
        if kind == "worker" and rank.isdecimal():
            self.host_of[int(rank)] = host

    def findings(self) -> list[Finding]:
        return [found for machine in self._machines.values() if (found := _crowded(machine))]


def _crowded(machine: MachineUse) -> Finding | None:
    if not machine.first:
        return None
    passed_s = (machine.last["t"] - machine.first["t"]) * machine.cores
    if passed_s < 2.0 * machine.cores:
        return None
    grown = {name: machine.last[name] - machine.first[name] for name in _COUNTERS}
    used_s = grown["cpu_user_s"] + grown["cpu_system_s"]
    ours_s = sum(last - first for first, last in machine.ours.values())
    others, stolen = max(0.0, used_s - ours_s) / passed_s, grown["cpu_steal_s"] / passed_s
    host = f"host {min(machine.hosts)}" if len(machine.hosts) == 1 else "the machine of all hosts"
    if grown["cpu_idle_s"] / passed_s > MOST_IDLE or (others < LEAST_OTHERS and stolen < LEAST_STOLEN):
        return None
    is_stolen = stolen > others
    taker = "the hypervisor gives" if is_stolen else "processes that are not of the run use"
    what = f"{max(others, stolen) * 100:.0f} % of the processors of {host}"
    return Finding(
        kind="busy-host",
        text=f"{taker} {what}{' to other machines' * is_stolen}",
        advice="ask for cores of your own, or move the run"
        if is_stolen
        else "end them, or train with fewer workers and threads; `top` shows which they are",
        share=min(1.0, max(others, stolen)),
        processes=tuple(f"host {host}" for host in sorted(machine.hosts)),
        numbers={"others": others, "stolen": stolen},
    )


_COUNTERS = ("cpu_user_s", "cpu_system_s", "cpu_steal_s", "cpu_idle_s")
