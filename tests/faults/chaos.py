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
from typing import Any

import torch

from manyhands.lab import emulated_hosts as emulation
from tests.faults import harness, on_hosts
from tests.faults.harness import Fault

AnyRan = harness.Ran | on_hosts.Ran

ON_HOSTS = " on emulated hosts"

# With the number of servers (there, of each host), and a learning rate that fits: an update from all batches, from one,
# or late.
STRATEGIES = (
    ("all-reduce", 0, 0.05),
    ("parameter-server:sync", 2, 0.05),
    ("hogwild", 0, 0.01),
    ("local-sgd:period=4", 0, 0.0125),
    ("parameter-server:stale,bound=2", 2, 0.01),
    ("tournament", 0, 0.025),
    ("all-reduce:topology=ring", 0, 0.05),
    ("parameter-server:async", 1, 0.01),
    ("gossip", 0, 0.0125),
    ("ad-psgd", 0, 0.0125),
    ("double-buffer", 0, 0.025),
    ("downpour:fetch=2,push=2", 2, 0.005),
    ("parameter-server:sync,cache=true,every=output=2", 2, 0.05),
    ("parameter-server:sync,every=output=2", 1, 0.05),
    ("worker-groups:groups=2,server_groups=2", 2, 0.02),
    *(
        []
        if emulation.available()
        else [
            ("all-reduce on emulated hosts", 0, 0.05),
            ("parameter-server:sync,copies=1 on emulated hosts", 1, 0.05),
            ("parameter-server:async,copies=1 on emulated hosts", 1, 0.01),
        ]
    ),
)
LAYOUTS = ((2, 2), (1, 2, 1), (2, 1, 1))  # workers of each host
WORKERS = 4
EPOCHS = 6
# Each of four trainers makes a quarter of the steps, and after 6 epochs is far from done: without any death, seeds
# are up to 7 points apart then (87.2–94.7 %), and nothing can be compared.
MORE_EPOCHS = {"tournament": 24}
SEEDS = (
    3  # of the training itself, with deaths and without: one alone is off by more than a point now and then
)
PAUSE_S = 0.003  # in every forward pass: deaths should meet steps, not the end of the run
LATEST_S = 1.5
POINT = 0.01


def settings(strategy: str, lr: float, seed: int) -> dict[str, Any]:
    """Of the training: for the script."""
    return {"digits": True, "epochs": MORE_EPOCHS.get(strategy, EPOCHS), "lr": lr, "seed": seed % SEEDS}


def one(seed: int, folder: Path) -> tuple[AnyRan, str]:
    """One run with up to three kills of workers, of which some are replaced; where there are servers perhaps one of a
    server, which always is."""
    draw = random.Random(seed)
    strategy, servers, lr = STRATEGIES[seed % len(STRATEGIES)]
    training = settings(strategy, lr, seed // len(STRATEGIES))
    if ON_HOSTS in strategy:
        return one_on_hosts(draw, folder, strategy, servers, training), strategy
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
        pause_s=PAUSE_S,
        **training,
    )
    return ran, strategy


def one_on_hosts(
    draw: random.Random, folder: Path, strategy: str, servers: int, training: dict[str, Any]
) -> on_hosts.Ran:
    """One run with a kill of a worker or a server, and the loss of a host that does not come back or of the way to it.

    With servers there are three hosts and some seconds between the two: one loss at a time is what one copy is for.
    """
    layout = draw.choice(LAYOUTS[1:] if servers else LAYOUTS)
    host = draw.randrange(len(layout))
    away = draw.randrange(1, len(layout))
    later_s = draw.uniform(1.0, 4.0) + (2.0 if servers else 0.0)
    faults = [
        on_hosts.Fault((host, draw.randrange(layout[host] + servers)), draw.uniform(0.0, LATEST_S)),
        on_hosts.Fault((away,), later_s, draw.choice(["host", "vanish"]))
        if draw.random() < 0.5
        else on_hosts.Fault((away,), later_s, draw.choice(["cut", "part"]), draw.uniform(0.5, 6.0)),
    ]
    pause_s = 0.03 if servers else 0.02
    return _run_on_hosts(folder, layout, faults, strategy, servers, pause_s=pause_s, **training)


def _run_on_hosts(
    folder: Path,
    layout: tuple[int, ...],
    faults: list[on_hosts.Fault],
    strategy: str,
    servers: int,
    **training: Any,
) -> on_hosts.Ran:
    name, everywhere = strategy.removesuffix(ON_HOSTS), [servers] * len(layout)
    return on_hosts.run(folder, layout, faults, strategy=name, servers=everywhere, **training)


def calm(folder: Path, strategy: str, servers: int, training: dict[str, Any]) -> AnyRan:
    """A run in which nobody dies."""
    if ON_HOSTS in strategy:
        return _run_on_hosts(folder, LAYOUTS[0], [], strategy, servers, **training)
    return harness.run(folder, [], workers=WORKERS, strategy=strategy, servers=servers, **training)


def check(ran: AnyRan, samples: int) -> None:
    """What must hold after any death."""
    ends = ran.ends
    assert ends, "somebody has finished"
    for number, end in ends.items():
        assert end["pid"] == ran.logs[number][0]["pid"]
        assert end["tally"] == {"once": samples, "twice": 0, "never": 0}, end
    first = ran.parameters(min(ends))
    assert all(torch.equal(first, ran.parameters(number)) for number in ends), "the same bits everywhere"


def main(kills: int, seed: int) -> None:
    without: dict[str, list[float]] = {}
    samples: dict[str, int] = {}
    for strategy, servers, lr in STRATEGIES:
        for training_seed in range(SEEDS):
            with tempfile.TemporaryDirectory() as folder:
                ran = calm(Path(folder), strategy, servers, settings(strategy, lr, training_seed))
            without.setdefault(strategy, []).append(ran.ends[0]["accuracy"])
            samples[strategy] = ran.ends[0]["samples"]
        print(f"{strategy}: {_percent(without[strategy])} without deaths", flush=True)
    fired = 0
    noticed: list[float] = []
    stood: list[float] = []
    silent: list[float] = []
    after: dict[str, list[float]] = {}
    while fired < kills:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                ran, strategy = one(seed, Path(folder))
                check(ran, samples[strategy])
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
        after.setdefault(strategy, []).append(accuracy)
        print(
            f"seed {seed}: {strategy}, {all_deaths} deaths, {len(ran.ends)} finished, accuracy {accuracy:.4f}, "
            f"{time.monotonic() - began_s:.1f} s; {fired} of {kills}",
            flush=True,
        )
        seed += 1
    lost = {name: statistics.mean(without[name]) - statistics.mean(each) for name, each in after.items()}
    for name, each in after.items():
        print(f"{name}: {_percent(each)} with deaths, {_percent(without[name])} without")
    print(
        f"{fired} deaths; noticed after {statistics.median(noticed):.3f} s, next step after "
        f"{statistics.median(stood):.3f} s (medians); accuracy {-statistics.mean(lost.values()) * 100:+.2f} points "
        f"against runs without deaths, worst strategy {-max(lost.values()) * 100:+.2f}"
        + (f"; {len(silent)} hosts, noticed after {statistics.median(silent):.3f} s" if silent else "")
    )
    assert max(lost.values()) <= POINT, f"deaths cost accuracy: {lost}"


def _percent(each: list[float]) -> str:
    return f"{statistics.mean(each):.2%} ({min(each):.2%}–{max(each):.2%}, {len(each)} runs)"


if __name__ == "__main__":
    main(*(int(argument) for argument in [*sys.argv[1:], *("200", "1")[len(sys.argv) - 1 :]]))
