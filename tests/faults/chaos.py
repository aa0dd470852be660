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

from tests.faults import harness
from tests.faults.harness import Fault, Ran

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
)
WORKERS = 4
EPOCHS = 6
PAUSE_S = 0.003  # in every forward pass: deaths should meet steps, not the end of the run
LATEST_S = 1.5
POINT = 0.01


def one(seed: int, folder: Path) -> tuple[Ran, str]:
    """One run with up to three kills of workers, of which some are replaced; where there are servers perhaps one of a
    server, which always is."""
    draw = random.Random(seed)
    strategy, servers, lr = STRATEGIES[seed % len(STRATEGIES)]
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


def check(ran: Ran, length: int) -> None:
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
            calm = harness.run(
                Path(folder),
                [],
                workers=WORKERS,
                strategy=strategy,
                servers=servers,
                digits=True,
                epochs=EPOCHS,
                pause_s=PAUSE_S,
                lr=lr,
            )
        baselines[strategy] = calm.ends[0]["accuracy"]
        length = calm.ends[0]["samples"] // EPOCHS
        print(f"{strategy}: {baselines[strategy]:.4f} without deaths", flush=True)
    fired, noticed, stood, lost = 0, [], [], []
    while fired < kills:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                ran, strategy = one(seed, Path(folder))
                check(ran, length)
            except BaseException:
                print(f"seed {seed} ({STRATEGIES[seed % len(STRATEGIES)][0]}) has failed", flush=True)
                raise
        deaths = ran.of("death")
        all_deaths = len(deaths) + len(ran.of("server"))
        fired += all_deaths
        told = [event.fields for event in deaths if "noticed_s" in event.fields]
        noticed += [float(str(fields["noticed_s"])) for fields in told]
        stood += [float(str(fields["stood_s"])) for fields in told]
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
    )
    assert statistics.mean(lost) <= POINT, "deaths cost accuracy"


if __name__ == "__main__":
    main(*(int(argument) for argument in [*sys.argv[1:], *("200", "1")[len(sys.argv) - 1 :]]))
