"""A world on emulated hosts: one real process per worker and server, all forks of one that has loaded PyTorch."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manyhands.cluster.launchers import local
from manyhands.cluster.launchers.rank_info import SERVERS
from manyhands.lab import emulated_hosts
from tests.end_to_end.commands import TIMEOUT_S, clean_environment

PORT = 29400  # free: every emulated host has all its ports to itself


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run on emulated hosts that has ended well."""

    said: list[str]
    """By rank: what it printed."""
    sent_bytes: list[int]
    """By host, as its network interface counted them."""


def run_on_hosts(command: list[str], places: Sequence[int], folder: Path, *, servers: int = 0) -> Ended:
    """The words of `manyhands`, or a script, in one process for each place, the host of that number; servers last."""
    with emulated_hosts.EmulatedHosts(max(places) + 1) as net, tempfile.TemporaryDirectory() as outputs:
        world = {local.SIZE: str(len(places)), local.STORE: f"{net.address(0)}:{PORT}"}
        if servers:
            world[SERVERS] = str(servers)
        told = {
            "command": command,
            "world": world,
            "namespaces": [net.command_prefix(host)[-1] for host in places],
            "outputs": outputs,
        }
        done = subprocess.run(
            [sys.executable, "-m", "tests.end_to_end.forks", json.dumps(told)],
            cwd=folder,
            env=clean_environment(PYTHONPATH=str(Path(__file__).parents[2])),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        said, errors = (
            [
                path.read_text() if (path := Path(outputs, f"{rank}.{kind}")).exists() else ""
                for rank in range(len(places))
            ]
            for kind in ("out", "err")
        )
        assert done.returncode == 0, (done.stderr, said, errors)
        return Ended(said=said, sent_bytes=[_sent_bytes(net, host) for host in range(net.count)])


def places(layout: Sequence[int]) -> list[int]:
    """The host of each worker, given how many there are on each host."""
    return [host for host, count in enumerate(layout) for _ in range(count)]


def _sent_bytes(net: emulated_hosts.EmulatedHosts, host: int) -> int:
    counter = f"/sys/class/net/{net.interface(host)}/statistics/tx_bytes"
    shown = subprocess.run(
        [*net.command_prefix(host), "cat", counter], capture_output=True, text=True, check=True
    )
    return int(shown.stdout)
