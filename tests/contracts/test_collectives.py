"""What every topology must do: a true all-reduce, in the rounds and bytes that its paper promises."""

import math

import pytest
import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.comm.collectives import TOPOLOGIES, executor
from manyhands.comm.collectives.check import check
from manyhands.comm.collectives.executor import all_reduce
from manyhands.comm.collectives.schedule import Hosts, Schedule, Transfer, text
from manyhands.comm.transports.transport import Transport
from manyhands.errors import UsageError
from tests.worlds import GLOO, THREADS

SIZES = range(1, 10)
HOSTS: list[Hosts] = [
    [[0, 1, 2], [3]],
    [[0, 1], [2, 3]],
    [[0], [1], [2]],
    [[4, 1], [0, 2, 3]],
    [[0, 1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11]],
]
LAYOUTS = [*((size, None) for size in SIZES), *((sum(map(len, hosts)), hosts) for hosts in HOSTS)]
LENGTHS = (0, 1, 2, 7, 100, 1009)

every_topology = pytest.mark.parametrize("name", TOPOLOGIES)
every_layout = pytest.mark.parametrize(("size", "hosts"), LAYOUTS, ids=str)


def reduced(transport: Transport, schedule: Schedule, inputs: list[Tensor]) -> Tensor:
    vector = inputs[transport.rank].clone()
    all_reduce(schedule, transport, vector)
    return vector


@every_topology
@every_layout
def test_proof(name: str, size: int, hosts: Hosts | None) -> None:
    check(TOPOLOGIES[name](size, hosts))


@every_topology
@every_layout
def test_equals_the_plain_sum(name: str, size: int, hosts: Hosts | None) -> None:
    schedule = TOPOLOGIES[name](size, hosts)
    for length in LENGTHS:
        inputs = [torch.arange(length, dtype=torch.float64) + 10.0**rank for rank in range(size)]
        for result in THREADS.run(size, reduced, schedule, inputs):
            assert torch.equal(result, torch.stack(inputs).sum(0))


@every_topology
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64, torch.uint8], ids=str)
def test_sums_other_types_of_any_shape(name: str, dtype: torch.dtype) -> None:
    inputs = [torch.arange(42).reshape(6, 7).to(dtype) for _ in range(5)]
    for result in THREADS.run(5, reduced, TOPOLOGIES[name](5, None), inputs):
        assert torch.equal(result, inputs[0] * 5)


@every_topology
@every_layout
def test_ranks_end_bit_identical(name: str, size: int, hosts: Hosts | None) -> None:
    generator = torch.Generator().manual_seed(size)
    inputs = list(torch.randn(size, 1009, generator=generator))
    results = THREADS.run(size, reduced, TOPOLOGIES[name](size, hosts), inputs)
    again = THREADS.run(size, reduced, TOPOLOGIES[name](size, hosts), inputs)
    assert all(
        torch.equal(result.view(torch.int32), results[0].view(torch.int32)) for result in results + again
    )
    torch.testing.assert_close(results[0], torch.stack(inputs).sum(0))


@every_topology
def test_sums_of_many_stripes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "PIECE_BYTES", 64)
    inputs = [torch.arange(1009, dtype=torch.float64) * (rank + 1) for rank in range(3)]
    for result in THREADS.run(3, reduced, TOPOLOGIES[name](3, None), inputs):
        assert torch.equal(result, inputs[0] * 6)


def over_the_wire(transport: Transport, length: int) -> dict[str, list[int]]:
    """For each topology: are all elements right, and what did telemetry count."""
    inputs = [torch.arange(length, dtype=torch.int32) * (rank + 1) for rank in range(3)]
    outcome = {}
    for name, topology in TOPOLOGIES.items():
        before = telemetry.totals()
        result = reduced(transport, topology(3, [[0, 1], [2]]), inputs)
        after = telemetry.totals()
        sent, received = (int(after[key] - before.get(key, 0)) for key in ("bytes_sent", "bytes_received"))
        outcome[name] = [torch.equal(result, inputs[0] * 6), sent, received]
    return outcome


