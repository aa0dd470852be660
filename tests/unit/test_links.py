"""A link's coefficients from messages, also of a host that is busy now and then; and every pair of hosts once."""

import itertools
import random
from pathlib import Path

import pytest

from manyhands.errors import ManyhandsError
from manyhands.planner.link_worker import SIZES, rounds_of
from manyhands.planner.links import PairFacts, SentMessage, measured_links, read_links, theil_sen

ALPHA_S, BETA_S, GAMMA_S, BURST_BYTES = 80e-6, 8e-9, 1.5e-9, 1_250_000


def messages(seed: int = 0) -> list[SentMessage]:
    """A link of 1 Gbit/s with a token bucket; one message in three is held up."""
    draw = random.Random(seed)
    return [
        SentMessage(
            size=size,
            wall_s=ALPHA_S
            + max(0, size - BURST_BYTES) * BETA_S
            + min(size, BURST_BYTES) * BETA_S / 10
            + (draw.expovariate(1 / (size * BETA_S + 1e-4)) if draw.random() < 1 / 3 else 0.0),
            processor_s=size * GAMMA_S,
        )
        for size in SIZES
        for _ in range(8)
    ]


def pair(between: tuple[int, int] = (0, 1), both: float = 1.0, **more: list[float]) -> PairFacts:
    size = SIZES[-1]
    return PairFacts(
        between=between, sent=messages(sum(between)), size=size, both_s=[size * BETA_S * both], **more
    )


def test_a_link_is_found_behind_its_burst_and_its_busy_hosts() -> None:
    link = measured_links([pair()]).link
    assert link.latency_s.value == pytest.approx(ALPHA_S, rel=0.1)
    assert link.s_per_byte.value == pytest.approx(BETA_S, rel=0.02)
    assert link.cpu_s_per_byte.value == pytest.approx(GAMMA_S, rel=0.01)
    assert link.both_ways.value == pytest.approx(1.0, abs=0.05)
    low, high = link.s_per_byte.interval()
    assert low <= BETA_S * 1.02
    assert high >= BETA_S * 0.98


def test_directions_that_share_a_capacity_and_hosts_that_share_a_link() -> None:
    assert measured_links([pair(both=2.0)]).link.both_ways.value == pytest.approx(2.0, abs=0.1)
    around = PairFacts(between=(0, 1), sent=[], size=SIZES[-1], around_s=[SIZES[-1] * BETA_S * 3])
    found = measured_links([pair((0, 1)), pair((0, 2)), pair((1, 2)), around])
    assert found.link.shared
    assert found.hosts == 3
    assert set(found.pairs) == {"0-1", "0-2", "1-2"}


@pytest.mark.parametrize("count", range(2, 10))
def test_every_pair_meets_once_and_no_host_is_in_two_of_a_round(count: int) -> None:
    rounds = rounds_of(count)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(itertools.combinations(range(count), 2))
    for pairs in rounds:
        hosts = [host for pair in pairs for host in pair]
        assert len(set(hosts)) == len(hosts)
    assert len(rounds) == count - 1 + count % 2


def test_theil_sen_is_not_moved_by_one_bad_point() -> None:
    points = [(float(x), 3.0 * x + 1) for x in range(10)]
    assert theil_sen([*points, (4.5, 1e6)]) == pytest.approx(3.0, rel=0.01)


def test_a_run_that_measured_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(ManyhandsError, match="measured no links"):
        read_links(tmp_path)
