"""Deaths where scripts make their steps in two halves, or ask for values of all workers: at each of these points."""

from pathlib import Path

import pytest

from tests.faults import checks, harness, registered, training
from tests.faults.harness import Fault

CLIP = 0.5


@pytest.mark.parametrize("strategy", ["all-reduce", "ring", "parameter-server"])
def test_a_death_between_the_halves_takes_no_sample_with_it(strategy: str, tmp_path: Path) -> None:
    """What the dead worker had is in the gradient that the others have, and its next samples are others' work."""
    faults = [Fault(0, 7, "between"), Fault(2, 17, "between")]
    servers = registered.servers(strategy)
    ran = harness.run(tmp_path, faults, strategy=strategy, servers=servers, halves=CLIP, epochs=1)
    checks.nothing_lost(ran, ran.fired, faults, epochs=1)
    checks.one_history(ran, "momentum", clip_norm=CLIP)


def test_a_death_in_the_first_half_undoes_it_and_others_join(tmp_path: Path) -> None:
    faults = [Fault(1, 9, "kill"), Fault(0, 30, "between")]
    ran = harness.run(tmp_path, faults, replace=2, halves=CLIP, until=3)
    checks.nothing_lost(ran, ran.fired, faults)
    checks.one_history(ran, "momentum", clip_norm=CLIP)


def test_a_death_where_no_script_looks_at_the_gradients(tmp_path: Path) -> None:
    """Between the halves, and in the middle of an update by the sum that both halves have left where it was made."""
    faults = [Fault(1, 5, "between"), Fault(0, 11, "update"), Fault(2, 17, "between")]
    settings = {"optimizer": "Own", "lr": 0.01}
    ran = harness.run(tmp_path, faults, workers=4, halves=training.UNSEEN, epochs=1, **settings)
    checks.nothing_lost(ran, ran.fired, faults, epochs=1)
    checks.one_history(ran, **settings)


def test_a_death_in_the_first_half_where_no_script_looks_and_others_join(tmp_path: Path) -> None:
    faults = [Fault(1, 9, "kill"), Fault(0, 30, "between")]
    ran = harness.run(tmp_path, faults, replace=2, halves=training.UNSEEN, until=3)
    checks.nothing_lost(ran, ran.fired, faults)
    checks.one_history(ran, "momentum")


@pytest.mark.parametrize("strategy", ["all-reduce", "hogwild"])
def test_a_death_at_a_mean_of_all_workers_leaves_it_to_the_others(strategy: str, tmp_path: Path) -> None:
    faults = [Fault(0, 5, "mean"), Fault(2, 10, "mean")]
    ran = harness.run(tmp_path, faults, strategy=strategy, means=True, epochs=1, pause_s=0.01)
    checks.nothing_lost(ran, ran.fired, faults, epochs=1)
    means = [row for row in ran.logs[1] if row["kind"] == "mean"]
    assert [row["step"] for row in means] == sorted({row["step"] for row in means})
    if strategy == "all-reduce":
        assert all(row["value"] == row["step"] for row in means)
