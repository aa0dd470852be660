"""What a session promises whatever the strategy: data, evaluation, buffers, saving and resuming."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from manyhands import strategies
from manyhands.cluster.worker.world import World
from manyhands.engine.evaluate import accuracy
from manyhands.engine.session import Session
from manyhands.errors import CheckpointError, UsageError
from tests.contracts.test_strategies import (
    OPTIMIZERS,
    SYNCHRONOUS,
    TOGETHER,
    assert_close,
    assert_same_bits,
    loss,
    make_net,
    optimizer_for,
    plainly,
    two_groups,
)
from tests.sessions import session_of
from tests.threads import in_threads


class Numbered(Dataset[tuple[Tensor, Tensor]]):
    """Samples that say which one they are."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(length)
        self.inputs = torch.randn(length, 1, 4, 4, generator=generator, dtype=torch.float64)
        self.inputs[:, 0, 0, 0] = torch.arange(length, dtype=torch.float64) / 1000
        self.targets = torch.randint(0, 4, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def numbers(batch: tuple[Tensor, Tensor]) -> list[int]:
    return [round(value * 1000) for value in batch[0][:, 0, 0, 0].tolist()]


def make_session(
    world: World,
    strategy: str = "all-reduce",
    optimizer: str = "momentum",
    make: Callable[[nn.Module], Optimizer] | None = None,
    **more: Any,
) -> Session:
    net = make_net()
    made = make(net) if make else two_groups(OPTIMIZERS[optimizer], net)
    return session_of(net, made, loss, world=world, strategy=strategy, **more)


@pytest.mark.parametrize("length", [48, 49, 50, 53, 7, 3, 1])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_every_sample_is_used_exactly_once_per_epoch(workers: int, length: int) -> None:
    def work(world: World) -> list[list[int]]:
        with make_session(world) as session:
            epochs = []
            for _ in range(2):
                seen = []
                for batch in session.batches(Numbered(length), batch_size=4):
                    seen += numbers(batch)
                    session.step(batch)
                epochs.append(seen)
            assert session.samples == 2 * length
            return epochs

    results = in_threads(workers, work)
    orders = []
    for epoch in range(2):
        order = [number for result in results for number in result[epoch]]
        assert sorted(order) == list(range(length))
        orders.append(order)
    assert length < 5 or orders[0] != orders[1], "each epoch has its own order"


@pytest.mark.parametrize("strategy", TOGETHER)
def test_the_number_of_workers_does_not_change_the_result(strategy: str) -> None:
    make = optimizer_for(strategy, functools.partial(two_groups, OPTIMIZERS["momentum"]))

    def train(workers: int, batch_size: int, strategy: str) -> list[Tensor]:
        def work(world: World) -> list[Tensor]:
            session = make_session(world, strategy, make=make)
            for _ in range(2):
                for batch in session.batches(Numbered(47), batch_size=batch_size):
                    session.step(batch)
            session.close()
            return [param.detach().clone() for param in session.model.parameters()]

        return in_threads(workers, work, strategy=strategy)[0]

    want = make_net()
    for param, value in zip(want.parameters(), train(1, 12, "single"), strict=True):
        param.data = value
    assert_close(train(2, 6, strategy), want)
    assert_close(train(3, 4, strategy), want)


@pytest.mark.parametrize("strategy", TOGETHER)
def test_workers_with_different_numbers_of_batches(strategy: str) -> None:
    """Iterables of one's own, uneven; a worker out of data still serves the others, with their learning rate."""
    data = Numbered(60)
    shares = [[data[i : i + 4] for i in range(start, stop, 4)] for start, stop in ((0, 8), (8, 32), (32, 60))]
    make = optimizer_for(strategy, functools.partial(two_groups, OPTIMIZERS["momentum"]))

    def work(world: World) -> tuple[int, list[Tensor]]:
        session = make_session(world, strategy, make=make)
        schedule = torch.optim.lr_scheduler.StepLR(session.optimizer, 2, 0.5)
        for batch in session.batches(shares[world.rank]):
            session.step(batch)
            schedule.step()
        session.close()
        return session.steps, [param.detach().clone() for param in session.model.parameters()]

    results = in_threads(3, work, strategy=strategy)
    assert [steps for steps, _ in results] == [7, 7, 7]
    assert_same_bits([params for _, params in results])

    steps = [[[share[number]] for share in shares if number < len(share)] for number in range(7)]
    want = plainly(make_net(), make, steps, scheduled=True)
    assert_close(results[0][1], want)


def test_a_raw_loop_of_uneven_length_does_not_hang() -> None:
    def work(world: World) -> int:
        session = make_session(world)
        for number in range(1 + 2 * world.rank):
            session.step(Numbered(20)[number * 2 : number * 2 + 2])
        session.evaluate(Numbered(11))
        session.close()
        return session.steps

    assert in_threads(3, work) == [5, 5, 5]


def test_different_learning_rates_are_refused() -> None:
    def work(world: World) -> None:
        session = make_session(world)
        session.optimizer.param_groups[0]["lr"] = 0.1 + world.rank
        session.step(Numbered(4)[0:4])

    with pytest.raises(UsageError, match=r"0\.1 on worker 0, 1\.1 on worker 1"):
        in_threads(2, work)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_evaluation_is_the_mean_over_all_samples(workers: int) -> None:
    data = Numbered(31)

    def work(world: World) -> dict[str, float]:
        with make_session(world) as session:
            return session.evaluate(data, batch_size=4, measures={"accuracy": accuracy})

    net = make_net()
    batch = (data.inputs, data.targets)
    for result in in_threads(workers, work):
        assert result["loss"] == pytest.approx(loss(net, batch).item(), rel=1e-12)
        assert result["accuracy"] == pytest.approx(accuracy(net, batch).item())


def test_buffers_become_the_mean_at_a_pause() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(8, 5), torch.randn(8, 5) + 3]

    def work(world: World) -> dict[str, Tensor]:
        net = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        session = session_of(net, optimizer, lambda model, batch: model(batch).square().mean(), world=world)
        session.step(inputs[world.rank])
        session.evaluate(torch.zeros(4, 5))
        values = {name: value.clone() for name, value in net.state_dict().items()}
        session.close()
        return values

    one, two = in_threads(2, work)
    assert_same_bits([list(one.values()), list(two.values())])
    want = 0.1 * (inputs[0].mean(0) + inputs[1].mean(0)) / 2
    assert torch.allclose(one["0.running_mean"], want, atol=1e-6)
    assert int(one["0.num_batches_tracked"]) == 1


