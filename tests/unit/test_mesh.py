"""Where workers stand: arithmetic, and refusals with it."""

import itertools

import pytest

from manyhands.errors import UsageError
from manyhands.placement.mesh import Mesh, form
from manyhands.placement.pipeline.balance import Costs, balanced
from manyhands.placement.pipeline.timetable import BACKWARD, FORWARD, SCHEDULES, WEIGHTS, simulate, table
from manyhands.placement.tensor.branches import fair_ranges

SHAPES = [
    Mesh(replicas=replicas, shards=shards, stages=stages, ways=ways)
    for replicas, shards, stages, ways in itertools.product((1, 2), (1, 3), (1, 2), (1, 2))
]


@pytest.mark.parametrize("mesh", SHAPES, ids=str)
def test_every_worker_is_in_one_group_of_each_kind(mesh: Mesh) -> None:
    everyone = list(range(mesh.workers))
    for groups, count in (
        (mesh.peers(), mesh.members),
        (mesh.model_parallel_groups(), mesh.replicas),
        (mesh.tensor_parallel_groups(), mesh.replicas * mesh.shards * mesh.stages),
    ):
        assert len(groups) == count
        assert sorted(itertools.chain(*groups)) == everyone
    assert len({mesh.at(rank) for rank in everyone}) == mesh.workers
    assert {mesh.feed(rank) for rank in everyone} == set(range(mesh.feeds))
    for group in mesh.model_parallel_groups():  # beside each other: on one host where they fit
        assert list(group) == list(range(group[0], group[0] + mesh.members))


def test_workers_that_are_left_over_are_refused_with_the_arithmetic() -> None:
    assert form(8, stages=2, ways=2) == Mesh(replicas=2, stages=2, ways=2)
    with pytest.raises(UsageError, match=r"6 = 1 × 4 \+ 2; use --workers 4 or 8"):
        form(6, stages=2, ways=2)
    with pytest.raises(UsageError, match=r"2 = 0 × 3 \+ 2; use --workers 3"):
        form(2, ways=3)


# Schedules


CASES = [
    (name, workers, 2 if name == "interleaved" else 1, micros)
    for name in SCHEDULES
    for workers in (2, 3, 4)
    for micros in (1, 2, 5, 8)
]


@pytest.mark.parametrize(("name", "workers", "chunks", "micros"), CASES)
def test_everything_is_done_once_and_after_what_it_needs(
    name: str, workers: int, chunks: int, micros: int
) -> None:
    rows = [list(row) for row in table(name, workers, chunks, micros)]
    kinds = 3 if SCHEDULES[name].divided else 2
    assert all(len(set(row)) == len(row) == kinds * chunks * micros for row in rows)
    done: set[tuple[str, int, int]] = set()
    last = workers * chunks - 1
    while any(rows):
        before = len(done)
        for worker, row in enumerate(rows):
            while row:
                action = row[0]
                stage, micro = action.chunk * workers + worker, action.micro
                need = {
                    FORWARD: (FORWARD, stage - 1, micro) if stage else None,
                    BACKWARD: (BACKWARD, stage + 1, micro) if stage < last else (FORWARD, stage, micro),
                    WEIGHTS: (BACKWARD, stage, micro),
                }[action.kind]
                if need is not None and need not in done:
                    break
                done.add((action.kind, stage, micro))
                row.pop(0)
        assert len(done) > before, "the workers wait for each other for ever"


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("workers", "micros"), [(2, 4), (4, 8), (3, 1)])
def test_idle_time_is_that_of_the_formula(name: str, workers: int, micros: int) -> None:
    _, idle = simulate(name, workers, 1, micros)
    assert [each / (3 * micros + each) for each in idle] == pytest.approx(
        [(workers - 1) / (micros + workers - 1)] * workers
    )


def test_zero_bubble_and_interleaving_idle_less() -> None:
    _, plain = simulate("1f1b", 4, 1, 8)
    _, divided = simulate("zero-bubble", 4, 1, 8)
    _, chunks = simulate("interleaved", 4, 2, 8)
    assert max(divided) < max(plain)
    assert max(chunks) == max(plain), "as many passes, each of half the length"


def test_one_forward_one_backward_holds_few_microbatches() -> None:
    for worker, row in enumerate(table("1f1b", 4, 1, 16)):
        held = most = 0
        for action in row:
            held += 1 if action.kind == FORWARD else -1
            most = max(most, held)
        assert most == 4 - worker + (worker < 3), "one ahead, but for the last"


# Cuts


def costs(seconds: list[float], **more: list) -> Costs:  # type: ignore[type-arg]
    count = len(seconds)
    return Costs(
        seconds=seconds,
        crossing_bytes=more.get("crossing", [0] * count),
        allowed=more.get("allowed", [True] * count),
        trained=more.get("trained", [True] * count),
    )


def test_cuts_balance_time_and_not_layers() -> None:
    assert balanced(costs([1, 1, 1, 1, 4]), 2) == [4]
    assert balanced(costs([4, 1, 1, 1, 1]), 2) == [1]
    assert balanced(costs([2, 2, 1, 3, 4]), 3) == [2, 4]


def test_what_crosses_a_cut_counts() -> None:
    heavy = int(10e9)
    assert balanced(costs([1, 1, 1, 1], crossing=[0, heavy, 0, 0]), 2) in ([1], [3])


def test_cuts_are_where_they_may_be() -> None:
    assert balanced(costs([1, 1, 1, 1], allowed=[True, False, False, True]), 2) == [1]
    assert balanced(costs([1, 9, 1], trained=[False, True, True]), 2) == [2]
    assert balanced(costs([1, 1], allowed=[False, True]), 2) is None


def test_branches_are_divided_by_weight() -> None:
    assert fair_ranges([1, 10, 2, 3], 2) == [(0, 2), (2, 4)]
    assert fair_ranges([10, 1, 2, 3], 2) == [(0, 1), (1, 4)]
    assert fair_ranges([1, 1, 1], 3) == [(0, 1), (1, 2), (2, 3)]
