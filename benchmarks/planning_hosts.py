"""Workers on emulated hosts for `planning.py`: contenders whose processes are spread, and the links between them."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from processes import SCRIPTS

from manyhands.cluster.launchers import local
from manyhands.cluster.launchers.rank_info import SERVERS
from manyhands.lab.emulated_hosts import EmulatedHosts
from manyhands.planner.links import MeasuredLinks, read_links

LINKS_S = 120.0


class ProcessesOnHosts:
    """One process for each place, the host of that number; servers last. As a contender it ends when all have."""

    def __init__(
        self,
        net: EmulatedHosts,
        places: Sequence[int],
        servers: int,
        port: int,
        path: str,
        command: Sequence[str],
    ) -> None:
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            SERVERS: str(servers),
            local.SIZE: str(len(places)),
            local.STORE: f"{net.address(places[0])}:{port}",
        }
        words = [
            sys.executable,
            "-m",
            "manyhands.cluster.worker",
            "-m",
            "manyhands.planner.probed_worker",
            path,
        ]
        self._processes = [
            subprocess.Popen(
                [*net.command_prefix(host), *words, *command],
                env={**environ, local.RANK: str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
            for rank, host in enumerate(places)
        ]
        self.sentinel = os.pidfd_open(self._processes[0].pid)

    def is_alive(self) -> bool:
        return any(process.poll() is None for process in self._processes)

    def join(self, timeout: float | None = None) -> None:
        end_s = time.monotonic() + (60.0 if timeout is None else timeout)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end_s - time.monotonic()))
        if not self.is_alive() and self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1

    def terminate(self) -> None:
        for process in self._processes:
            process.terminate()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()


def measure_links(net: EmulatedHosts, folder: Path) -> MeasuredLinks:
    """As `manyhands probe --hosts` does it."""
    out = folder / "links"
    command = str(SCRIPTS / "manyhands")
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    words = [command, "probe", "--hosts", f"{net.count}@{net.address(0)}", "--out", str(out), "--json"]
    processes = [subprocess.Popen([*net.command_prefix(0), *words], **quiet)]  # type: ignore[call-overload]
    try:
        while processes[0].poll() is None and not (out / "join.json").exists():
            time.sleep(0.1)
        for host in range(1, net.count):
            words = [*net.command_prefix(host), command, "launch", "--join", str(out)]
            processes.append(subprocess.Popen(words, **quiet))  # type: ignore[call-overload]
        for process in processes:
            process.wait(LINKS_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return read_links(out)
