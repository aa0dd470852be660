"""Which way a search chooses, how fast, and what it says of it."""

import itertools
import time
from xml.etree import ElementTree

import msgspec
import pytest

from manyhands import strategies
from manyhands.errors import UsageError
from manyhands.planner import drawing, explain
from manyhands.planner.candidates import WayLimits
from manyhands.planner.changes import changes, with_link
from manyhands.planner.facts import Facts, HostsOfKind, with_hosts
from manyhands.planner.price import price
from manyhands.planner.search import search
from manyhands.planner.simulation import price_events
from manyhands.planner.walk import TERMS
from tests.planner_facts import facts, host, link, model, way


def test_one_core_has_one_worker() -> None:
    choice = search(facts(kind=host(cores=1)))
    assert choice.best.way.workers == 1
    assert choice.best.way.strategy == "single"


def test_all_cores_compute() -> None:
    best = search(facts(indistinct=0.0)).best
    assert (best.way.workers, best.way.hosts[0].threads) == (4, 1), "threads lose 8 % each"
    assert best.way.trains_alike


def test_a_slow_link_is_left_alone() -> None:
    """60 MB over 0.1 Gbit/s take 5 s, and a step 0.4 s."""
    slow, fast = (search(facts(2, gbit_per_s=gbit)).best for gbit in (0.1, 100.0))
    assert slow.way.host_count == 1
    assert fast.way.host_count == 2
    assert fast.rate > 1.8 * slow.rate


def test_what_a_person_has_fixed_stays() -> None:
    wanted = WayLimits(strategy="parameter-server:stale", workers=2, threads=2, servers=2)
    best = search(facts(), wanted).best
    assert best.way.strategy == "parameter-server:consistency=stale"
    assert (best.way.workers, best.way.hosts[0].threads, best.way.servers) == (2, 2, 2)


def test_other_steps_are_shown_and_not_chosen() -> None:
    choice = search(facts(4))
    assert choice.best.way.trains_alike
    assert choice.fastest.rate > choice.best.rate
    assert not choice.fastest.way.trains_alike
    assert "its steps are not those of one process" in explain.paragraph(choice)
    alone = search(facts(4), WayLimits(alike_only=True))
    assert all(each.way.trains_alike for each in alone.table)


def test_a_noisy_machine_prefers_what_is_simpler_and_says_so() -> None:
    calm, noisy = (search(facts(indistinct=indistinct)) for indistinct in (0.01, 0.3))
    assert calm.best.way.workers == 4
    assert noisy.best.way.workers < 4
    assert len(noisy.ties) > len(calm.ties)
    assert "the same way differs from itself by 30.0%" in explain.paragraph(noisy)


def test_a_split_that_cannot_run_is_left_out() -> None:
    kind = host()
    broken = [
        msgspec.structs.replace(split, error="it traps") if split.processes == 4 else split
        for split in kind.splits
    ]
    choice = search(facts(kind=msgspec.structs.replace(kind, splits=tuple(broken))))
    assert choice.best.way.workers == 2
    none = msgspec.structs.replace(kind, splits=tuple(broken[2:]))
    with pytest.raises(UsageError, match="no way can run here: it traps"):
        search(facts(kind=none))


def test_no_plan_that_does_not_fit() -> None:
    kind = host(memory_gb=1.0)
    choice = search(facts(kind=kind))
    assert choice.best.memory_bytes["here"] < 1e9
    assert choice.refused
    with pytest.raises(
        UsageError, match=r"no way fits: even .* which has 0\.2 GB; use a smaller batch than 32"
    ):
        search(facts(kind=host(memory_gb=0.2)))


def test_ten_thousand_ways_are_priced_in_seconds() -> None:
    """At most 2 s on an idle machine; a busy one counts other processes' cache misses in its CPU seconds."""
    known = facts(4, kind=host(cores=8), of=model(layers=True))
    began = time.process_time()
    choice = search(known)
    assert choice.candidates > 2_000
    assert (time.process_time() - began) / choice.candidates * 10_000 < 8.0


def kendall(ones: list[float], others: list[float]) -> float:
    pairs = list(itertools.combinations(range(len(ones)), 2))
    agree = sum((ones[a] - ones[b]) * (others[a] - others[b]) > 0 for a, b in pairs)
    return 2 * agree / len(pairs) - 1


def test_ways_are_ranked_as_events_rank_them() -> None:
    known = facts(2, kind=host(cores=2))
    names = [name for name, kind in strategies.STRATEGIES.items() if name not in ("single", "sandblaster")]
    each = [
        way(name, 2, processes, 2 // processes, servers=2 if strategies.parse(name).traits.servers else 0)
        for name in names
        for processes in (1, 2)
    ]
    closed = [price(known, one).rate for one in each]
    events = [price_events(known, one, steps=8).rate for one in each]
    assert kendall(closed, events) >= 0.8
    assert (
        max(range(len(each)), key=events.__getitem__)
        in sorted(range(len(each)), key=lambda at: -closed[at])[:3]
    )


# What is said of it


def test_terms_add_up_and_the_interval_is_around_the_rate() -> None:
    for each in search(facts(2)).table:
        assert sum(each.terms.values()) == pytest.approx(each.seconds)
        low, high = each.interval()
        assert low < each.rate < high


def test_past_errors_and_other_kinds_widen_the_interval() -> None:
    def width(known: Facts) -> float:
        low, high = search(known).best.interval()
        return high / low

    calm = facts()
    unknown = msgspec.structs.replace(host(), measured=False, spread=0.3)
    assert width(msgspec.structs.replace(calm, past_error=0.2)) > 1.2 * width(calm)
    assert width(with_hosts(calm, [HostsOfKind(host=unknown)])) > 1.4 * width(calm)


def test_the_choice_is_explained() -> None:
    choice = search(facts(2))
    rows = explain.rows(choice, epochs=3)
    assert [row.mark for row in rows].count("→") == 1
    assert {row.trains for row in rows} >= {"as one process", "replicas meet every 8 steps"}
    said = explain.paragraph(choice)
    assert said.startswith(str(choice.best.way))
    terms = explain.terms_text(choice)
    assert all(name in terms for name in TERMS)
    assert "α = 100 µs, β = 8 ns per byte (1 Gbit/s)" in terms
    plain = explain.as_json(choice, epochs=3)
    assert plain["best"]["epochs_s"] == pytest.approx(3 * 50_000 / choice.best.rate)


def test_a_faster_link_changes_the_choice_and_it_is_said_which() -> None:
    choice = search(facts(2, gbit_per_s=0.2))
    assert choice.best.way.host_count == 1
    (found,) = (change for change in changes(choice) if "link" in change.what)
    assert found.best.way.host_count == 2
    gbit = float(found.what.split()[3])
    again = search(with_link(choice.facts, link(gbit)))
    assert again.best.way.host_count == 2


def test_a_second_machine_is_thought_of() -> None:
    said = explain.paragraph(search(facts()))
    assert "A second machine like this one over 1 Gbit/s would make" in said


def test_pictures_show_every_way() -> None:
    table = search(facts(2)).table
    picture = drawing.svg(table, "Predicted <steps>")
    root = ElementTree.fromstring(picture)
    texts = "".join(root.itertext())
    assert all(str(each.way) in texts for each in table)
    assert picture == drawing.svg(table, "Predicted <steps>"), "the same bytes"
    assert len(drawing.plain(table).splitlines()) == len(table) + 1
