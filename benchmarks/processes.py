"""Start the processes of a contender, see them end, and read what they wrote.

Every worker leaves `rank-N.json` in a folder of its own run. When one fails, all are ended and the benchmark with them.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from manyhands.cluster.launcher import supervisor
from manyhands.cluster.launcher.coordination import Elastic
from manyhands.cluster.launcher.cores import CoreLayout
from manyhands.cluster.launcher.launch_plan import LaunchPlan
from manyhands.cluster.launchers import local
from manyhands.cluster.launchers.rank_info import SERVERS
from manyhands.lab.emulated_hosts import EmulatedHosts

HERE = Path(__file__).resolve().parent
SCRIPTS = Path(sysconfig.get_path("scripts"))
TIMEOUT_S = 3600.0
PORT = 29400  # free: every emulated host has all its ports to itself


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A command that starts workers, as a person types it; `{folder}` is where the run may leave its files."""

    command: list[str]
    environ: dict[str, str] = field(default_factory=dict)


def launch(workers: int) -> Launcher:
    """Ours."""
    options = ["--workers", str(workers), "--threads", "1", "--out", "{folder}/run"]
    return Launcher(command=[str(SCRIPTS / "manyhands"), "launch", *options])


def torchrun(workers: int) -> Launcher:
    """PyTorch's."""
    environ = loopback()
    meeting = ["--master-addr", environ["MASTER_ADDR"], "--master-port", environ["MASTER_PORT"]]
    return Launcher(
        command=[str(SCRIPTS / "torchrun"), "--nproc-per-node", str(workers), *meeting],
        environ={**environ, "OMP_NUM_THREADS": "1"},
    )


def mpiexec(layout: CoreLayout) -> Launcher:
    """That of the installed MPICH, with the same cores as the others have."""
    pinned = [",".join(map(str, share)) for share in layout.cores if share]
    binding = ["-bind-to", f"user:{','.join(pinned)}"] if pinned else []
    return Launcher(
        command=[str(SCRIPTS / "mpiexec"), *binding, "-n", str(len(layout.cores)), sys.executable],
        environ={"OMP_NUM_THREADS": "1"},
    )


def run_ours(
    script: str, options: Sequence[str], layout: CoreLayout, *, servers: int = 0, survives: bool = False
) -> list[dict[str, Any]]:
    """Run a script in workers of our own supervisor, and return what they wrote.

    With `survives` as `manyhands launch` runs them: they could go on if one died.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "events").mkdir()
        lines: list[str] = []
        outcome = supervisor.run(
            LaunchPlan(
                command=[str(HERE / script), "--folder", name, *options],
                workers=len(layout.cores),
                layout=layout,
                environ={},
                run_dir=folder,
                servers=servers,
            ),
            on_tick=lambda: None,
            on_line=lambda rank, line: lines.append(line),
            elastic=Elastic(most=len(layout.cores), replace=0) if survives else None,
        )
        if not outcome.ok:
            sys.exit("\n".join([*lines, *outcome.tail, outcome.message]))
        return _written(folder)


def run_each(
    script: str, options: Sequence[str], layout: CoreLayout, environ: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Run a script in plain processes, with the ranks as variables and pinned as ours are."""
    with TemporaryDirectory() as name:
        size = len(layout.cores)
        environ = {**environ, "OMP_NUM_THREADS": str(layout.threads), "WORLD_SIZE": str(size)}
        command = [sys.executable, str(HERE / script), "--folder", name, *options]
        with _processes(Path(name)) as start:
            for rank, cores in enumerate(layout.cores):
                start(command, {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cores)
        return _written(Path(name))


def run_commands(commands: Sequence[Sequence[str]], environ: Mapping[str, str]) -> None:
    """Run commands side by side; when the last of them ends, the others are ended."""
    with TemporaryDirectory() as name, _processes(Path(name), last_decides=True) as start:
        for command in commands:
            start(command, environ, ())


def run_on_hosts(
    hosts: EmulatedHosts,
    workers: Sequence[int],
    script: str,
    options: Sequence[str],
    environ: Mapping[str, str],
    *,
    servers: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """Run a script on emulated hosts; `workers` and `servers` say on which host each of them is."""
    with TemporaryDirectory() as name:
        places = [*workers, *servers]
        environ = {
            **environ,
            "OMP_NUM_THREADS": "1",
            SERVERS: str(len(servers)),
            local.SIZE: str(len(places)),
            local.STORE: f"{hosts.address(places[0])}:{PORT}",
        }
        command = [sys.executable, str(HERE / script), "--folder", name, *options]
        with _processes(Path(name)) as start:
            for rank, host in enumerate(places):
                start([*hosts.command_prefix(host), *command], {**environ, local.RANK: str(rank)}, ())
        return _written(Path(name))


def run_launched(
    launcher: Launcher,
    script: str,
    options: Sequence[str],
    *,
    watch: Callable[[int], None] | None = None,
    every_s: float = 0.1,
) -> list[dict[str, Any]]:
    """Run a script through a launcher's command; `watch` is given the launcher's pid again and again."""
    with TemporaryDirectory() as name:
        command = [part.format(folder=name) for part in launcher.command]
        with _processes(Path(name), watch, every_s) as start:
            start([*command, str(HERE / script), "--folder", name, *options], launcher.environ, ())
        return _written(Path(name))


@contextlib.contextmanager
def _processes(
    folder: Path,
    watch: Callable[[int], None] | None = None,
    every_s: float = 0.1,
    *,
    last_decides: bool = False,
) -> Iterator[Callable[[Sequence[str], Mapping[str, str], Sequence[int]], None]]:
    """Gives a function that starts a process; leaving waits for all, and ends all when one fails."""
    children: list[subprocess.Popen[bytes]] = []
    log = folder / "log"

    def start(command: Sequence[str], environ: Mapping[str, str], cores: Sequence[int]) -> None:
        with log.open("ab") as output, _pinned(cores):
            child = subprocess.Popen(
                command,
                env={**os.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )
        children.append(child)

    try:
        yield start
        deadline = time.monotonic() + TIMEOUT_S
        while any(child.poll() is None for child in (children[-1:] if last_decides else children)):
            failed = any(child.returncode for child in children)
            if failed or time.monotonic() > deadline:
                break
            if watch:
                watch(children[0].pid)
            time.sleep(every_s)
        if any(child.returncode != 0 for child in (children[-1:] if last_decides else children)):
            codes = [child.returncode for child in children]
            tail = log.read_text(errors="replace")[-4000:]
            sys.exit(f"{tail}\nexit codes {codes} of {children[0].args!r}")
    finally:
        for child in children:
            _end(child)


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End a process with all it has started."""
    if child.poll() is None:
        child.terminate()  # launchers end their workers on this
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(5.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@contextlib.contextmanager
def _pinned(cores: Sequence[int]) -> Iterator[None]:
    """What is started inside inherits these cores; none means all."""
    before = os.sched_getaffinity(0)
    try:
        if cores:
            os.sched_setaffinity(0, cores)
        yield
    finally:
        os.sched_setaffinity(0, before)


def _written(folder: Path) -> list[dict[str, Any]]:
    """What the workers wrote, by rank."""
    found = sorted(folder.glob("rank-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
    return [json.loads(path.read_text()) for path in found]


def leave_result(folder: Path, rank: int, result: Mapping[str, Any]) -> None:
    """Called in a worker: what the benchmark reads."""
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))


def free_ports(count: int) -> list[int]:
    """Ports of this machine that were free just now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def loopback() -> dict[str, str]:
    """Variables by which `torch.distributed` meets on this machine."""
    port = free_ports(1)[0]
    names = {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **names}
