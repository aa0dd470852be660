"""Clusters that are not here: what a file may say, what it may not, and what follows from it."""

from pathlib import Path

import pytest

from manyhands.errors import UsageError
from manyhands.planner.candidates import WayLimits
from manyhands.planner.cluster_file import read_cluster
from manyhands.planner.cluster_words import cluster_json, cluster_lines
from manyhands.planner.facts import ClusterFacts, Facts
from manyhands.planner.scaled_host import scaled
from manyhands.planner.scaling import cheapest, curves, goodput
from manyhands.planner.search import search
from tests.planner_facts import host, model

GOOD = """
recovery_s = 30
[[hosts]]
kind = "here"
count = 2
cost_per_hour = 1.0
[[hosts]]
kind = "big"
count = 2
cores = 8
memory_gb = 32
gflops_per_core = 100
gbytes_per_s_per_core = 8
cost_per_hour = 3.0
failures_per_hour = 6
[link]
gbit_per_s = 10
[[links]]
between = ["here", "big"]
gbit_per_s = 1
"""


def read(tmp_path: Path, text: str) -> ClusterFacts:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return read_cluster(path, host())


def planned(tmp_path: Path, text: str = GOOD) -> Facts:
    return Facts(model=model(), cluster=read(tmp_path, text), batch=32)


def test_hosts_and_links_are_read(tmp_path: Path) -> None:
    cluster = read(tmp_path, GOOD)
    assert cluster.size == 4
    here, big = cluster.hosts
    assert here.host.measured
    assert not big.host.measured
    assert (big.host.cores, big.host.memory_bytes, big.cost_per_hour) == (8, 32e9, 3.0)
    assert cluster.link
    assert cluster.link.s_per_byte.value == pytest.approx(0.8e-9)
    assert cluster.links[0][2].s_per_byte.value == pytest.approx(8e-9)
    assert cluster.recovery_s == 30


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('kind = "big"', 'kind = "here"', "kind 'here' is there 2 times"),
        ("cores = 8", "core = 8", "unknown word 'core'; known: .*did you mean cores"),
        ("cores = 8", 'cores = "many"', "hosts.*Expected `int"),
        ("cores = 8", "cores = -8", "cores = -8: it must be above 0"),
        ("memory_gb = 32", "memory_gb = nan", "memory_gb = nan: it must be above 0"),
        ("cost_per_hour = 3.0", "cost_per_hour = -3", "cost_per_hour = -3: it must be 0 or more"),
        ("gbit_per_s = 10", "gbit_per_s = 0", "gbit_per_s = 0: it must be above 0"),
        ("gbit_per_s = 10", "gbit_per_s = 10\nboth_ways = 3", "both_ways from 1"),
        ('between = ["here", "big"]', 'between = ["here", "huge"]', "'huge' is none of them"),
        ("[link]\ngbit_per_s = 10", "", "4 hosts and no .link. between them"),
        ("[link]", "[lnk]", "unknown word 'lnk'; known: .*did you mean link"),
        ("count = 2\ncores", "count = 9000\ncores", "at most 4096"),
        ("[[hosts]]", "[[hosts", "is not valid TOML"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GOOD
    with pytest.raises(UsageError, match=said) as caught:
        read(tmp_path, GOOD.replace(old, new))
    assert "\n" not in str(caught.value)
    assert "cluster.toml" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the cluster file"):
        read_cluster(tmp_path / "none.toml", host())


def test_a_host_is_scaled_by_the_reference_kernels() -> None:
    base = host(cores=4)
    same = scaled(base, "same", cores=4, memory_bytes=base.memory_bytes)
    twice = scaled(base, "twice", cores=8, memory_bytes=base.memory_bytes, flops_per_s=1e11, bytes_per_s=16e9)
    uneven = scaled(base, "uneven", cores=4, memory_bytes=base.memory_bytes, flops_per_s=2e11)
    one = {split.processes: split for split in base.splits}
    for found, factor in ((same, 1.0), (twice, 0.5)):
        whole = {split.processes: split for split in found.splits}[4]
        assert whole.sample_cpu_s.value / one[4].sample_cpu_s.value == pytest.approx(
            factor * (1.08 if whole.threads == 2 else 1.0)
        )
    assert {split.processes * split.threads for split in twice.splits} == {8}
    assert uneven.spread > same.spread >= 0.25, "one kernel says 4 times as fast, the other one as fast"


def test_curves_say_where_half_is_wasted(tmp_path: Path) -> None:
    text = '[[hosts]]\nkind = "here"\ncount = 64\n[link]\ngbit_per_s = 1\n'
    known = planned(tmp_path, text)
    found = {
        curve.strategy: curve for curve in curves(known, WayLimits(), ["all-reduce:topology=tree", "diloco"])
    }
    tree, seldom = found["all-reduce:topology=tree"], found["diloco"]
    assert tree.half_wasted_at
    assert tree.half_wasted_at <= 4
    assert seldom.half_wasted_at is None
    lines = "\n".join(cluster_lines(known, list(found.values()), 12, None))
    assert f"{tree.half_wasted_at} hosts" in lines
    assert "none of these" in lines


def test_failures_cost_and_money_too(tmp_path: Path) -> None:
    known = planned(tmp_path)
    (curve,) = curves(known, WayLimits(), ["all-reduce"])
    last = curve.points[-1]
    lost = 1 - goodput(known, last.prediction) / last.prediction.rate
    assert lost == pytest.approx(12 / 3600 * (30 + last.prediction.seconds / 2), rel=0.15)
    day = cheapest(known, [curve], 12, 86400)
    assert day
    assert day.cost == pytest.approx(day.seconds / 3600 * day.point.cost_per_hour)
    assert day.point.hosts == 1, "more hosts never cost less"
    fast = cheapest(known, [curve], 12, day.seconds * 0.9)
    assert fast
    assert fast.point.hosts > 1
    assert cheapest(known, [curve], 12, 1.0) is None
    said = "\n".join(cluster_lines(known, [curve], 12, 86400))
    assert "cheapest within 1.0 d" in said or "cheapest within 24.0 h" in said
    assert "hosts of kind big were never measured" in said
    assert cluster_json(known, [curve], 12, 86400)["cheapest"]["cost"] == day.cost


def test_hosts_of_several_kinds_take_part(tmp_path: Path) -> None:
    choice = search(planned(tmp_path, GOOD.replace("gbit_per_s = 1\n", "gbit_per_s = 100\n")))
    assert {each.kind for each in choice.best.way.hosts} == {"here", "big"}
    assert choice.best.spread >= 0.25
