"""Strategies whose workers do not wait for each other, or meet in pairs: what each of them is by definition."""

import functools
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands import strategies
from manyhands.cluster.worker.world import World
from manyhands.comm.transports.locks import Locks
from manyhands.engine.session import Session
from manyhands.engine.step import exchanges
from manyhands.errors import UsageError
from manyhands.replica.neighbours import Neighbours
from manyhands.strategies import Asked
from manyhands.strategies.partners import partner
from tests.contracts.test_averaging import assert_same, simulated, trained
from tests.contracts.test_sessions import Numbered, numbers
from tests.contracts.test_strategies import assert_same_bits, flat, loss, make_net, make_steps
from tests.sessions import session_of
from tests.threads import in_threads

FREE = ["hogwild", "ad-psgd"]
PATIENCE_S = 20


def still(model: nn.Module, batch: Tensor) -> Tensor:
    """A loss whose gradient is 1 everywhere, whatever the parameters."""
    return torch.stack([param.sum() for param in model.parameters()]).sum() * batch.mean()


def free_session(
    world: World, strategy: str, *, lr: float = 0.1, net: nn.Module | None = None, **more: Any
) -> Session:
    net = net or make_net()
    how = more.pop("loss", loss)
    return session_of(
        net, torch.optim.SGD(net.parameters(), lr=lr), how, world=world, strategy=strategy, **more
    )


# Without waiting


@pytest.mark.parametrize("strategy", FREE)
def test_a_worker_that_is_stuck_holds_up_nobody(strategy: str) -> None:
    """Worker 0 is in the middle of its first step until the others have taken all of theirs."""
    others_are_done = threading.Semaphore(0)
    batch = make_steps(1)[0][0][0]

    def work(world: World) -> tuple[int, bool]:
        before = flat_of(make_net())

        def slow(model: nn.Module, batch: Any) -> Tensor:
            if world.rank == 0:
                for _ in range(2):
                    assert others_are_done.acquire(timeout=PATIENCE_S)
            return loss(model, batch)

        session = free_session(world, strategy, loss=slow)
        steps = 3 if world.rank == 0 else 30
        met = False
        for _ in range(steps):
            session.step(batch)
            if world.rank == 0 and session.steps == 1:
                # One step cannot have led so far: the others' updates are here, without this worker's doing.
                met = bool((flat(session) - before).norm() > 0.5)
                for _ in range(10):
                    others_are_done.release()
        if world.rank:
            others_are_done.release()
        session.close()
        return session.steps, met

    stuck, *others = in_threads(3, work)
    assert stuck == (3, True)
    assert [steps for steps, _ in others] == [30, 30]


def flat_of(net: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in net.parameters()])


def test_hogwild_workers_update_the_same_parameters() -> None:
    turn = [threading.Event(), threading.Event()]
    turn[0].set()

    def work(world: World) -> Tensor:
        session = free_session(world, "hogwild", lr=1.0, net=nn.Linear(3, 2), loss=still)
        before = flat(session)
        world.host.barrier()
        assert turn[world.rank].wait(PATIENCE_S)
        for _ in range(7):
            session.step(torch.ones(2))
        if world.rank == 0:
            turn[1].set()
        session.close()
        return before - flat(session)

    for moved in in_threads(2, work):
        assert torch.allclose(moved, torch.full_like(moved, 14.0))  # 7 steps of each, one after the other


def test_each_worker_of_hogwild_clips_its_own_gradient() -> None:
    def work(world: World) -> float:
        session = free_session(world, "hogwild", lr=1.0, net=nn.Linear(3, 2), loss=still, clip_norm=0.5)
        before = flat(session)
        world.host.barrier()
        if world.rank == 1:
            session.step(torch.ones(2))
        session.close()
        return float((before - flat(session)).norm())

    assert in_threads(2, work) == pytest.approx([0.5, 0.5], rel=1e-4)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("strategy", [*FREE, "gossip", "tournament:every=2"])
