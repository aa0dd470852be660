"""Kills at random instants, over all strategies that survive: `python -m tests.faults.chaos [kills] [first seed]`.

Every run has a seed, which is printed and decides everything that is not a matter of the machine: which strategy, who
is killed, how and when. A failure can so be tried again with that seed.
"""

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from manyhands.lab import hosts as emulation
from tests.faults import harness, on_hosts
from tests.faults.harness import Fault

AnyRan = harness.Ran | on_hosts.Ran

# With the number of servers, and a learning rate that fits: an update from all batches, from one, or late.
STRATEGIES = (
    ("all-reduce", 0, 0.05),
    ("parameter-server:sync", 2, 0.05),
    ("hogwild", 0, 0.01),
    ("local-sgd:period=4", 0, 0.0125),
    ("parameter-server:stale,bound=2", 2, 0.01),
    ("tournament", 0, 0.0125),
    ("all-reduce:topology=ring", 0, 0.05),
    ("parameter-server:async", 1, 0.01),
    ("gossip", 0, 0.0125),
    ("ad-psgd", 0, 0.0125),
    ("double-buffer", 0, 0.025),
    ("downpour:fetch=2,push=2", 2, 0.005),
    ("parameter-server:sync,cache=true,every=output=2", 2, 0.05),
    ("parameter-server:sync,every=output=2", 1, 0.05),
    ("worker-groups:groups=2,server_groups=2", 2, 0.02),
    *([] if emulation.available() else [("all-reduce on emulated hosts", 0, 0.05)]),
)
LAYOUTS = ((2, 2), (1, 2, 1), (2, 1, 1))  # workers of each host
WORKERS = 4
EPOCHS = 6
PAUSE_S = 0.003  # in every forward pass: deaths should meet steps, not the end of the run
LATEST_S = 1.5
POINT = 0.01


def one(seed: int, folder: Path) -> tuple[AnyRan, str]:
    """One run with up to three kills of workers, of which some are replaced; where there are servers perhaps one of a
    server, which always is."""
    draw = random.Random(seed)
    strategy, servers, lr = STRATEGIES[seed % len(STRATEGIES)]
    if "hosts" in strategy:
        return one_on_hosts(draw, folder, strategy, lr), strategy
    victims = draw.sample(range(WORKERS), draw.randrange(1, WORKERS))
    kinds = ["kill"] * 8 + ["segfault", "stop"]
    faults = [Fault(who, draw.uniform(0.0, LATEST_S), draw.choice(kinds)) for who in victims]
    replace = draw.choice([0, 0, 1])
    if servers and draw.random() < 0.5:
        faults.append(Fault(draw.randrange(servers), draw.uniform(0.0, LATEST_S), "server"))
        replace = len(faults)
    ran = harness.run(
        folder,
        faults,
        workers=WORKERS,
        strategy=strategy,
        servers=servers,
        replace=replace,
        stall_s=2.0,
        digits=True,
        epochs=EPOCHS,
        pause_s=PAUSE_S,
        lr=lr,
    )
    return ran, strategy


def one_on_hosts(draw: random.Random, folder: Path, strategy: str, lr: float) -> on_hosts.Ran:
    """One run with a kill of a worker, and the loss of a host that does not come back or of the way to it."""
    layout = draw.choice(LAYOUTS)
    host = draw.randrange(len(layout))
    away = draw.randrange(1, len(layout))
    faults = [
        on_hosts.Fault((host, draw.randrange(layout[host])), draw.uniform(0.0, LATEST_S)),
        on_hosts.Fault((away,), draw.uniform(1.0, 4.0), draw.choice(["host", "vanish"]))
        if draw.random() < 0.5
        else on_hosts.Fault(
            (away,), draw.uniform(1.0, 4.0), draw.choice(["cut", "part"]), draw.uniform(0.5, 6.0)
        ),
    ]
    return on_hosts.run(folder, layout, faults, digits=True, epochs=EPOCHS, pause_s=0.02, lr=lr)


def calm(folder: Path, strategy: str, servers: int, lr: float) -> AnyRan:
    """A run in which nobody dies."""
    settings = {"digits": True, "epochs": EPOCHS, "pause_s": PAUSE_S, "lr": lr}
    if "hosts" in strategy:
        return on_hosts.run(folder, LAYOUTS[0], [], **settings)
    return harness.run(folder, [], workers=WORKERS, strategy=strategy, servers=servers, **settings)


def check(ran: AnyRan, length: int) -> None:
    """What must hold whoever died."""
    ends = ran.ends
    assert ends, "somebody has finished"
    for number, end in ends.items():
        assert end["pid"] == ran.logs[number][0]["pid"]
        assert end["tally"] == {"once": EPOCHS * length, "twice": 0, "never": 0}, end
    first = ran.parameters(min(ends))
    assert all(torch.equal(first, ran.parameters(number)) for number in ends), "the same bits everywhere"


def main(kills: int, seed: int) -> None:
    baselines: dict[str, float] = {}
    length = 0
    for strategy, servers, lr in STRATEGIES:
        with tempfile.TemporaryDirectory() as folder:
            ran = calm(Path(folder), strategy, servers, lr)
        baselines[strategy] = ran.ends[0]["accuracy"]
        length = ran.ends[0]["samples"] // EPOCHS
        print(f"{strategy}: {baselines[strategy]:.4f} without deaths", flush=True)
    fired = 0
    noticed: list[float] = []
    stood: list[float] = []
    silent: list[float] = []
    lost: list[float] = []
    while fired < kills:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                ran, strategy = one(seed, Path(folder))
                check(ran, length)
            except BaseException:
                print(f"seed {seed} ({STRATEGIES[seed % len(STRATEGIES)][0]}) has failed", flush=True)
                raise
        deaths, hosts = ran.fields_of("death"), ran.fields_of("host")
        all_deaths = len(deaths) + len(hosts) + len(ran.of("server"))
        fired += all_deaths
        told = [fields for fields in deaths if "noticed_s" in fields]
        silent += [float(fields["noticed_s"]) for fields in hosts]
        noticed += [float(fields["noticed_s"]) for fields in told]
        stood += [float(fields["stood_s"]) for fields in told]
        accuracy = ran.ends[min(ran.ends)]["accuracy"]
        lost.append(baselines[strategy] - accuracy)
        print(
            f"seed {seed}: {strategy}, {all_deaths} deaths, {len(ran.ends)} finished, accuracy {accuracy:.4f}, "
            f"{time.monotonic() - began_s:.1f} s; {fired} of {kills}",
            flush=True,
        )
        seed += 1
    print(
        f"{fired} deaths; noticed after {statistics.median(noticed):.3f} s, next step after "
        f"{statistics.median(stood):.3f} s (medians); accuracy {-statistics.mean(lost) * 100:+.2f} points against "
        f"runs without deaths, worst {-max(lost) * 100:+.2f}"
        + (f"; {len(silent)} hosts, noticed after {statistics.median(silent):.3f} s" if silent else "")
    )
    assert statistics.mean(lost) <= POINT, "deaths cost accuracy"


if __name__ == "__main__":
    main(*(int(argument) for argument in [*sys.argv[1:], *("200", "1")[len(sys.argv) - 1 :]]))