def train_and_stop(
    world: World, strategy: str, optimizer: str, directory: Path, stops: list[int]
) -> list[Tensor]:
    """Train 2 epochs in as many sessions as `stops` says, each resumed from the checkpoint of the one before."""
    session = make_session(world, strategy, optimizer, clip_norm=0.3)
    for stop in stops:
        while session.epoch < 2 and session.steps < stop:
            batches = session.batches(Numbered(47), batch_size=4)
            for batch in batches:
                session.step(batch)
                if session.steps == stop:
                    session.save(directory, extra={"note": "half-way"})
                    break
            batches.close()
        if stop != stops[-1]:
            session.close()
            session = make_session(world, strategy, optimizer, clip_norm=0.3)
            assert session.resume(directory) == {"note": "half-way"}
            assert session.steps == stop
    session.close()
    return [param.detach().clone() for param in session.model.parameters()]


@pytest.mark.processes
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adafactor"])
@pytest.mark.parametrize(
    "strategy", [name for name in SYNCHRONOUS if not strategies.parse(name).traits.servers]
)
def test_resume_equals_no_interruption_bit_for_bit(strategy: str, optimizer: str, tmp_path: Path) -> None:
    workers = 1 if strategy == "single" else 3

    def run(name: str, stops: list[int]) -> list[list[Tensor]]:
        return in_threads(
            workers,
            lambda world: train_and_stop(world, strategy, optimizer, tmp_path / name, stops),
        )

    last = 2 * -(-47 // (4 * workers))
    whole = run("whole", [last])
    parts = run("parts", [2, last // 2 + 1, last])
    assert_same_bits([whole[0], parts[0]])
    assert_same_bits(parts)


@pytest.mark.processes
def test_resume_on_another_number_of_workers(tmp_path: Path) -> None:
    """4 × 3 samples per step become 2 × 6: the same samples, the same steps."""

    def train(world: World, batch: int, until: int, resume: bool) -> list[Tensor]:
        session = make_session(world, optimizer="adam")
        if resume:
            session.resume(tmp_path)
        batches = session.batches(Numbered(48), batch_size=batch)
        for item in batches:
            session.step(item)
            if session.steps == until:
                session.save(tmp_path)
                break
        batches.close()
        session.close()
        return [param.detach().clone() for param in session.model.parameters()]

    in_threads(4, functools.partial(train, batch=3, until=2, resume=False))
    resumed = in_threads(2, functools.partial(train, batch=6, until=4, resume=True))
    want = make_net()
    for param, value in zip(
        want.parameters(),
        in_threads(4, functools.partial(train, batch=3, until=4, resume=False))[0],
        strict=True,
    ):
        param.data = value
    assert_close(resumed[0], want)


def test_resume_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    (nothing,) = in_threads(1, lambda world: make_session(world).resume(tmp_path / "empty"))
    assert nothing is None


@pytest.mark.processes
def test_resume_with_another_optimizer_or_model_is_refused(tmp_path: Path) -> None:
    def first(world: World) -> None:
        session = make_session(world)
        session.save(tmp_path)
        session.close()

    in_threads(1, first)
    with pytest.raises(CheckpointError, match="SGD"):
        in_threads(1, lambda world: make_session(world, optimizer="adam").resume(tmp_path))

    def other(world: World) -> None:
        net = nn.Linear(3, 2)
        session_of(net, torch.optim.SGD(net.parameters(), lr=0.1), loss, world=world).resume(tmp_path)

    with pytest.raises(CheckpointError, match="another model"):
        in_threads(1, other)


def test_misuse_gets_a_sentence() -> None:
    def parameters_of_another_model(world: World) -> None:
        optimizer = torch.optim.SGD(make_net().parameters(), lr=0.1)
        session_of(make_net(), optimizer, loss, world=world)

    with pytest.raises(UsageError, match=r"make the optimizer from model\.parameters\(\)"):
        in_threads(1, parameters_of_another_model)

    def closed(world: World) -> None:
        session = make_session(world)
        session.close()
        session.step(Numbered(4)[0:4])

    with pytest.raises(UsageError, match="closed"):
        in_threads(1, closed)

    with pytest.raises(UsageError, match="batch_size"):
        in_threads(1, lambda world: next(iter(make_session(world).batches(Numbered(4)))))
    with pytest.raises(UsageError, match="runs on 1 worker, not 2"):
        in_threads(2, lambda world: make_session(world, "single"))


def test_the_model_stands_by_itself_after_close() -> None:
    def work(world: World) -> nn.Module:
        session = make_session(world)
        session.step(Numbered(8)[0:8])
        session.close()
        return session.model

    for model in in_threads(2, work):
        value = loss(model, Numbered(8)[0:8])
        value.backward()
        assert all(param.grad is not None for param in model.parameters())


@pytest.mark.processes
@pytest.mark.parametrize("where", ["save", "evaluate"])
def test_pauses_inside_the_loop_when_the_last_step_has_too_few_samples(where: str, tmp_path: Path) -> None:
    """49 samples, 2 × 4 per step: the 7th step has one sample, for one worker."""

    def work(world: World) -> int:
        session = make_session(world)
        for batch in session.batches(Numbered(49), batch_size=4):
            session.step(batch)
            if session.steps == 7:
                session.save(tmp_path) if where == "save" else session.evaluate(Numbered(9))
        session.close()
        return session.steps

    assert in_threads(2, work) == [7, 7]


def test_scripts_that_part_are_told_so() -> None:
    def work(world: World) -> None:
        session = make_session(world)
        if world.rank:
            session.evaluate(Numbered(8))
        else:
            session.close()

    with pytest.raises(UsageError, match="worker 0 finished, worker 1 called evaluate"):
        in_threads(2, work)


def test_a_failed_step_breaks_the_session_instead_of_the_others_patience() -> None:
    def work(world: World) -> str:
        net = make_net()

        def failing(model: nn.Module, batch: Any) -> Tensor:
            raise ValueError("no such colour")

        session = session_of(net, two_groups(OPTIMIZERS["sgd"], net), failing, world=world)
        with pytest.raises(ValueError, match="no such colour"):
            session.step(Numbered(4)[0:4])
        with pytest.raises(UsageError, match=r"an earlier step failed \(ValueError: no such colour\)"):
            session.step(Numbered(4)[0:4])
        session.close()
        return "went on"

    assert in_threads(1, work) == ["went on"]


def test_evaluation_leaves_every_part_in_its_mode() -> None:
    def work(world: World) -> list[bool]:
        session = make_session(world)
        session.model.train()
        session.model.get_submodule("conv").eval()
        session.evaluate(Numbered(8))
        return [session.model.training, session.model.get_submodule("conv").training]

    assert in_threads(1, work) == [[True, False]]


def test_steps_outside_a_data_set_do_not_use_up_its_samples() -> None:
    def work(world: World) -> int:
        session = make_session(world)
        session.step(Numbered(8)[0:8])
        seen = 0
        for batch in session.batches(Numbered(20), batch_size=4):
            seen += len(batch[1])
            session.step(batch)
        session.close()
        return seen

    assert sum(in_threads(2, work)) == 20


def test_constant_buffers_keep_their_bits() -> None:
    def work(world: World) -> Tensor:
        net = nn.Linear(3, 2)
        net.register_buffer("table", torch.linspace(0.1, 7.7, 50))
        net.register_buffer("mask", torch.full((2,), torch.finfo(torch.float32).min))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        session = session_of(net, optimizer, lambda model, batch: model(batch).square().mean(), world=world)
        session.step(torch.ones(2, 3))
        session.close()
        return torch.cat([net.table, net.mask])

    want = torch.cat([torch.linspace(0.1, 7.7, 50), torch.full((2,), torch.finfo(torch.float32).min)])
    assert all(torch.equal(got, want) for got in in_threads(3, work))


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adafactor"])
def test_the_optimizer_keeps_its_state_from_session_to_session(optimizer: str) -> None:
    def work(world: World, sessions: int) -> list[Tensor]:
        net = make_net()
        user_optimizer = two_groups(OPTIMIZERS[optimizer], net)
        for part in range(sessions):
            session = session_of(net, user_optimizer, loss, world=world)
            for number in range(6 // sessions):
                begin = 8 * (part * 6 // sessions + number)
                session.step(Numbered(48)[begin + 4 * world.rank : begin + 4 * world.rank + 4])
            session.close()
        return [param.detach().clone() for param in net.parameters()]

    whole = in_threads(2, lambda world: work(world, 1))
    parts = in_threads(2, lambda world: work(world, 3))
    assert_same_bits([whole[0], *parts])


def test_memory_is_given_back_after_a_session() -> None:
    def work(world: World) -> list[int]:
        sizes = []
        for _ in range(4):
            net = nn.Linear(500, 500)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            session = session_of(
                net, optimizer, lambda model, batch: model(batch).square().mean(), world=world
            )
            session.step(torch.ones(2, 500))
            session.close()
            world.host.barrier()
            sizes.append(os.fstat(world.host.arena.fd).st_blocks * 512)
        return sizes

    first, *_, last = in_threads(2, work)[0]
    assert last < first + 1_000_000, "four sessions of 4 MB each must not add up"


@pytest.mark.processes
@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=12),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
                torch.optim.lr_scheduler.MultiStepLR(optimizer, [2], 0.5),
            ],
            [3],
        ),
    ],
)
def test_schedulers_are_saved_and_go_on(make: Any, tmp_path: Path) -> None:
    def work(world: World, stop: int | None) -> list[Tensor]:
        def start() -> Session:
            net = make_net()
            optimizer = two_groups(OPTIMIZERS["momentum"], net)
            return session_of(net, optimizer, loss, world=world, scheduler=make(optimizer))

        session = start()
        for number in range(6):
            session.step(Numbered(24)[4 * number : 4 * number + 4])
            if number == stop:
                session.save(tmp_path)
                session.close()
                session = start()
                assert session.resume(tmp_path) == {}
        session.close()
        return [param.detach().clone() for param in session.model.parameters()]

    (whole,) = in_threads(1, lambda world: work(world, None))
    (parts,) = in_threads(1, lambda world: work(world, 2))
    assert_same_bits([whole, parts])


