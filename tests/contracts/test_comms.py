"""What every comm must keep: sums, means, copies and flags, the same bits on all replicas."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from manyhands.cluster.worker.world import World
from manyhands.comm.background_sum import Background
from manyhands.comm.collectives import TOPOLOGIES
from manyhands.comm.comm import Comm
from manyhands.comm.grouping import grouped
from manyhands.comm.shared import DIRECT_BYTES, SHARE_BYTES, chunk_bytes
from manyhands.errors import PeerLost
from manyhands.placement.tensor.crossing import Gather, edges
from tests.threads import in_threads

COMMS: dict[str, Callable[[World], Comm]] = {
    "shared": lambda world: world.comm,
    **{name: lambda world, name=name: world.scheduled(name) for name in TOPOLOGIES},  # type: ignore[misc]
}
CHUNK = chunk_bytes(2) // 4
DIRECT = DIRECT_BYTES // 4
LENGTHS = [0, 1, 3, DIRECT, DIRECT + 1, SHARE_BYTES // 4 * 3, CHUNK - 1, CHUNK, CHUNK + 1, 9 * CHUNK + 7]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", COMMS)
def test_sums_of_every_length_again_and_again(kind: str, workers: int) -> None:
    def work(world: World) -> list[Tensor]:
        comm = COMMS[kind](world)
        results = []
        for length in LENGTHS:
            vector = torch.arange(length, dtype=torch.float32) % 1000 + world.rank
            comm.sum_(vector)
            results.append(vector)
        return results

    for results in in_threads(workers, work):
        for length, got in zip(LENGTHS, results, strict=True):
            want = (torch.arange(length, dtype=torch.float32) % 1000) * workers + sum(range(workers))
            assert torch.equal(got, want)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", COMMS)
def test_vectors_of_the_comm_sum_like_any_other_and_so_do_their_parts(kind: str, workers: int) -> None:
    length, part = 9 * CHUNK + 7, slice(CHUNK + 3, 5 * CHUNK)

    def work(world: World) -> list[Tensor]:
        comm = COMMS[kind](world)
        first, second = (comm.vector(length, dtype) for dtype in (torch.float32, torch.int32))
        for vector in (first, second):
            assert not vector.any()
            vector.copy_(torch.arange(length) % 1000 + world.rank)
            comm.sum_(vector)
            comm.sum_(vector[part])
        results = [first.clone(), second.clone()]
        for vector in (first, second):
            comm.give_back(vector)
        ordinary = torch.ones(length)
        comm.sum_(ordinary)
        assert bool((ordinary == workers).all())
        return results

    want = (torch.arange(length) % 1000) * workers + sum(range(workers))
    want[part] *= workers
    for results in in_threads(workers, work):
        assert all(torch.equal(got, want.to(got.dtype)) for got in results)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("kind", COMMS)
def test_replicas_end_bit_identical(kind: str, workers: int) -> None:
    def work(world: World) -> Tensor:
        vector = torch.randn(CHUNK + 13, generator=torch.Generator().manual_seed(world.rank))
        COMMS[kind](world).mean_(vector)
        return vector

    first, *others = in_threads(workers, work)
    assert all(torch.equal(first, other) for other in others)
    parts = [
        torch.randn(CHUNK + 13, generator=torch.Generator().manual_seed(rank)) for rank in range(workers)
    ]
    assert torch.allclose(first, sum(parts) / workers, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("workers", [2, 3])
def test_slices_of_any_length_come_together_to_the_bit(workers: int, dtype: torch.dtype) -> None:
    whole = torch.arange(1, 16, dtype=dtype).view(3, 5) / 7
    limits = edges(5, workers)

    def work(world: World) -> Tensor:
        own = whole[:, limits[world.rank] : limits[world.rank + 1]].contiguous()
        gathered: Tensor = Gather.apply(own, 1, limits, world.comm)  # type: ignore[no-untyped-call]
        return gathered

    assert all(torch.equal(result, whole) for result in in_threads(workers, work))


@pytest.mark.parametrize("part", [slice(0, 3), slice(1, 3), slice(1, 4), slice(2, 4)])
def test_a_copy_begins_and_ends_anywhere(part: slice) -> None:
    values = torch.tensor([1.0, -0.0, float("nan"), 1e-7, 3.0], dtype=torch.float16)

    def work(world: World) -> bytes:
        vector = values.clone() if world.rank == 0 else torch.ones_like(values)
        world.comm.copy_(vector[part])
        return vector[part].view(torch.uint8).numpy().tobytes()

    assert set(in_threads(2, work)) == {values[part].view(torch.uint8).numpy().tobytes()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.uint8, torch.bool])
@pytest.mark.parametrize("kind", COMMS)
def test_copies_are_exact_for_every_type(kind: str, dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, 1.5, 7.0, float("nan"), float("inf"), 0.1]).to(dtype)

    def work(world: World) -> bytes:
        vector = values.clone() if world.rank == 0 else torch.ones_like(values)
        COMMS[kind](world).copy_(vector)
        return vector.view(torch.uint8).numpy().tobytes()

    assert set(in_threads(3, work)) == {values.view(torch.uint8).numpy().tobytes()}


@pytest.mark.parametrize("kind", COMMS)
def test_flags_and_numbers(kind: str) -> None:
    def work(world: World) -> tuple[list[int], float]:
        comm = COMMS[kind](world)
        flags = torch.zeros(4, dtype=torch.uint8)
        flags[world.rank] = 1
        return comm.any_(flags).tolist(), comm.sum_of(0.5 + world.rank)

    assert in_threads(3, work) == [([1, 1, 1, 0], 4.5)] * 3


def test_exchange_and_gather_of_the_world() -> None:
    def work(world: World) -> tuple[list[list[float]], list[bytes]]:
        for _ in range(100):
            rows = world.exchange([float(world.rank), 0.1])
        return rows, world.gather(bytes([world.rank]) * world.rank * 1000)

    rows, payloads = in_threads(3, work)[1]
    assert rows == [[0.0, 0.1], [1.0, 0.1], [2.0, 0.1]]
    assert payloads == [b"", bytes([1]) * 1000, bytes([2]) * 2000]


@pytest.mark.parametrize("kind", COMMS)
def test_a_sum_in_the_background_goes_before_what_follows(kind: str) -> None:
    def work(world: World) -> tuple[float, float, list[float]]:
        comm = COMMS[kind](world)
        large = torch.full((3 * CHUNK,), float(world.rank))
        small = torch.tensor([1.0])
        totals = []
        for _ in range(20):
            large.fill_(float(world.rank))
            comm.start_sum(large)
            totals.append(world.exchange([1.0])[0][0])  # workers may meet meanwhile
            comm.sum_(small)
            comm.finish_sum()
            comm.finish_sum()  # nothing is under way any more
            small.fill_(1.0)
        comm.start_sum(large)
        comm.finish_sum()
        return float(large.min()), float(large.max()), totals

    for least, most, totals in in_threads(3, work):
        assert (least, most) == (9.0, 9.0)  # 0 + 1 + 2, three times over
        assert totals == [1.0] * 20
    assert not [thread for thread in threading.enumerate() if thread.name == "sum"]


def test_what_goes_wrong_in_the_background_is_raised_where_it_is_waited_for() -> None:
    background = Background()
    background.start(lambda: (_ for _ in ()).throw(PeerLost("worker 1 is gone")))
    with pytest.raises(PeerLost, match="worker 1 is gone"):
        background.finish()
    background.finish()


@pytest.mark.parametrize(
    ("groups", "want"), [(1, [15] * 6), (2, [3] * 3 + [12] * 3), (3, [1, 1, 5, 5, 9, 9])]
)
def test_groups_sum_among_themselves(groups: int, want: list[int]) -> None:
    def work(world: World) -> list[float]:
        local = world.comm.local(groups)
        results = []
        for length in (1, DIRECT + 1, CHUNK + 3):
            vector = torch.full((length,), float(world.rank))
            local.sum_(vector)
            assert torch.equal(vector, vector[:1].expand(length))
            results.append(float(vector[0]))
            everyone = torch.ones(5)
            world.comm.sum_(everyone)  # all workers and groups take turns
            assert everyone.tolist() == [6.0] * 5
        assert world.comm.local(groups) is local
        return results

    assert in_threads(6, work) == [[float(value)] * 3 for value in want]


@pytest.mark.parametrize(
    ("workers", "groups", "want"),
    [
        (1, 2, [0]),
        (2, 4, [0, 1]),
        (3, 2, [0, 3, 3]),
        (5, 2, [1, 1, 9, 9, 9]),
        (7, 3, [1, 1, 5, 5, 15, 15, 15]),
    ],
)
def test_groups_of_different_sizes_and_a_worker_alone_in_its_group(
    workers: int, groups: int, want: list[int]
) -> None:
    """All workers claim the same memory, or what comes after would be added up from the wrong places."""

    def work(world: World) -> list[float]:
        local = world.comm.local(groups)
        results = []
        for length in (1, DIRECT + 1, 2 * CHUNK + 3):
            vector = torch.full((length,), float(world.rank))
            local.sum_(vector)
            assert torch.equal(vector, vector[:1].expand(length))
            results.append(float(vector[0]))
            everyone = world.comm.vector(5, torch.float32).fill_(1.0)  # claimed after what the groups claim
            world.comm.sum_(everyone)
            assert everyone.tolist() == [float(workers)] * 5
        return results

    assert in_threads(workers, work) == [[float(value)] * 3 for value in want]


def test_a_host_forms_its_part_of_the_groups() -> None:
    assert [len(group) for group in grouped(range(3), 4, 2)] == [3], "of 2 groups, 1 is on a host with 3 of 4"
    assert [len(group) for group in grouped(range(4), 8, 4)] == [2, 2]
    assert grouped([7], 8, 4) == [[7]], "a host has at least one"


@pytest.mark.parametrize("kind", COMMS)
def test_pairs_swap_vectors_of_every_length(kind: str) -> None:
    def work(world: World) -> list[float]:
        comm = COMMS[kind](world)
        for length in LENGTHS:
            for peer in (4 - world.rank, world.rank ^ 1 if world.rank < 4 else world.rank):
                vector = torch.full((length,), float(world.rank))
                theirs = comm.swap(peer, vector)
                assert torch.equal(theirs, torch.full((length,), float(peer)))
                assert torch.equal(vector, torch.full((length,), float(world.rank)))
        return comm.swap_numbers(4 - world.rank, [0.1 + world.rank, 7.0])

    assert in_threads(5, work) == [[0.1 + (4 - rank), 7.0] for rank in range(5)]


@pytest.mark.parametrize("kind", COMMS)
def test_any_replica_can_be_copied_and_the_largest_number_is_known(kind: str) -> None:
    def work(world: World) -> tuple[list[float], float]:
        comm = COMMS[kind](world)
        vector = torch.full((3,), 0.1 + world.rank)
        comm.copy_(vector, 2)
        return vector.tolist(), comm.most_of(float(world.rank % 3))

    assert in_threads(4, work) == [(torch.full((3,), 2.1).tolist(), 2.0)] * 4
