"""What happens to a set-up: faults drawn from the kinds that it can meet, and the run with them.

Faults are drawn from a seed, so a failure can be tried again with that seed; when in a step a fault comes is the
machine's affair.
"""

import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from manyhands import placement as placements
from tests.faults import harness, memory_group, on_hosts, registered
from tests.faults.chaos.setups import SetUp

AnyRan = harness.Ran | on_hosts.Ran

LATEST_S = 1.5  # after the first step
LAST_STEP = 30  # for what a worker does to itself
EPOCHS = 4
EPOCHS_ON_HOSTS = 8  # who is cut off must have time to come back
PAUSE_S = 0.03  # in every forward pass, until all faults have come: deaths should meet steps, not the end of the run
PAUSE_ON_HOSTS_S = 0.12
STALL_S = 2.0
DISK_BYTES = 1 << 20  # room for a few checkpoints
FULL_S = 0.7

# By where the run is. Those that end a process are counted as deaths.
WORKERS = ("kill", "kill", "segfault", "stop", "memory")
OTHERS = ("coordinator", "disk")
HOSTS = ("host", "vanish")
LINKS = ("cut", "part", "deaf", "mute", "slow")
DEADLY = {*WORKERS, *HOSTS, "server", "coordinator"}


def attack(setup: SetUp, seed: int, folder: Path) -> tuple[AnyRan, list[Any]]:
    """One run, and the faults that were drawn for it."""
    draw = random.Random(seed)
    if setup.hosts:
        return _on_hosts(setup, draw, folder)
    faults = faults_of(setup, draw)
    with _disk(folder, faults) as saving, _group(faults) as group:
        ran = harness.run(
            folder,
            faults,
            workers=setup.workers,
            strategy=setup.strategy,
            placement=setup.placement,
            servers=setup.servers,
            replace=len(faults) if setup.is_in_parts or _hits_server(faults) else draw.choice([0, 0, 1, 2]),
            stall_s=STALL_S,
            pause_s=PAUSE_S,
            until=setup.workers if setup.is_in_parts else 0,
            **saving,
            **group,
            **training(setup),
        )
    return ran, faults


def training(setup: SetUp) -> dict[str, Any]:
    """Of the script. Late gradients, and an update from every worker's own, need a smaller rate to learn at all."""
    return {
        "epochs": EPOCHS_ON_HOSTS if setup.hosts else EPOCHS,
        "lr": registered.rate(setup.strategy),
        "optimizer": registered.optimizer(setup.strategy),
    }


def faults_of(setup: SetUp, draw: random.Random) -> list[harness.Fault]:
    """For a run on one host."""
    return _victims(setup, draw) + _besides(setup, draw)


def _victims(setup: SetUp, draw: random.Random) -> list[harness.Fault]:
    """Workers that die, at once or one after the other. One whole replica is left, or one worker of the only one."""
    size = placements.parse(setup.placement).mesh(setup.workers).members
    replicas = setup.workers // size
    spared = draw.randrange(replicas)
    mortal = [who for who in range(setup.workers) if who // size != spared]
    if replicas == 1:
        mortal = draw.sample(range(setup.workers), setup.workers - 1)
    dying = draw.sample(mortal, draw.randrange(1, len(mortal) + 1 if size == 1 else 2))
    first_s, apart_s = draw.uniform(0.0, LATEST_S), draw.choice([0.0, 0.3, LATEST_S])
    kinds = [kind for kind in WORKERS if kind != "memory" or memory_group.available() is None]
    found = []
    for who in dying:
        kind = draw.choice(kinds)
        when = draw.randrange(2, LAST_STEP) if kind == "memory" else first_s + draw.uniform(0.0, apart_s)
        found.append(harness.Fault(who, when, kind))
    return found


def _besides(setup: SetUp, draw: random.Random) -> list[harness.Fault]:
    """What else may go wrong on one host."""
    others = [kind for kind in OTHERS if kind != "disk" or os.geteuid() == 0]  # who may mount one
    kind = draw.choice(["nothing", *others, *(["server"] * 3 if setup.servers else [])])
    at_s = draw.uniform(0.0, LATEST_S)
    if kind == "disk":
        return [harness.Fault(-1, at_s, "disk"), harness.Fault(-1, at_s + FULL_S, "room")]
    if kind == "server":
        return [harness.Fault(draw.randrange(setup.servers), at_s, kind)]
    return [] if kind == "nothing" else [harness.Fault(-1, at_s, kind)]


def _hits_server(faults: list[harness.Fault]) -> bool:
    return any(fault.kind == "server" for fault in faults)


@contextmanager
def _disk(folder: Path, faults: list[harness.Fault]) -> Iterator[dict[str, Any]]:
    """A small file system, where it is to be filled, and what the script must know of it."""
    if not any(fault.kind == "disk" for fault in faults):
        yield {}
        return
    place = folder / harness.DISK
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)], check=True)
    try:
        yield {"saves": str(place / "checkpoints"), "save_every": "5 steps"}
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextmanager
def _group(faults: list[harness.Fault]) -> Iterator[dict[str, Any]]:
    needed = any(fault.kind == "memory" for fault in faults)
    with memory_group.MemoryGroup() if needed else nullcontext() as group:
        yield {"memory_group": str(group.path)} if group else {}


def _on_hosts(setup: SetUp, draw: random.Random, folder: Path) -> tuple[on_hosts.Ran, list[on_hosts.Fault]]:
    """A worker or a server is killed, and a host or the way to it is lost, for ever or for some seconds.

    With servers there are three hosts and some seconds between the two: one loss at a time is what one copy is for.
    """
    layout, servers = setup.hosts, setup.servers
    host, away = draw.randrange(len(layout)), draw.randrange(1, len(layout))
    later_s = draw.uniform(1.0, 3.0) + (2.0 if servers else 0.0)
    lost = draw.choice([*HOSTS, *LINKS])
    for_s = draw.uniform(0.5, 6.0) if lost in LINKS else 0.0
    faults = [
        on_hosts.Fault((host, draw.randrange(layout[host] + servers)), draw.uniform(0.0, LATEST_S)),
        on_hosts.Fault((away,), later_s, lost, for_s),
    ]
    ran = on_hosts.run(
        folder,
        layout,
        faults,
        strategy=setup.strategy,
        servers=[servers] * len(layout),
        pause_s=PAUSE_ON_HOSTS_S,
        **training(setup),
    )
    return ran, faults
