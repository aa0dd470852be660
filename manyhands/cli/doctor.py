"""`manyhands doctor`: what this machine can do and what is wrong with it, or with a run."""

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from manyhands.cli.machine_checks import CHECKS
from manyhands.cli.run_findings import say_findings
from manyhands.cli.run_ports import say_ports
from manyhands.cluster.launcher import cores
from manyhands.errors import UsageError
from manyhands.lab import emulated_hosts

PROBE_TIMEOUT_S = 60

# Some instruction sets are advertised and then trap: such things are tried in a process that may die.
PROBES = {
    "float32 matrices": "import torch; a = torch.ones(64, 64); (a @ a).sum().item()",
    "bfloat16 matrices": "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); (a @ a).sum().item()",
    "Gloo (between hosts)": "import torch.distributed as d; assert d.is_gloo_available()",
    "GPU": "import sys, torch; torch.cuda.is_available() or sys.exit('none found')",
    "MPI (mpi4py)": "import mpi4py.MPI",
    "LMDB": "import lmdb",
}
OPTIONAL = {"bfloat16 matrices", "GPU", "MPI (mpi4py)", "LMDB"}

Check = tuple[str, str, str]  # "ok", "note" or "bad"; what; details


def add_to(verbs: Any) -> None:
    parser = verbs.add_parser(
        "doctor",
        help="what is wrong with this machine, or with a run",
        description="Check cores, memory, shared memory, libraries and network emulation, risky things in processes\n"
        "of their own. Exit code 1 if something needed is missing.\n\n"
        "Given the directory of a run: say from its records what is wrong with it, for example which worker the\n"
        "others wait for, and why; and, while it goes on, which of its processes on this host listen at which\n"
        "ports, and what protects these.",
        epilog="examples:\n  manyhands doctor                     one line per finding: ok, note or bad\n"
        "  manyhands doctor && manyhands train  train only where nothing needed is missing\n"
        "  manyhands doctor runs/mine           what is wrong with that run, and its open ports on this host",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="RUN", nargs="?", type=Path, help="the directory of a run")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.directory is not None:
        return _say_run(options.directory)
    from rich.console import Console
    from rich.markup import escape

    say = Console(highlight=False, soft_wrap=True).print
    marks = {"ok": "[green]ok  [/]", "note": "[yellow]note[/]", "bad": "[red]bad [/]"}
    worst = 0
    for level, what, details in findings():
        say(f"{marks[level]}  {what:<24} {escape(details)}")
        worst = max(worst, level == "bad")
    return int(worst)


def _say_run(directory: Path) -> int:
    has_records = say_findings(directory)
    if not say_ports(directory) and not has_records:
        raise UsageError(
            f"no process on this host writes into {directory}, as far as this user can see, and there are no records "
            "in it; give the directory of a run"
        )
    return 0


def findings() -> Iterator[Check]:
    yield "ok", "system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    yield _processor()
    layout = cores.layout(max(1, len(os.sched_getaffinity(0))), 1)
    yield "ok", "cores", f"{len(layout.cores)} usable of {os.cpu_count()}; {cores.text(layout)}"
    for what, machine_check in CHECKS.items():
        yield from _warnings(what, machine_check)
    yield from (_safely("memory", _memory), _safely("anonymous shared memory", _anonymous_memory))
    yield _safely("/dev/shm", _dev_shm)
    for what, code in PROBES.items():
        yield _probe(what, code)
    reason = emulated_hosts.available()
    yield (
        ("note", "emulated hosts", reason) if reason else ("ok", "emulated hosts", "network namespaces work")
    )


def _warnings(what: str, check: Callable[[], str]) -> Iterator[Check]:
    """A note, where there is something to say."""
    try:
        details = check()
    except (OSError, ValueError):  # this system does not say
        details = ""
    if details:
        yield "note", what, details


def _safely(what: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:
        return "bad", what, f"the check itself failed: {error}"


def _processor() -> Check:
    from manyhands.comm.transports.counters import refuse_several

    try:
        refuse_several(2)
    except UsageError as error:
        return "note", "processor", str(error)
    return "ok", "processor", f"{platform.machine()}; several workers can share the memory of this host"


def _memory() -> Check:
    from manyhands.comm.transports.arena import available_bytes

    free = available_bytes()
    level = "ok" if free > 2e9 else "note"
    return level, "memory", f"{free / 1e9:.1f} GB free for training"


def _anonymous_memory() -> Check:
    if not hasattr(os, "memfd_create"):
        return (
            "bad",
            "anonymous shared memory",
            "memfd_create is missing; manyhands needs Linux 3.17 or newer",
        )
    fd = os.memfd_create("manyhands-doctor")
    os.ftruncate(fd, 1 << 20)
    os.close(fd)
    return "ok", "anonymous shared memory", "memfd works; workers share parameters without /dev/shm"


def _dev_shm() -> Check:
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return "note", "/dev/shm", "not there; manyhands does not use it, torch DataLoader workers do"
    level = "ok" if size > 1e9 else "note"
    return level, "/dev/shm", f"{size / 1e6:,.0f} MB; manyhands does not use it, torch DataLoader workers do"


def _probe(what: str, code: str) -> Check:
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "note", what, f"no answer within {PROBE_TIMEOUT_S} s"
    if done.returncode == 0:
        return "ok", what, "works"
    if done.returncode < 0:
        reason = f"advertised but traps ({signal.Signals(-done.returncode).name}); do not use it here"
    else:
        reason = (done.stderr.strip().splitlines() or ["failed"])[-1]
    return ("note" if what in OPTIONAL else "bad"), what, reason