def test_different_numbers_of_batches(strategy: str, workers: int) -> None:
    def work(world: World) -> tuple[int, list[Tensor]]:
        session = free_session(world, strategy)
        mine = [batch for step in make_steps(workers) for batch in step[world.rank]]
        for _ in range(2):
            for batch in session.batches(mine[: 5 * world.rank]):
                session.step(batch)
        session.close()
        return session.samples, [flat(session)]

    results = in_threads(workers, work)
    assert_same_bits([params for _, params in results])
    assert {samples for samples, _ in results} == {2 * 5 * 6 * (workers - 1)}


@pytest.mark.parametrize("strategy", FREE)
@pytest.mark.parametrize("length", [24, 29])
def test_every_sample_of_an_epoch_is_used_once_without_waiting_too(strategy: str, length: int) -> None:
    """Also where the loop is left early and begun again."""

    def work(world: World) -> tuple[list[list[int]], int]:
        session = free_session(world, strategy, lr=0.01)
        data, epochs = Numbered(length), []
        for leave in (True, False):
            seen: list[int] = []
            for _ in range(2 if leave else 1):
                for number, batch in enumerate(session.batches(data, batch_size=4), start=1):
                    seen += numbers(batch)
                    session.step(batch)
                    if leave and number == 1 and session.epoch == 0 and session.position < length:
                        leave = False
                        break
            epochs.append(seen)
        assert session.samples == 2 * length
        session.close()
        return epochs, session.epoch

    results = in_threads(3, work)
    assert [epochs for _, epochs in results] == [2, 2, 2]
    for epoch in range(2):
        assert sorted(number for seen, _ in results for number in seen[epoch]) == list(range(length))


@pytest.mark.processes
def test_a_checkpoint_of_hogwild_goes_on_where_it_was(tmp_path: Path) -> None:
    """Not to the bit, as nothing here is; but parameters, momentum and counts are those that were saved."""
    batch = make_steps(1)[0][0][0]

    def work(world: World) -> tuple[bool, bool, int]:
        def start() -> Session:
            net = make_net()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
            return session_of(net, optimizer, loss, world=world, strategy="hogwild")

        session = start()
        for _ in range(4):
            session.step(batch)
        session.save(tmp_path)
        saved = flat(session), session.engine.replica.updates.vectors["momentum_buffer"].clone()
        world.host.barrier()
        session.step(batch)
        session.close()
        session = start()
        session.resume(tmp_path)
        now = flat(session), session.engine.replica.updates.vectors["momentum_buffer"].clone()
        world.host.barrier()
        session.step(batch)
        session.close()
        return torch.equal(saved[0], now[0]), torch.equal(saved[1], now[1]), session.samples

    assert in_threads(2, work) == [(True, True, (4 + 1) * 2 * 6)] * 2


