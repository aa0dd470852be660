"""What slows a machine down without an error: the processor's governor, a control group's limit, a slow interface.

Each check returns a sentence, or nothing where all is well or the system does not say.
"""

import os
from collections.abc import Callable
from pathlib import Path

from manyhands.cluster.launcher import cores

SYSTEM = Path("/sys")
SLOW_MBIT = 1000
_DYNAMIC_DRIVERS = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Their `powersave` goes to full speed under load."""


def governor(system: Path = SYSTEM) -> str:
    slow: dict[str, int] = {}
    for folder in sorted((system / "devices/system/cpu").glob("cpu[0-9]*/cpufreq")):
        name = _text(folder / "scaling_governor")
        if name in ("powersave", "conservative") and _text(folder / "scaling_driver") not in _DYNAMIC_DRIVERS:
            slow[name] = slow.get(name, 0) + 1
    if not slow:
        return ""
    said = ", ".join(f"{name} on {count} cores" for name, count in slow.items())
    return f"{said}: they may stay below their full speed; `cpupower frequency-set -g performance` changes it"


def quota() -> str:
    allowed, there = cores.quota_cores(), len(os.sched_getaffinity(0))
    if allowed is None or allowed >= there:
        return ""
    return (
        f"a control group allows {allowed:g} of {there} cores: workers are not pinned, and pauses of the group hold "
        f"all of them up; use at most {max(1, int(allowed))} threads in all, or raise its cpu.max"
    )


def interface(system: Path = SYSTEM, routes: Path = Path("/proc/net/route")) -> str:
    """The one that leads to other hosts, where it is slow or another one is faster."""
    chosen = _default_interface(routes)
    speeds = {folder.name: _speed(folder) for folder in (system / "class/net").glob("*")}
    own = speeds.get(chosen, 0)
    if not own:
        return ""
    fastest = max(speeds, key=lambda name: speeds[name])
    if speeds[fastest] > own:
        return (
            f"traffic to other hosts leaves by {chosen} with {own:,} Mbit/s, and {fastest} has {speeds[fastest]:,}; "
            f"give the address of {fastest}, as in --hosts 2@ADDRESS"
        )
    if own < SLOW_MBIT:
        return f"{chosen}, which leads to other hosts, has {own:,} Mbit/s; see `manyhands plan` for what pays on it"
    return ""


def _default_interface(routes: Path) -> str:
    for line in _text(routes).splitlines()[1:]:
        name, destination, *_ = line.split()
        if destination == "00000000":
            return name
    return ""


def _speed(folder: Path) -> int:
    """In Mbit/s; 0 where it is down or does not say."""
    if _text(folder / "operstate") == "down":
        return 0
    try:
        return max(0, int(_text(folder / "speed") or 0))
    except ValueError:
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


CHECKS: dict[str, Callable[[], str]] = {
    "frequency governor": governor,
    "control group": quota,
    "network interface": interface,
}
