"""Workers that are given the same data: noticed in the first steps and said once, with the line to change."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from manyhands.cluster.worker.world import World
from manyhands.engine.same_data import digest, digest_of_data
from manyhands.engine.session import Session
from tests.contracts.test_sessions import Numbered, make_session
from tests.threads import in_threads

STRATEGIES = ["all-reduce", "double-buffer", "local-sgd:period=3", "hogwild", "parameter-server:async"]

Loop = Callable[[Session, Numbered], Iterable[Any]]


def warnings(loop: Loop, capsys: pytest.CaptureFixture[str], strategy: str = "all-reduce") -> list[str]:
    def work(world: World) -> None:
        session = make_session(world, strategy)
        for batch in loop(session, Numbered(48)):
            session.step(batch)
            session.world.host.barrier()  # else a worker may be through before another begins
        session.close()

    in_threads(2, work, strategy=strategy)
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]


def plain_loop(session: Session, data: Numbered) -> Iterable[Any]:
    return DataLoader(data, batch_size=8)


def own_batches(session: Session, data: Numbered) -> Iterable[Any]:
    return session.batches([data[slice(first, first + 8)] for first in range(0, 48, 8)])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("loop", [plain_loop, own_batches])
def test_the_same_batches_on_all_workers_are_said_once(
    loop: Loop, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (said,) = warnings(loop, capsys, strategy)
    assert "workers 0 and 1" in said
    assert "session.batches(loader)" in said


def test_a_plain_loop_that_shuffles_is_noticed_by_its_data(capsys: pytest.CaptureFixture[str]) -> None:
    """Its batches differ from worker to worker, and each goes through all of the data."""

    def shuffled(session: Session, data: Numbered) -> Iterable[Any]:
        generator = torch.Generator().manual_seed(session.rank)
        return DataLoader(data, batch_size=8, shuffle=True, generator=generator)

    (said,) = warnings(shuffled, capsys)
    assert "workers 0 and 1 each go through all of the data" in said


def test_data_that_the_script_has_divided_is_not_the_same() -> None:
    """By its first sample, whatever that draws."""

    def sign(data: Any) -> float:
        return digest_of_data(iter(DataLoader(data, batch_size=8)))

    halves = [torch.utils.data.Subset(Numbered(48), range(rank, 48, 2)) for rank in range(2)]
    assert 0 != sign(halves[0]) != sign(halves[1]) != 0

    class Noisy(Numbered):
        def __getitem__(self, index: int) -> Any:
            return self.inputs[index] + torch.rand(()), self.targets[index]

    assert sign(Noisy(48)) == sign(Noisy(48)) != sign(Numbered(48))
    looping = iter(DataLoader(Noisy(48), batch_size=8))
    state = torch.get_rng_state()
    digest_of_data(looping)
    assert torch.equal(torch.get_rng_state(), state), "looking draws nothing"


def test_a_distributed_sampler_in_a_plain_loop_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    def sampled(session: Session, data: Numbered) -> Iterable[Any]:
        return DataLoader(data, 8, sampler=DistributedSampler(data, session.workers, session.rank))

    (said,) = warnings(sampled, capsys)
    assert "DistributedSampler" in said
    assert "take the sampler out" in said


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loops_of_the_session_are_no_reason_to_warn(
    strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def loops(session: Session, data: Numbered) -> Iterator[Any]:
        yield from session.batches(data, batch_size=4)
        yield from session.batches(DataLoader(data, 4, shuffle=True))

    assert warnings(loops, capsys, strategy) == []


def test_one_worker_is_never_compared(capsys: pytest.CaptureFixture[str]) -> None:
    def work(world: World) -> None:
        session = make_session(world)
        assert session.engine.twins is None
        for batch in DataLoader(Numbered(48), batch_size=8):
            session.step(batch)
        session.close()

    in_threads(1, work)
    assert capsys.readouterr().err == ""


def test_workers_stop_comparing_after_the_first_steps() -> None:
    def work(world: World) -> bool:
        session = make_session(world)
        for batch in session.batches(Numbered(48), batch_size=4):
            session.step(batch)
        session.close()
        return session.engine.twins is None

    assert in_threads(2, work) == [True, True]


def test_made_up_data_of_one_number_has_no_sign() -> None:
    assert digest([torch.zeros(8, 4)]) == digest([(torch.ones(3), torch.ones(3))]) == 0
    assert digest([(torch.arange(8), torch.zeros(8))]) != 0
    assert digest([None]) == digest([]) == 0
