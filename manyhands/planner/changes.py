"""What would change the choice: the same search with other facts, as a person could come by them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from manyhands.planner.facts import Estimate, Facts, LinkFacts, with_hosts
from manyhands.planner.memory_need import misfit
from manyhands.planner.price import Prediction, price
from manyhands.planner.search import Choice, search, tied
from manyhands.planner.ways import Way

LINK_FACTORS = (1.5, 2.5, 4.0, 10.0, 25.0)
BATCH_FACTORS = (2, 4)

ASSUMED_GBIT = (1.0, 10.0)
"""Of a second machine's link, where none has been measured."""


@dataclass(frozen=True, kw_only=True)
class OtherChoice:
    """Another choice, and what would lead to it."""

    what: str
    best: Prediction
    ratio: float
    """Its samples per second ÷ those of the choice as it is."""


def plain_link(gbit_per_s: float) -> LinkFacts:
    """As cables and switches are where nothing was measured: 0.1 ms, and 1.5 ns of a processor per byte."""
    return LinkFacts(
        latency_s=Estimate.about(1e-4, 0.5),
        s_per_byte=Estimate.about(8e-9 / gbit_per_s, 0.1),
        cpu_s_per_byte=Estimate.about(1.5e-9, 0.3),
    )


def changes(choice: Choice) -> Iterator[OtherChoice]:
    """Those that lead to another choice, each at the smallest step that does."""
    if choice.facts.cluster.size > 1:
        yield from _of_link(choice)
    yield from _of_batch(choice)


def _of_link(choice: Choice) -> Iterator[OtherChoice]:
    link = choice.facts.cluster.link
    if link is None:
        return
    now = 8e-9 / link.s_per_byte.value
    for factor in LINK_FACTORS:
        changed = _again(choice, with_link(choice.facts, faster(link, factor)))
        if changed and _differs(changed.way, choice.best.way):
            yield OtherChoice(
                what=f"a link of {now * factor:.2g} Gbit/s or faster",
                best=changed,
                ratio=changed.rate / choice.best.rate,
            )
            return


def _of_batch(choice: Choice) -> Iterator[OtherChoice]:
    for factor in BATCH_FACTORS:
        batch = choice.facts.batch * factor
        changed = _again(choice, msgspec.structs.replace(choice.facts, batch=batch))
        if changed and _differs(changed.way, choice.best.way):
            yield OtherChoice(
                what=f"a batch of {batch} or more", best=changed, ratio=changed.rate / choice.best.rate
            )
            return


def second_machine(choice: Choice) -> Iterator[tuple[float, Prediction, Prediction]]:
    """What another machine like this one would make: Gbit/s of the link, the best way, the fastest of all ways."""
    facts = choice.facts
    if facts.cluster.size > 1:
        return
    (only,) = facts.cluster.hosts
    for gbit in ASSUMED_GBIT:
        two = with_hosts(facts, [msgspec.structs.replace(only, count=2)])
        found = search(with_link(two, plain_link(gbit)), replace(choice.wanted, hosts=2, workers=None))
        yield gbit, found.best, found.fastest


def faster(link: LinkFacts, factor: float) -> LinkFacts:
    return msgspec.structs.replace(link, s_per_byte=link.s_per_byte.times(1 / factor))


def with_link(facts: Facts, link: LinkFacts) -> Facts:
    return msgspec.structs.replace(facts, cluster=msgspec.structs.replace(facts.cluster, link=link))


def _again(choice: Choice, facts: Facts) -> Prediction | None:
    """The choice among the ways that were considered, with other facts."""
    found = [price(facts, way, draws=True) for way in choice.considered if way.trains_alike]
    fitting = [each for each in found if not misfit(facts, each.way, each.memory_bytes)]
    fitting.sort(key=lambda each: -each.rate)
    if not fitting:
        return None
    return min(tied(facts, fitting), key=lambda each: (each.way.simplicity, -each.rate))


def _differs(one: Way, other: Way) -> bool:
    return (one.strategy, one.placement, one.hosts) != (other.strategy, other.placement, other.hosts)