@pytest.mark.processes
def test_over_real_processes_with_bytes_counted() -> None:
    length = 4_200_000  # many stripes for the ring and for the tree
    size_bytes = 4 * length
    outcomes = GLOO.run(3, over_the_wire, length)
    assert all(correct for outcome in outcomes for correct, _, _ in outcome.values())
    for outcome in outcomes:
        assert outcome["ring"][1:] == [size_bytes * 4 // 3] * 2
    # Rank 1 gives to rank 0, then rank 2 does, and both get the sum back.
    assert [outcome["tree"][1] for outcome in outcomes] == [2 * size_bytes, size_bytes, size_bytes]
    assert [outcome["tree"][2] for outcome in outcomes] == [2 * size_bytes, size_bytes, size_bytes]


# Rounds and bytes


def parts_sent(schedule: Schedule) -> list[int]:
    sent = [0] * schedule.size
    for transfers in schedule.rounds:
        for transfer in transfers:
            sent[transfer.source] += len(transfer.parts)
    return sent


@pytest.mark.parametrize("size", SIZES)
def test_ring_sends_the_same_from_every_rank(size: int) -> None:
    schedule = TOPOLOGIES["ring"](size, None)
    assert schedule.parts == size
    assert len(schedule.rounds) == 2 * (size - 1)
    assert parts_sent(schedule) == [2 * (size - 1)] * size


@pytest.mark.parametrize("size", SIZES)
def test_tree_takes_logarithmically_many_rounds(size: int) -> None:
    schedule = TOPOLOGIES["tree"](size, None)
    assert len(schedule.rounds) == 2 * math.ceil(math.log2(size))
    assert sum(parts_sent(schedule)) == 2 * (size - 1) * schedule.parts


@pytest.mark.parametrize("size", SIZES)
def test_halving_doubling_has_the_rounds_of_a_tree_and_the_bytes_of_a_ring(size: int) -> None:
    schedule = TOPOLOGIES["halving-doubling"](size, None)
    power = 2 ** math.floor(math.log2(size))
    folded = size - power
    assert schedule.parts == power
    assert len(schedule.rounds) == 2 * round(math.log2(power)) + (2 if folded else 0)
    # A folded rank sends its vector once; so does, to give the sum back, the rank that took it in.
    halving = 2 * (power - 1)
    assert sorted(parts_sent(schedule)) == sorted(
        [power] * folded + [halving + power] * folded + [halving] * (power - folded)
    )


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_hierarchical_crosses_between_hosts_as_little_as_a_ring_of_hosts(hosts: Hosts) -> None:
    schedule = TOPOLOGIES["hierarchical"](sum(map(len, hosts)), hosts)
    host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
    crossing = dict.fromkeys(host_of, 0)
    for transfers in schedule.rounds:
        for transfer in transfers:
            if host_of[transfer.source] != host_of[transfer.target]:
                crossing[transfer.source] += len(transfer.parts)
    smallest = min(map(len, hosts))
    for host in hosts:
        shares = [crossing[rank] / schedule.parts for rank in host]
        assert sum(shares) == pytest.approx(2 * (len(hosts) - 1) / len(hosts))
        assert (
            len([share for share in shares if share]) == smallest
        )  # so many ranks drive the network at once


def test_ring_enters_each_host_once() -> None:
    schedule = TOPOLOGIES["ring"](4, [[0, 2], [1, 3]])
    assert {(transfer.source, transfer.target) for transfer in schedule.rounds[0]} == {
        (0, 2),
        (2, 1),
        (1, 3),
        (3, 0),
    }


# For people


def test_text() -> None:
    assert text(TOPOLOGIES["ring"](3, None)) == (
        "size 3, parts 3, rounds 4\n"
        "  1   0→1 +2   1→2 +0   2→0 +1\n"
        "  2   0→1 +1   1→2 +2   2→0 +0\n"
        "  3   1→0 =1   2→1 =2   0→2 =0\n"
        "  4   1→0 =2   2→1 =0   0→2 =1"
    )
    assert text(TOPOLOGIES["hierarchical"](4, [[0, 1, 2], [3]])) == (
        "size 4, parts 2, rounds 6\n"
        "  1   1→0 +0:2\n"
        "  2   2→0 +0:2\n"
        "  3   0→3 +1   3→0 +0\n"
        "  4   3→0 =1   0→3 =0\n"
        "  5   0→2 =0:2\n"
        "  6   0→1 =0:2"
    )


@every_topology
def test_first_docstring_line_names_the_paper(name: str) -> None:
    first_line = (TOPOLOGIES[name].__doc__ or "").splitlines()[0]
    assert first_line.endswith(").")
    assert "20" in first_line


@every_topology
@pytest.mark.parametrize("hosts", [[[0, 1]], [[0, 1], [1, 2]], [[0, 1, 2], []]], ids=str)
def test_wrong_hosts_are_refused(name: str, hosts: Hosts) -> None:
    with pytest.raises(UsageError, match="the ranks 0 to 2 exactly once"):
        TOPOLOGIES[name](3, hosts)


# The proof itself must be able to fail


def adds(source: int, target: int, parts: range = range(1)) -> Transfer:
    return Transfer(source, target, parts, reduce=True)


def copies(source: int, target: int, parts: range = range(1)) -> Transfer:
    return Transfer(source, target, parts, reduce=False)


@pytest.mark.parametrize(
    ("size", "rounds", "complaint"),
    [
        (2, [[adds(0, 1)]], "rank 0 ends without the contribution of rank 1 in part 0"),
        (2, [[adds(0, 1)], [adds(0, 1)]], "round 2: the contribution of rank 0 is added twice"),
        (3, [[adds(0, 1), adds(2, 1)]], "round 1: rank 1 receives more than one message"),
        (3, [[adds(0, 1), adds(0, 2)]], "round 1: rank 0 sends more than one message"),
        (2, [[adds(0, 1), adds(1, 0)]], "round 1: rank 0 sends part 0 while it receives it"),
        (2, [[adds(0, 2)]], "round 1: rank 2 is not one of 2"),
        (2, [[adds(0, 1, range(2))]], "round 1: parts range(0, 2) are not among the 1 parts"),
        (
            3,
            [[adds(0, 1)], [copies(1, 0)], [adds(2, 1)], [copies(1, 2)]],
            "rank 0 ends without the contribution of rank 2 in part 0",
        ),
        (
            4,
            [
                [adds(0, 1)],
                [copies(3, 0)],
                [adds(1, 3)],
                [adds(2, 1)],
                [adds(0, 1), adds(2, 3)],
                [copies(1, 0), copies(3, 2)],
            ],
            "rank 2 added part 0 as (((0+1)+3)+2), rank 0 as (((0+1)+2)+3); rounding would make them differ",
        ),
    ],
)
def test_a_wrong_schedule_is_found(size: int, rounds: list[list[Transfer]], complaint: str) -> None:
    with pytest.raises(ValueError) as caught:
        check(Schedule(size, 1, tuple(map(tuple, rounds))))
    assert str(caught.value) == complaint
