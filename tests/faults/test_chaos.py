"""Chaos attacks what is registered, and says so when a worker that no fault has killed does not finish."""

import random
from pathlib import Path
from typing import Any

import pytest

from manyhands import strategies
from tests.faults import harness, memory_group
from tests.faults.chaos import attacks, record, setups
from tests.faults.chaos.setups import SetUp
from tests.faults.harness import Fault

WHY_NOT = memory_group.available()


def test_what_is_registered_later_is_attacked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    makers = (setups.one_host, setups.in_parts, setups.on_hosts)
    before = [make() for make in makers]
    assert len({str(one) for found in before for one in found}) >= 60
    newcomer = type("Newcomer", (strategies.STRATEGIES[strategies.DEFAULT],), {})
    monkeypatch.setitem(strategies.STRATEGIES, "newcomer", newcomer)
    for make, found in zip(makers, before, strict=True):
        assert any("newcomer" in one.strategy for one in make())
        assert not any("newcomer" in one.strategy for one in found)


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
@pytest.mark.parametrize("kinds", [("memory", "coordinator"), ("segfault", "disk")])
def test_a_run_meets_the_kinds_that_are_new(
    kinds: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory in a control group, and a disk without room."""
    setup = SetUp(strategy="all-reduce", workers=3)
    victim, other = kinds
    monkeypatch.setattr(attacks, "WORKERS", (victim,))
    monkeypatch.setattr(attacks, "OTHERS", (other,))
    seed = next(number for number in range(99) if other in _drawn(setup, number))
    ran, faults = attacks.attack(setup, seed, tmp_path)
    record.check(setup, ran)
    assert {fault.kind for fault in faults} >= {victim, other}
    assert sorted(ran.fired, key=str) == sorted(faults, key=str), "the faults fired"
    told = record.record(setup, seed, ran, faults, 0.0)
    assert told["deaths"] == len(record.deaths(ran)) > 0
    assert [told["process ids"][number][1] for number in ran.ends] == [
        end["pid"] for end in ran.ends.values()
    ]


def _drawn(setup: SetUp, seed: int) -> list[str]:
    return [fault.kind for fault in attacks.faults_of(setup, random.Random(seed))]


def test_a_survivor_that_does_not_finish_fails_the_run(tmp_path: Path) -> None:
    def log(pid: int, *rows: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"kind": "start", "pid": pid}, {"kind": "made", "step": 1}, *rows]

    ran = harness.Ran(
        outcome=None,  # type: ignore[arg-type]
        events=[],
        fired=[Fault(0, 0.5)],
        folder=tmp_path,
        logs={0: log(10), 1: log(11), 2: log(12, {"kind": "end", "pid": 12})},
    )
    assert record.should_finish(ran) == [1, 2]
    with pytest.raises(AssertionError, match=r"workers \[1\] were not killed and have not finished"):
        record.check(SetUp(strategy="all-reduce", workers=3), ran)
