"""Three levels of the price, each against the next, and the published formulas that they must give."""

import itertools
import math
import random

import pytest

from manyhands import strategies
from manyhands.placement.pipeline.timetable import BACKWARD, FORWARD, table
from manyhands.planner.collective_cost import LARGEST_SCHEDULE, demand_of, native_ring, seconds
from manyhands.planner.many_workers import price_many
from manyhands.planner.memory_need import misfit
from manyhands.planner.passes import replay
from manyhands.planner.price import price
from manyhands.planner.server_queue import mean_value
from manyhands.planner.simulation import price_events
from manyhands.planner.stragglers import expected_largest, slowest
from tests.planner_facts import facts, host, model, way

SMALL = 2**18
"""Bytes that pass as one stripe: the rounds follow each other, as in the formulas."""

ALPHA, BETA, GAMMA = 1e-4, 8e-9, 1.5e-9


def cost(topology: str, hosts: int) -> float:
    found: float = seconds(
        demand_of(topology, hosts, 1), SMALL, latency_s=ALPHA, s_per_byte=BETA, add_s=GAMMA, inner_s=0.0
    )
    return found


def ring(hosts: int) -> float:
    share = (hosts - 1) / hosts
    return 2 * (hosts - 1) * ALPHA + 2 * share * SMALL * BETA + share * SMALL * GAMMA


def tree(hosts: int) -> float:
    rounds = math.ceil(math.log2(hosts))
    return 2 * rounds * (ALPHA + SMALL * BETA) + rounds * SMALL * GAMMA


def halving_doubling(hosts: int) -> float:
    share = (hosts - 1) / hosts
    return 2 * math.log2(hosts) * ALPHA + 2 * share * SMALL * BETA + share * SMALL * GAMMA


FORMULAS = {"ring": ring, "tree": tree, "halving-doubling": halving_doubling, "hierarchical": ring}


@pytest.mark.parametrize("topology", FORMULAS)
@pytest.mark.parametrize("hosts", [2, 4, 16, 32])
def test_a_schedule_costs_what_its_formula_says(topology: str, hosts: int) -> None:
    assert cost(topology, hosts) == pytest.approx(FORMULAS[topology](hosts))


@pytest.mark.parametrize("topology", FORMULAS)
def test_what_is_too_large_to_write_down_follows_from_what_is_not(topology: str) -> None:
    for hosts in (4 * LARGEST_SCHEDULE, 4096):
        assert cost(topology, hosts) == pytest.approx(FORMULAS[topology](hosts), rel=0.01)


def test_the_ring_of_the_library_is_a_ring() -> None:
    for hosts in (2, 5):
        ours, theirs = native_ring(hosts), demand_of("ring", hosts, 1)
        assert ours.rounds == theirs.rounds
        assert ours.crossing == pytest.approx(theirs.crossing)
        assert ours.added == pytest.approx(theirs.added)


def test_long_vectors_take_as_long_as_the_busiest_link() -> None:
    """Stripes follow each other through a tree: its root sends log N vectors, and not 2 log N."""
    size = 1e9
    took = seconds(demand_of("tree", 8, 1), size, latency_s=0.0, s_per_byte=BETA, add_s=0.0, inner_s=0.0)
    assert took == pytest.approx(3 * size * BETA, rel=0.02)


# Waiting


def test_the_largest_of_many_is_that_of_many_draws() -> None:
    steps = tuple(random.Random(0).lognormvariate(0, 0.2) for _ in range(600))
    draws = random.Random(1)
    for count in (2, 16, 100):
        seen = sum(max(draws.choices(steps, k=count)) for _ in range(2000)) / 2000
        assert expected_largest(steps, count) == pytest.approx(seen, rel=0.02)


def test_beyond_what_was_measured_the_largest_goes_on_growing() -> None:
    steps = tuple(1.0 + random.Random(number).expovariate(10) for number in range(90))
    found = [expected_largest(steps, count) for count in (30, 300, 3000)]
    assert found == sorted(found)
    assert found[2] - found[1] == pytest.approx(0.1 * math.log(10), rel=0.5)


def test_workers_who_meet_seldom_wait_less() -> None:
    steps = (1.0,) * 8 + (3.0,) * 2
    assert slowest(steps, 8, 1) > slowest(steps, 8, 4) > 1.0
    assert slowest(steps, 1) == 1.0


