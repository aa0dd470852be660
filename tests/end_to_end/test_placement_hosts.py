"""Models laid over the workers of emulated hosts train as one worker per replica does."""

from pathlib import Path

import pytest

from manyhands.lab import hosts
from tests.end_to_end.commands import BIN, parameters, run
from tests.end_to_end.test_hosts import on_hosts

WHY_NOT = hosts.available()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

TRAIN = ["train", "--model", "mlp:hidden=96-64", "--steps", "6", "--batch", "16"]


@pytest.mark.parametrize(
    ("layout", "placement", "feeds"),
    [
        ((2, 2), "pipeline:stages=2", 2),  # Lerat's: a pipeline inside each host, gradients between them
        ((1, 1), "pipeline:stages=2", 1),
        ((1, 1), "tensor:ways=2", 1),
        ((1, 1), "sharded", 2),
    ],
)
def test_the_result_is_that_of_whole_replicas(
    layout: tuple[int, ...], placement: str, feeds: int, tmp_path: Path
) -> None:
    placed = on_hosts(layout, [*TRAIN, "--placement", placement], tmp_path)
    command = [str(BIN / "manyhands"), *TRAIN, "--workers", str(feeds), "--threads", "1", "--out", "whole"]
    done = run(command, tmp_path)
    assert done.code == 0, done.err
    assert placed.summary["hosts"] == 2
    assert placed.summary["samples"] == 6 * 16 * feeds
    ours, theirs = parameters(placed.out), parameters(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert (value - theirs[name]).norm() <= 1e-5 * theirs[name].norm(), name
