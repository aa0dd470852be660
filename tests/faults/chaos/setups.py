"""Set-ups, made from what is registered: what somebody registers is attacked with no edit here."""

from dataclasses import dataclass

from manyhands import placement as placements
from manyhands import strategies
from manyhands.errors import UsageError
from manyhands.launching.run import admit_hosts
from tests.faults import registered

LAYOUTS = ((2, 2), (1, 2, 1), (2, 1, 1))  # workers of each host
SPARE = 4  # replicas: all but one may be lost


@dataclass(frozen=True, kw_only=True)
class SetUp:
    strategy: str
    workers: int
    placement: str = placements.DEFAULT
    servers: int = 0  # with hosts, those of each
    hosts: tuple[int, ...] = ()  # workers of each; none where the run has one host and needs no network

    @property
    def where(self) -> str:
        return "hosts" if self.hosts else "parts" if self.is_in_parts else "one host"

    @property
    def is_in_parts(self) -> bool:
        return placements.parse(self.placement).mesh(self.workers).members > 1

    def __str__(self) -> str:
        parts = [self.strategy, *([self.placement] if self.is_in_parts else [])]
        workers = "+".join(map(str, self.hosts)) if self.hosts else str(self.workers)
        return f"{' × '.join(parts)}, {workers} workers"


def one_host() -> list[SetUp]:
    """Every strategy, preset and topology on whole replicas."""
    return [
        SetUp(strategy=text, workers=workers, servers=registered.servers(text))
        for text in registered.every_strategy()
        if (workers := registered.workers(text, replicas=SPARE))
    ]


def in_parts() -> list[SetUp]:
    """Every placement under the default strategy, every strategy under the smallest placement: two replicas, and one,
    if a new worker can take over a part of it."""
    every = registered.every_placement()
    cases = {(strategies.DEFAULT, placement) for placement in every}
    fewest = {text: registered.workers(strategies.DEFAULT, text, replicas=2, apart=True) for text in every}
    smallest = min((number, text) for text, number in fewest.items() if number)[1]
    cases |= {(strategy, smallest) for strategy in registered.every_strategy()}
    found = []
    for strategy, placement in sorted(cases):
        for replicas in (2, 1):
            workers = registered.workers(strategy, placement, replicas=replicas, apart=True)
            if workers and registered.outlives(strategy, placement, workers):
                found.append(SetUp(strategy=strategy, placement=placement, workers=workers))
    return found


def on_hosts() -> list[SetUp]:
    """Every strategy that is for several hosts, servers with a copy of what each has, in one layout after the other."""
    found = []
    for text in registered.every_strategy():
        served = strategies.parse(text).traits.servers is not None
        asked = f"{text}{',' if ':' in text else ':'}copies=1" if served else text
        if registered.workers(text, replicas=SPARE) and is_for_hosts(asked):
            layout = LAYOUTS[1 + len(found) % 2] if served else LAYOUTS[len(found) % len(LAYOUTS)]
            found.append(SetUp(strategy=asked, workers=sum(layout), hosts=layout, servers=int(served)))
    return found


def is_for_hosts(strategy: str) -> bool:
    try:
        admit_hosts(strategies.parse(strategy))
    except UsageError:
        return False
    return True