def test_stale_servers_beside_synchronous_ones() -> None:
    """4 workers of which each has one slow step in five, five times as long. Runs of 200 steps of ours made 1.634 times
    as many with a bound of 4, and the recursion 1.636 for their very steps; without an end it makes 1.627."""
    slow = (1.0,) * 8 + (5.0,) * 2
    kind = host(jitter=slow, exact=True)
    known = facts(kind=kind, of=model(10_000))
    sync, stale = (
        price_many(known, way(f"parameter-server:{rule}", servers=1), steps=3000)
        for rule in ("consistency=sync", "consistency=stale")
    )
    assert stale.rate / sync.rate == pytest.approx(1.627, rel=0.02)


def test_a_queue_takes_no_longer_than_its_customers_and_no_shorter_than_its_work() -> None:
    for think, demand, customers in itertools.product((0.0, 0.1, 1.0), (0.01, 0.1), (1, 4, 32)):
        response = mean_value(think, demand, customers)
        assert demand <= response <= customers * demand + 1e-12
        rate = customers / (think + response)
        assert rate <= min(customers / (think + demand), 1 / demand) + 1e-9


# Placements


@pytest.mark.parametrize(("stages", "micros"), [(2, 4), (4, 8), (3, 3)])
def test_the_bubble_of_a_pipeline(stages: int, micros: int) -> None:
    """Equal stages are idle for (p − 1) ÷ (m + p − 1) of a step."""
    lengths = {FORWARD: 1 / 3, BACKWARD: 2 / 3}
    length = replay(table("gpipe", stages, 1, micros), (1 / stages,) * stages, lengths, rest=0.0)
    busy = micros / stages
    assert 1 - busy / length == pytest.approx((stages - 1) / (micros + stages - 1), rel=1e-6)


def test_a_model_that_is_divided_computes_less_and_exchanges_more() -> None:
    known = facts(of=model(layers=True))
    whole = price(known, way("all-reduce"))
    divided = price(known, way("all-reduce", placement="tensor:ways=2"))
    assert divided.terms["compute"] == pytest.approx(whole.terms["compute"] / 2, rel=0.01)
    assert divided.samples == whole.samples / 2
    assert divided.memory_bytes["here"] < whole.memory_bytes["here"]


# Level against level


def served(name: str) -> int:
    return 1 if strategies.parse(name).traits.servers else 0


NAMES = [name for name in strategies.STRATEGIES if name != "single"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hosts", [1, 4])
def test_the_closed_form_is_what_many_clocks_show(name: str, hosts: int) -> None:
    known, each = facts(hosts), way(name, hosts, servers=served(name))
    assert price_many(known, each).seconds == pytest.approx(price(known, each).seconds, rel=0.06)


@pytest.mark.parametrize("name", [name for name in NAMES if not served(name)])
@pytest.mark.parametrize("hosts", [1, 4])
def test_many_clocks_are_what_events_show(name: str, hosts: int) -> None:
    known, each = facts(hosts), way(name, hosts, 2, 2)
    assert price_events(known, each, steps=8).seconds == pytest.approx(
        price_many(known, each).seconds, rel=0.08
    )


@pytest.mark.parametrize(
    ("hosts", "processes", "servers"), [(1, 3, 1), (2, 1, 1), (2, 2, 2), (4, 1, 1), (4, 1, 4)]
)
@pytest.mark.parametrize("name", ["parameter-server", "parameter-server:async", "downpour"])
def test_servers_in_closed_form_are_near_what_events_show(
    name: str, hosts: int, processes: int, servers: int
) -> None:
    """The knee of a queue and a first host that is faster are what events are for: within three tenths."""
    known = facts(hosts, kind=host(cores=4, exact=True))
    known_split = 2 if processes == 3 else processes
    each = way(name, hosts, known_split, 4 // known_split, servers=servers)
    assert price(known, each).seconds == pytest.approx(price_events(known, each, steps=10).seconds, rel=0.3)


def test_many_workers_are_priced_at_once() -> None:
    known = facts(4096, kind=host(cores=1))
    for name in ("all-reduce", "local-sgd", "all-reduce:topology=hierarchical"):
        each = way(name, 4096, 1, 1)
        assert price(known, each).seconds > 0
        assert price_many(known, each, steps=16).seconds > 0


# Memory


def test_what_does_not_fit_is_said_with_numbers() -> None:
    known = facts(kind=host(memory_gb=1.0))
    each = price(known, way("all-reduce"))
    reason = misfit(known, each.way, each.memory_bytes)
    assert "GB on a host of kind here, which has 1.0 GB" in reason
    assert not misfit(facts(), each.way, each.memory_bytes)


def test_a_shared_replica_is_there_once() -> None:
    known = facts()
    shared, own = (price(known, way(name)).memory_bytes["here"] for name in ("all-reduce", "local-sgd"))
    assert own - shared == pytest.approx(
        3 * 2 * known.model.bytes, rel=0.01
    )  # parameters and state of three more
