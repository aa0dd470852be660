"""Models laid over the workers of emulated hosts train as one worker per replica does."""

from pathlib import Path

import pytest

from manyhands.lab import emulated_hosts
from tests.end_to_end.commands import assert_close, on_one_host, parameters
from tests.end_to_end.test_hosts import on_hosts

WHY_NOT = emulated_hosts.available()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

TRAIN = ["train", "--model", "mlp:hidden=96-64", "--steps", "6", "--batch", "16"]


@pytest.mark.parametrize(
    ("layout", "placement", "feeds"),
    [
        # A pipeline inside a host, as Lerat's, and one between two; gradients between them.
        ((2, 1, 1), "pipeline:stages=2", 2),
        ((1, 1), "tensor:ways=2", 1),
        ((1, 1), "sharded", 2),
    ],
)
def test_the_result_is_that_of_whole_replicas(
    layout: tuple[int, ...], placement: str, feeds: int, tmp_path: Path
) -> None:
    placed = on_hosts(layout, [*TRAIN, "--placement", placement], tmp_path)
    theirs, _ = on_one_host(*TRAIN, workers=feeds)
    assert placed.summary["hosts"] == len(layout)
    assert placed.summary["samples"] == 6 * 16 * feeds
    assert_close(parameters(placed.out), theirs)
