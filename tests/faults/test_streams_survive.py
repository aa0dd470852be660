"""Loaders with processes of their own, and several streams at once: samples stay right when workers die and join."""

from collections import Counter
from pathlib import Path

import pytest

from tests.faults import checks, harness, training
from tests.faults.harness import Fault


@pytest.mark.parametrize("strategy", ["all-reduce", "hogwild"])
def test_a_worker_dies_while_processes_of_its_loader_load(strategy: str, tmp_path: Path) -> None:
    faults = [Fault(1, 7)]
    ran = harness.run(tmp_path, faults, loader=2, strategy=strategy)
    assert set(ran.ends) == {0, 2}
    checks.nothing_lost(ran, ran.fired, faults)
    if strategy == "all-reduce":
        checks.one_history(ran, "momentum")
    assert not left_over(tmp_path), "the loader's processes of the dead worker"


def left_over(folder: Path) -> list[str]:
    """Processes that still have the script of this run on their command line."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in words:
            found.append(words)
    return found


@pytest.mark.parametrize("strategy", ["all-reduce", "hogwild", "parameter-server:sync"])
def test_zipped_streams_lose_nothing_when_workers_die(strategy: str, tmp_path: Path) -> None:
    faults = [Fault(1, 5), Fault(2, 9)]
    servers = 2 if "server" in strategy else 0
    ran = harness.run(
        tmp_path, faults, workers=4, zipped=True, epochs=2, strategy=strategy, servers=servers, pause_s=0.01
    )
    assert sorted(ran.fired, key=str) == sorted(faults, key=str)
    assert set(ran.ends) == {0, 3}
    whole = 2 * 2 * training.LENGTH
    for end in ran.ends.values():
        assert end["tally"] == {"once": whole, "twice": 0, "never": 0}
    if strategy == "all-reduce":
        counts = Counter(number for step in ran.committed() for number in step)
        assert set(counts) == set(range(2 * training.LENGTH))
        assert set(counts.values()) == {2}


def test_a_worker_that_joins_takes_its_part_of_zipped_streams(tmp_path: Path) -> None:
    faults = [Fault(1, 5)]
    ran = harness.run(tmp_path, faults, workers=3, zipped=True, epochs=2, replace=1, until=3, pause_s=0.01)
    assert ran.fired == faults
    assert set(ran.ends) == {0, 2, 3}
    counts = Counter(number for step in ran.committed() for number in step)
    assert set(counts) == set(range(2 * training.LENGTH))
    assert set(counts.values()) == {2}
    assert ran.ends[0]["tally"] == {"once": 4 * training.LENGTH, "twice": 0, "never": 0}
