"""What the planner hears of a strategy it has never seen: everything, from its own step."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from manyhands import strategies
from manyhands.planner.flat_vector import FlatVector
from manyhands.planner.operations import Await, Meet, Pass, Pushed, Start, Sum, Swap, Update
from manyhands.planner.price import price
from manyhands.planner.record import Recorded, record
from manyhands.planner.roles import SpanFacts, role_of
from manyhands.planner.search import search
from tests.pages import DOCS, blocks
from tests.planner_facts import facts, way

SPANS = SpanFacts(sizes=(4e6,) * 5, ready=(0.4, 0.55, 0.7, 0.85, 1.0))


def recorded(text: str, workers: int = 4, hosts: int = 1) -> Recorded:
    strategy = strategies.parse(text)
    return record(strategy, role_of(strategy.traits, workers, hosts, 32), SPANS)


def kinds(found: Recorded) -> list[set[type]]:
    return [{type(one) for one in step} for step in found.steps]


@pytest.mark.parametrize("name", strategies.STRATEGIES)
@pytest.mark.parametrize(("workers", "hosts"), [(1, 1), (4, 1), (4, 2), (3, 3)])
def test_every_strategy_is_recorded(name: str, workers: int, hosts: int) -> None:
    if name == "single" and workers > 1:
        pytest.skip("it is for one worker")
    found = recorded(name, workers, hosts)
    assert all(any(isinstance(one, Pass) for one in step) for step in found.steps)
    is_served = strategies.parse(name).traits.servers is not None
    assert is_served or all(any(isinstance(one, Update) for one in step) for step in found.steps)


def test_a_replica_that_a_host_shares_is_gated_and_updated_in_parts() -> None:
    (step,) = recorded("all-reduce").steps
    assert [type(one) for one in step] == [Meet, Pass, Meet, Update, Meet]
    (update,) = (one for one in step if isinstance(one, Update))
    assert update.updated_bytes == pytest.approx(SPANS.bytes / 4)


def test_between_hosts_spans_leave_during_the_pass() -> None:
    (step,) = recorded("all-reduce", 4, 2).steps
    (one,) = (one for one in step if isinstance(one, Pass))
    assert [type(each) for _, each in one.inside] == [Start] * 3, "an owner starts its own spans"
    assert sum(isinstance(each, Await) for each in step) == 3
    assert sum(each.sent_bytes for _, each in one.inside if isinstance(each, Start)) == pytest.approx(
        SPANS.bytes
    )


def test_a_period_is_found_by_what_repeats() -> None:
    found = recorded("local-sgd:period=6")
    assert found.repeats
    assert sorted(map(len, kinds(found))) == [3] * 5 + [5]  # handshake, pass, update; then a mean
    assert sum(isinstance(one, Sum) for step in found.steps for one in step) == 1
    levels = recorded("hierarchical-local-sgd:local_period=2,global_period=6")
    scopes = [one.scope for step in levels.steps for one in step if isinstance(one, Sum)]
    assert sorted(scopes) == ["host", "host", "replicas"]


def test_what_goes_on_in_the_background_is_awaited_a_step_later() -> None:
    (step,) = recorded("double-buffer", 4, 2).steps
    order = [type(one) for one in step if type(one) in (Pass, Start, Await)]
    assert order == [Pass, Await, Start]


def test_pairs_and_servers() -> None:
    assert any(isinstance(one, Swap) for one in recorded("gossip").steps[0])
    (step,) = recorded("parameter-server").steps
    (one,) = (one for one in step if isinstance(one, Pass))
    assert len(one.inside) == len(SPANS.sizes)
    assert isinstance(step[-1], Pushed)


def test_arithmetic_on_vectors_is_counted_by_its_bytes() -> None:
    touched: list[float] = []
    one, other = FlatVector(touched.append, 1000), FlatVector(touched.append, 1000)
    one.add_(other)  # read both, write one
    assert touched.pop() == 3 * 4000
    one.copy_(other)
    assert touched.pop() == 2 * 4000
    assert len(torch.lerp(one, other, 0.5)) == 1000  # type: ignore[call-overload]
    assert touched.pop() == 3 * 4000
    assert len((one - other).abs()[:10]) == 10
    assert float(one.norm()) == 1.0


@pytest.fixture
def averaging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The strategy of the page on adding one: a file and a line in the table."""
    (file,) = (block.text for block in blocks(DOCS / "adding-a-strategy.md") if block.language == "python")
    path = tmp_path / "averaging.py"
    path.write_text(file)
    found = importlib.util.spec_from_file_location("planned_averaging", path)
    assert found
    assert found.loader
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "planned_averaging", module)
    found.loader.exec_module(module)
    monkeypatch.setitem(strategies.STRATEGIES, "averaging", module.Averaging)
    return "averaging"


def test_a_strategy_that_was_added_is_planned(averaging: str) -> None:
    """It costs what the one that we ship costs, which does the same, and the search finds it by itself."""
    known = facts(2)
    ours = price(known, way("local-sgd:period=4", 2))
    theirs = price(known, way(f"{averaging}:period=4", 2))
    assert theirs.seconds == pytest.approx(ours.seconds)
    assert any(each.strategy.startswith(averaging) for each in search(known).considered)