def on_a_plateau(optimizer: Optimizer) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    """Anything is a plateau to this one."""
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)


def test_a_scheduler_that_needs_a_measure_is_refused_before_the_first_step() -> None:
    def work(world: World) -> None:
        net = make_net()
        before = [param.detach().clone() for param in net.parameters()]
        optimizer = two_groups(OPTIMIZERS["momentum"], net)
        with pytest.raises(UsageError, match=r"ReduceLROnPlateau.step needs metrics.*leave scheduler= out"):
            session_of(net, optimizer, loss, world=world, scheduler=on_a_plateau(optimizer))
        assert_same_bits([before, list(net.parameters())])

    in_threads(2, work)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_way_that_the_refusal_names_is_that_of_one_process(workers: int) -> None:
    data = Numbered(24)

    def work(world: World) -> tuple[float, list[Tensor]]:
        session = make_session(world)
        scheduler = on_a_plateau(session.optimizer)
        for number in range(4):
            rows = torch.arange(6 * number, 6 * number + 6)[world.rank :: workers]
            session.step(data[rows])
            scheduler.step(session.evaluate(data)["loss"])
        session.close()
        rate = session.optimizer.param_groups[0]["lr"]
        return rate, [param.detach().clone() for param in session.model.parameters()]

    net = make_net()
    optimizer = two_groups(OPTIMIZERS["momentum"], net)
    scheduler, first = on_a_plateau(optimizer), optimizer.param_groups[0]["lr"]
    for number in range(4):
        optimizer.zero_grad()
        loss(net, data[6 * number : 6 * number + 6]).backward()
        optimizer.step()
        scheduler.step(loss(net, data[0:24]).item())
    assert optimizer.param_groups[0]["lr"] < first
    for rate, params in in_threads(workers, work):
        assert rate == optimizer.param_groups[0]["lr"]
        assert_close(params, net)