# Pairs


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_everyone_draws_the_same_pairs(size: int) -> None:
    seen = set()
    for meeting in range(200):
        partners = [partner(rank, size, meeting) for rank in range(size)]
        assert [partners[other] for other in partners] == list(range(size))
        assert sum(rank == other for rank, other in enumerate(partners)) == size % 2
        seen |= set(enumerate(partners))
    alone = {(rank, rank) for rank in range(size)} if size % 2 else set()
    assert seen == {(a, b) for a in range(size) for b in range(size) if a != b} | alone


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_gossip_is_the_mean_of_each_pair(workers: int) -> None:
    def meet(step: int, xs: list[Tensor]) -> list[Tensor]:
        if step % 2:
            return xs
        return [(xs[rank] + xs[partner(rank, workers, step // 2)]) / 2 for rank in range(workers)]

    assert_same(trained(workers, "gossip:every=2"), simulated(workers, meet))


def test_ad_psgd_averages_in_the_steps_that_make_samples_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    averaged: list[tuple[int, int]] = []  # worker, steps that it had made before
    steps_of: dict[int, int] = {}
    average = Neighbours.average_with

    def averaging(self: Neighbours, peer: int) -> None:
        averaged.append((self.index, steps_of[self.index]))
        average(self, peer)

    monkeypatch.setattr(Neighbours, "average_with", averaging)
    strategy = strategies.parse("ad-psgd:every=3")

    def work(world: World) -> None:
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with session_of(net, optimizer, loss, world=world, strategy="ad-psgd:every=3") as session:
            for step, batches in enumerate(make_steps(2, lambda step, rank: [2]) * 3):
                steps_of[world.rank] = step
                session.step(*batches[world.rank])

    in_threads(2, work)
    assert {worker for worker, _ in averaged} == {0, 1}
    for _, steps in averaged:
        assert exchanges(steps, strategy.period, late=strategy.traits.late), steps


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("strategy", ["gossip", "ad-psgd"])
def test_pairs_keep_the_mean_and_spread_the_news(strategy: str, workers: int) -> None:
    """Replicas that begin apart and learn nothing come together at the mean of all; with ad-psgd all at once."""
    length = 300_000  # long enough for averages to run into each other if nothing kept them apart
    starts = [torch.randn(length, generator=torch.Generator().manual_seed(rank)) for rank in range(workers)]
    want = torch.stack(starts).mean(0)
    meetings = 60

    def work(world: World) -> tuple[float, Tensor]:
        net = nn.Linear(1, length, bias=False)
        session = free_session(world, strategy, lr=0.0, net=net, loss=still)
        with torch.no_grad():
            net.weight.copy_(starts[world.rank].view(net.weight.shape))
        world.host.barrier()
        for _ in range(meetings):
            session.step(torch.ones(1))
        world.host.barrier()
        apart = float((flat(session) - want).norm() / want.norm())
        everyone = net.weight.detach().flatten().double()
        world.comm.mean_(everyone)
        session.close()
        return apart, everyone

    for apart, mean in in_threads(workers, work):
        assert apart < 0.01
        assert (mean - want).norm() / want.norm() < 1e-6


@pytest.mark.processes
def test_locks_keep_workers_apart_and_go_with_their_process(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(bytes(16))
    fd = os.open(path, os.O_RDWR)
    inside = 0
    most = 0

    def work(world: World) -> None:
        nonlocal inside, most
        locks = Locks(fd, 4)
        for turn in range(200):
            with locks.held(0, 1 + turn % 2):
                inside += 1
                most = max(most, inside)
                inside -= 1
        locks.close()

    in_threads(3, work)
    assert most == 1
    holder = f"""
import os, sys, time
from manyhands.comm.transports.locks import Locks
with Locks(os.open({str(path)!r}, os.O_RDWR), 4).held(0, 1):
    print("held", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        locks = Locks(fd, 4)
        got = threading.Event()

        def take() -> None:
            with locks.held(1):
                got.set()

        waiter = threading.Thread(target=take)
        waiter.start()
        assert not got.wait(0.2)
        process.send_signal(signal.SIGKILL)
        assert got.wait(PATIENCE_S)
        waiter.join()
    locks.close()
    os.close(fd)


# The tournament


def in_a_tournament(
    workers: int,
    strategy: str,
    prepare: Callable[[Session, int], None],
    look: Callable[[Session], Any],
    *,
    steps: int = 3,
    net: Callable[[], nn.Module] = make_net,
    lr: Callable[[int], float] = lambda rank: 0.1,
) -> list[Any]:
    """What `look` saw on every trainer after some steps, before any pause."""
    batches = [batch for step in make_steps(workers) for (batch,) in step]

    def work(world: World) -> Any:
        session = free_session(world, strategy, net=net(), lr=lr(world.rank))
        prepare(session, world.rank)
        for number in range(steps):
            session.step(batches[number * workers + world.rank])
        seen = look(session)
        session.close()
        return seen

    return in_threads(workers, work)


def test_a_trainer_with_an_absurd_rate_is_beaten_and_takes_over_the_winners_settings() -> None:
    def look(session: Session) -> tuple[float, float]:
        return float(session.engine.replica.kept["rate"]), session.optimizer.param_groups[0]["lr"]

    def lr(rank: int) -> float:
        return 1000.0 if rank == 1 else 0.1

    before = in_a_tournament(2, "tournament:every=2", lambda *_: None, look, steps=2, lr=lr)
    assert before == [(0.5, 0.1), (2.0, 1000.0)]
    after = in_a_tournament(2, "tournament:every=2", lambda *_: None, look, steps=3, lr=lr)
    assert after == [(0.5, 0.1), (0.5, 0.1)]


def test_rates_are_spread_evenly_and_scale_every_update() -> None:
    def moved(session: Session) -> float:
        return float((flat(session) - flat_of(make_net())).norm())

    batch = make_steps(1)[0][0][0]

    def work(world: World, strategy: str) -> float:
        session = free_session(world, strategy)
        session.step(batch)
        lengths = moved(session)
        assert session.optimizer.param_groups[0]["lr"] == 0.1
        session.close()
        return lengths

    plain = in_threads(3, functools.partial(work, strategy="tournament:spread=1"))
    ours = in_threads(3, functools.partial(work, strategy="tournament:spread=4"))
    assert [a / b for a, b in zip(ours, plain, strict=True)] == pytest.approx([0.25, 1.0, 4.0])


@pytest.mark.parametrize("is_ruined", [True, False])
def test_the_winner_takes_its_running_statistics_along_and_a_ruined_loser_begins_afresh(
    is_ruined: bool,
) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(1).double()
            self.net = make_net()

        def forward(self, inputs: Tensor) -> Tensor:
            result: Tensor = self.net(self.norm(inputs))
            return result

    def work(world: World) -> tuple[list[Tensor], int]:
        net = Normed()
        optimizer = torch.optim.SGD(net.parameters(), lr=1000.0 if world.rank else 0.1, momentum=0.9)
        session = session_of(net, optimizer, loss, world=world, strategy="tournament:every=1,spread=1")
        session.step(make_steps(2)[0][world.rank][0])
        if world.rank and is_ruined:
            session.engine.replica.params.fill_(math.inf)
        session.step()  # they meet, and nobody has anything to add
        seen = [net.norm.running_mean.clone(), net.norm.running_var.clone(), flat(session)]  # type: ignore[union-attr]
        states = len(session.engine.replica.updates.export())
        session.close()
        return seen, states

    (winner, kept), (loser, left) = in_threads(2, work)
    assert_same_bits([winner, loser])
    assert kept > 0
    assert left == (0 if is_ruined else kept)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_meeting_is_two_messages_to_the_partner_and_no_other(workers: int) -> None:
    """Who meets whom comes out of the generator alone."""

    def prepare(session: Session, rank: int) -> None:
        transport = session.world.transport()
        session.sent = sent = []  # type: ignore[attr-defined]
        post = transport.send

        def send(peer: int, vector: Tensor) -> Any:
            sent.append((session.engine.replica.steps, peer, vector.nbytes))
            return post(peer, vector)

        transport.send = send  # type: ignore[method-assign]

    def look(session: Session) -> list[tuple[int, int, int]]:
        return list(session.sent)  # type: ignore[attr-defined]

    everyone = in_a_tournament(workers, "tournament:every=2", prepare, look, steps=5)
    for rank, sent in enumerate(everyone):
        meetings = [(2, partner(rank, workers, 1)), (4, partner(rank, workers, 2))]
        met = [meeting for meeting in meetings if meeting[1] != rank]
        assert [(step, peer) for step, peer, _ in sent] == [meeting for meeting in met for _ in range(2)]
        for model, verdict in zip(sent[::2], sent[1::2], strict=True):
            assert model[2] >= 8 * len(flat_of(make_net()))
            assert verdict[2] < 300


def test_a_pause_crowns_the_best_by_everyones_judgement() -> None:
    """Trainer 2 has learned already, the others have not; nobody learns anything now."""
    batches = make_steps(3)[0]
    best = make_net()
    optimizer = torch.optim.SGD(best.parameters(), lr=0.2)
    for _ in range(30):
        optimizer.zero_grad()
        torch.stack([loss(best, batch) for (batch,) in batches]).sum().backward()
        optimizer.step()

    def work(world: World) -> list[Tensor]:
        net = make_net()
        session = free_session(world, "tournament", net=net, lr=0.0)
        net.load_state_dict((best if world.rank == 2 else net).state_dict())  # all load, each its own
        session.step(*batches[world.rank])
        session.evaluate([(torch.zeros(1, 4, 4, dtype=torch.float64), torch.tensor(0))])
        rate = float(session.engine.replica.kept["rate"])
        assert rate == pytest.approx(2.0 ** (world.rank - 1)), "trainers keep their rates"
        crowned = flat(session)
        session.close()
        return [crowned]

    results = in_threads(3, work)
    assert_same_bits([[flat_of(best)], *results])


@pytest.mark.processes
def test_trainers_get_their_own_settings_back_from_a_checkpoint(tmp_path: Path) -> None:
    def work(world: World) -> float:
        session = free_session(world, "tournament", lr=0.1 * (1 + world.rank))
        session.step(*make_steps(3)[0][world.rank])
        session.save(tmp_path)
        session.close()
        session = free_session(world, "tournament", lr=7.0)
        session.resume(tmp_path)
        session.close()
        return float(session.optimizer.param_groups[0]["lr"])

    assert in_threads(3, work) == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize(
    ("text", "asked", "complaint"),
    [
        ("hogwild:average_every=0", Asked(workers=2), "average_every=0: it must be at least 1"),
        ("hogwild", Asked(workers=2, optimizer="lbfgs"), "lbfgs evaluates the loss several times"),
        ("gossip:every=0", Asked(workers=2), "every=0: it must be at least 1"),
        ("tournament:spread=0.5", Asked(workers=2), "spread=0.5: it must be at least 1"),
    ],
)
def test_what_cannot_run_is_refused(text: str, asked: Asked, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        strategies.parse(text).check(asked)


def population(
    world: World, directory: Path | None, *, evaluates: bool = False, steps: range = range(6)
) -> list[Tensor]:
    """One trainer's model, its running statistics included, after each of these steps; where there is a directory, the
    session resumes from it and saves to it."""
    net = nn.Sequential(nn.BatchNorm2d(1).double(), make_net())
    session = free_session(world, "tournament:every=4", net=net)
    if directory:
        session.resume(directory)
    seen = []
    for number in steps:
        (batch,) = (make_steps(world.size) * 2)[number][world.rank]
        session.step(batch)
        seen.append(session.engine.replica.to_flat())
        if evaluates:
            session.evaluate(list(zip(*batch, strict=True)))
    if directory:
        session.save(directory)
    session.close()
    return seen


@pytest.mark.parametrize("workers", [2, 3])
def test_the_population_of_a_tournament_goes_on_after_every_evaluation(workers: int) -> None:
    plain = in_threads(workers, functools.partial(population, directory=None))
    assert not torch.equal(plain[0][2], plain[1][2])
    judged = in_threads(workers, functools.partial(population, directory=None, evaluates=True))
    for ours, want in zip(judged, plain, strict=True):
        assert_same_bits([ours, want])


@pytest.mark.processes
def test_a_checkpoint_of_a_tournament_holds_the_population_and_its_best_model(tmp_path: Path) -> None:
    want = in_threads(3, functools.partial(population, directory=None))
    in_threads(3, functools.partial(population, directory=tmp_path, steps=range(3)))
    resumed = in_threads(3, functools.partial(population, directory=tmp_path, steps=range(3, 6)))
    for ours, whole in zip(resumed, want, strict=True):
        assert_same_bits([ours, whole[3:]])


@pytest.mark.processes
def test_another_number_of_trainers_begins_with_the_best_model(tmp_path: Path) -> None:
    in_threads(3, functools.partial(population, directory=tmp_path, steps=range(3)))

    def work(world: World) -> tuple[Tensor, Tensor]:
        net = nn.Sequential(nn.BatchNorm2d(1).double(), make_net())
        session = free_session(world, "tournament:every=4", net=net)
        session.resume(tmp_path)
        best = flat(session)
        session.optimizer.param_groups[0]["lr"] = 0.0
        session.step(*make_steps(2)[0][world.rank])
        seen = flat(session)
        session.close()
        return best, seen

    (best, one), (_, other) = in_threads(2, work)
    assert_same_bits([[best], [one], [other]])