def test_new_parameters_and_other_models_are_refused() -> None:
    def grown(world: World) -> None:
        net = make_net()
        optimizer = torch.optim.SGD(net.out.parameters(), lr=0.1)
        session = session_of(net, optimizer, loss, world=world)
        optimizer.add_param_group({"params": list(net.into.parameters())})
        session.step(Numbered(4)[0:4])

    with pytest.raises(UsageError, match="had 2 parameters when the session was made and has 4 now"):
        in_threads(1, grown)

    def different(world: World) -> None:
        net = nn.Linear(3, 2 + world.rank)
        session_of(net, torch.optim.SGD(net.parameters(), lr=0.1), loss, world=world)

    with pytest.raises(UsageError, match="worker 1 has another model or optimizer than worker 0"):
        in_threads(2, different)


def test_a_disk_that_fails_fails_everyone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    def work(world: World) -> str:
        session = make_session(world)
        with pytest.raises(CheckpointError) as failed:
            session.save(tmp_path / "file" / "below")
        return str(failed.value)

    one, two = in_threads(2, work)
    assert one == two


def test_a_script_asks_the_session_which_worker_it_is() -> None:
    def work(world: World) -> tuple[int, int, bool]:
        with make_session(world) as session:
            return session.rank, session.workers, session.is_main

    assert in_threads(3, work) == [(0, 3, True), (1, 3, False), (2, 3, False)]
