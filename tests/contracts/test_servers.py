"""What sessions with servers promise: exact sums, checkpoints that fit any number of them, bounded staleness."""

import functools
import random
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands import strategies, telemetry
from manyhands.cluster.worker.world import World
from manyhands.engine.session import Session
from manyhands.errors import UsageError
from manyhands.servers.process.group_update import GroupUpdate
from manyhands.servers.process.shard import PlainShard
from manyhands.servers.process.update_counters import UpdateCounters
from tests.contracts.test_sessions import Numbered
from tests.contracts.test_strategies import (
    CASES,
    OPTIMIZERS,
    Steps,
    assert_close,
    assert_same_bits,
    loss,
    make_net,
    make_steps,
    plainly,
    together,
    two_groups,
)
from tests.end_to_end.commands import manyhands
from tests.sessions import session_of
from tests.threads import in_threads

ASYNC, STALE = "parameter-server:async", "parameter-server:stale,bound=2"
CACHE = "parameter-server:cache=true"


def make_session(
    world: World, strategy: str, optimizer: str = "momentum", lr: float | None = None
) -> Session:
    net = make_net()
    made = two_groups(OPTIMIZERS[optimizer], net)
    for group in made.param_groups:
        group["lr"] = lr or group["lr"]
    return session_of(net, made, loss, world=world, strategy=strategy)


def trained(session: Session) -> list[Tensor]:
    session.close()
    return [param.detach().clone() for param in session.model.parameters()]


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adafactor"])
def test_sync_equals_one_big_batch(optimizer: str, workers: int, servers: int) -> None:
    make = functools.partial(two_groups, OPTIMIZERS[optimizer])
    steps = make_steps(workers)

    def work(world: World) -> list[Tensor]:
        session = make_session(world, "parameter-server", optimizer)
        for step in steps:
            session.step(*step[world.rank])
        return trained(session)

    ours = in_threads(workers, work, servers=servers)
    assert_close(ours[0], plainly(make_net(), make, steps))
    assert_same_bits(ours)


@pytest.mark.parametrize(
    "case", ["clipped", "batches differ", "a worker without data", "unused, clipped, uneven"]
)
@pytest.mark.parametrize("workers", [2, 3])
def test_one_push_per_host_equals_one_big_batch(workers: int, case: str) -> None:
    settings = dict(CASES[case])
    net = functools.partial(make_net, optional=settings.pop("optional", False))
    steps = make_steps(workers, settings.pop("sizes", lambda step, rank: [6]))
    make = functools.partial(two_groups, OPTIMIZERS["momentum"])
    want = plainly(net(), make, steps, **settings)
    ours = together(workers, CACHE, net, make, steps, **settings)
    assert_close(ours[0], want)
    assert_same_bits(ours)


RARE = "every=into=3-tied.weight=2"


def with_rare_layers(steps: Steps, *, clip: float | None = None, pauses: Collection[int] = ()) -> nn.Module:
    """The definition of `RARE`: the mean over a layer's steps when it is due; at a pause, what is left."""
    net = make_net()
    optimizer = with_momentum(net)
    every = {
        name: 3 if name.startswith("into.") else 2 if name == "tied.weight" else 1 for name in PARAMETERS
    }
    kept: dict[str, list[Tensor]] = {name: [] for name in PARAMETERS}

    def update(due: Callable[[str], bool]) -> None:
        for name, param in net.named_parameters():
            param.grad = torch.stack(kept.pop(name)).mean(0) if kept[name] and due(name) else None
            kept.setdefault(name, [])
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()

    for number, workers in enumerate(steps, start=1):
        batches = [batch for accumulated in workers for batch in accumulated]
        total = sum(len(targets) for _, targets in batches)
        optimizer.zero_grad()
        for batch in batches:
            (loss(net, batch) * (len(batch[1]) / total)).backward()
        for name, param in net.named_parameters():
            assert param.grad is not None
            kept[name].append(param.grad)
        update(lambda name: len(kept[name]) == every[name])
        if number in pauses or number == len(steps):
            update(lambda name: True)
    return net


PARAMETERS = [name for name, _ in make_net().named_parameters()]


def with_momentum(net: nn.Module) -> Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("strategy", ["parameter-server", CACHE])
@pytest.mark.parametrize("case", ["plain", "clipped", "accumulated", "a worker without data"])
def test_layers_that_are_pushed_every_few_steps_get_the_mean_of_their_gradients(
    case: str, strategy: str
) -> None:
    settings = dict(CASES[case])
    steps = [*make_steps(2, settings.pop("sizes", lambda step, rank: [6])), *make_steps(2)]
    text = f"{strategy}{',' if ':' in strategy else ':'}{RARE}"
    ours = together(2, text, make_net, with_momentum, steps, **settings)
    assert_close(ours[0], with_rare_layers(steps, **settings))
    assert_same_bits(ours)


@pytest.mark.parametrize("consistency", ["async", "stale,bound=0", "async,cache=true"])
def test_a_worker_that_gathers_with_nobody_keeps_layers_back_as_well(consistency: str) -> None:
    steps = [*make_steps(1), *make_steps(1)]

    def work(world: World) -> list[Tensor]:
        net = make_net()
        strategy = f"parameter-server:{consistency},{RARE}"
        session = session_of(net, with_momentum(net), loss, world=world, strategy=strategy)
        for number, step in enumerate(steps, start=1):
            session.step(*step[0])
            session.engine.generation.servers.settle()  # type: ignore[union-attr]
            if number == 4:
                session.evaluate(Numbered(4))
        return trained(session)

    (ours,) = in_threads(1, work, servers=3)
    assert_close(ours, with_rare_layers(steps, pauses=[4]))


@pytest.mark.processes
def test_a_checkpoint_leaves_nothing_kept_back(tmp_path: Path) -> None:
    steps = [*make_steps(2), *make_steps(2)]
    ours: list[list[Tensor]] = []
    for servers, part in ((2, steps[:4]), (1, steps[4:])):

        def work(world: World, part: Steps = part, resume: bool = servers == 1) -> list[Tensor]:
            net = make_net()
            strategy = f"parameter-server:{RARE}"
            session = session_of(net, with_momentum(net), loss, world=world, strategy=strategy)
            assert not resume or session.resume(tmp_path) is not None
            for step in part:
                session.step(*step[world.rank])
            session.save(tmp_path)
            return trained(session)

        ours = in_threads(2, work, servers=servers)
    assert_close(ours[0], with_rare_layers(steps, pauses=[4]))


def test_a_step_in_which_nothing_is_pushed_is_a_step() -> None:
    steps = make_steps(2)
    ours = together(2, "parameter-server:every=*=99", make_net, with_momentum, steps, clip=0.05)
    mean = make_net()
    optimizer = with_momentum(mean)
    for workers in steps:
        for batches in workers:
            for batch in batches:
                (loss(mean, batch) / (2 * len(steps))).backward()
    nn.utils.clip_grad_norm_(mean.parameters(), 0.05)
    optimizer.step()
    assert_close(ours[0], mean)


def test_a_layer_that_the_model_does_not_have_is_refused() -> None:
    for layer, known in (
        ("branches", "conv, into, out, tied"),
        ("into.gate", "into.bias, into.weight"),
        ("x.*", "again, conv"),
    ):
        strategy = f"parameter-server:every={layer}=2"
        message = refused(lambda world, text=strategy: make_session(world, text), servers=1)  # type: ignore[misc]
        assert f"unknown layer '{layer}'" in message
        assert known in message


def test_every_is_part_of_the_text_of_the_strategy() -> None:
    text = "parameter-server:consistency=async,every=into=3-*.bias=2"
    strategy = strategies.parse(text)
    assert strategies.describe(strategy) == text
    service = strategy.traits.servers
    assert service
    names = ("into.weight", "into.bias", "out.bias", "out.weight", "intone.weight")
    assert [service.every_of(name) for name in names] == [3, 3, 2, 1, 1]
    for wrong in ("into.*", "into.*=0", "=3", "into.*=x", "into=-2", "into=2="):
        with pytest.raises(UsageError, match="expected a layer and a number of at least 1"):
            strategies.parse(f"parameter-server:every={wrong}")


@pytest.mark.parametrize("strategy", [ASYNC, STALE])
def test_one_worker_without_gathering_is_plain_pytorch(strategy: str) -> None:
    """Nobody else pushes, so nothing is stale: except that a step may begin before the last update is there."""
    steps = make_steps(1)

    def work(world: World) -> list[Tensor]:
        session = make_session(world, strategy)
        for step in steps:
            session.step(*step[0])
            session.engine.generation.servers.settle()  # type: ignore[union-attr]
        return trained(session)

    (ours,) = in_threads(1, work, servers=2)
    assert_close(ours, plainly(make_net(), functools.partial(two_groups, OPTIMIZERS["momentum"]), steps))


def test_gradients_leave_while_the_backward_pass_goes_on() -> None:
    def work(world: World) -> list[float]:
        session = make_session(world, "parameter-server")
        left: list[float] = []
        first = session.model.conv.weight  # type: ignore[union-attr]
        first.register_hook(lambda grad: left.append(telemetry.totals()["pushes"]))  # type: ignore[operator,union-attr]
        for step in make_steps(1)[:2]:
            before = telemetry.totals().get("pushes", 0)
            session.step(*step[0])
            left.append(telemetry.totals()["pushes"] - before)
            left[-2] -= before
        session.close()
        return left

    (counts,) = in_threads(1, work, servers=2)
    assert counts == [1, 2, 1, 2], "pushes by the time of the last gradient, and in all, of two steps"


def test_without_gathering_the_next_forward_pass_does_not_wait_for_the_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forwards, updates = threading.Semaphore(0), []
    write = PlainShard.write

    def slowly(self: PlainShard, update: GroupUpdate, *args: Any) -> None:
        if update.group.index == 0:
            updates.append(forwards.acquire(timeout=20) and forwards.acquire(timeout=20))
        write(self, update, *args)

    def noticed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        forwards.release()
        return loss(model, batch)

    monkeypatch.setattr(PlainShard, "write", slowly)

    def work(world: World) -> None:
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        session = session_of(net, optimizer, noticed, world=world, strategy=ASYNC)
        steps = make_steps(1)
        session.step(*steps[0][0])
        session.step(*steps[1][0])
        forwards.release(4)  # for the last update, and for nobody
        session.close()

    in_threads(1, work, servers=1)
    assert updates == [True, True], "the first update was made after the second forward pass had begun"


def test_an_update_on_the_same_host_is_seen_without_a_copy() -> None:
    """A worker that says and asks nothing sees it: what it computes on is the memory that the server updates."""

    def work(world: World) -> bool:
        session = make_session(world, ASYNC)
        before = [param.detach().clone() for param in session.model.parameters()]
        world.host.barrier()
        if world.rank == 0:
            session.step(Numbered(4)[0:4])
            session.engine.generation.servers.settle()  # type: ignore[union-attr]
        world.host.barrier()
        seen = not any(torch.equal(a, b) for a, b in zip(before, session.model.parameters(), strict=True))
        trained(session)
        return seen

    assert in_threads(2, work, servers=2) == [True, True]


@pytest.mark.parametrize("strategy", ["parameter-server", ASYNC, STALE, CACHE, "two-level"])
def test_workers_learn_and_end_with_the_same_parameters(strategy: str) -> None:
    data = Numbered(96)

    def work(world: World) -> tuple[float, float, list[Tensor], int]:
        session = make_session(world, strategy, "sgd", lr=0.05)
        before = session.evaluate(data)["loss"]
        for _ in range(12):
            for batch in session.batches(data, batch_size=4):
                session.step(batch)
        after = session.evaluate(data)["loss"]
        params = trained(session)
        assert session.summary()["staleness"]["histogram"]
        return before, after, params, session.samples

    results = in_threads(3, work, strategy=strategy)
    for before, after, _, samples in results:
        assert after < 0.7 * before
        assert samples == 12 * 96
    assert_same_bits([params for _, _, params, _ in results])


@pytest.mark.parametrize(("bound", "more"), [(0, ""), (2, ""), (1, ",every=*=3")])
def test_the_bound_on_staleness_is_kept_at_every_update(
    bound: int, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of very different speed; every update is looked at as it is made."""
    leads: list[int] = []
    note = UpdateCounters.note

    def noting(self: UpdateCounters, update: GroupUpdate, version: int) -> None:
        for worker, gradient in zip(update.workers, update.gradients, strict=True):
            floor = update.clocks.floor
            leads.append(gradient.push.step - floor)
            assert gradient.push.step - floor <= bound, (
                f"worker {worker} is {gradient.push.step - floor} steps ahead"
            )
        note(self, update, version)

    monkeypatch.setattr(UpdateCounters, "note", noting)
    data = Numbered(160)
    chance = random.Random(4)
    delays = [[chance.choice([0.0, 0.0, 0.0, 0.02]) * (1 + rank) for _ in range(40)] for rank in range(3)]

    def work(world: World) -> None:
        session = make_session(world, f"stale:bound={bound}{more}", "sgd")
        for number in range(10 + 10 * world.rank):  # out of data at different times: nobody waits for those
            time.sleep(delays[world.rank][number])
            session.step(data[4 * number : 4 * number + 4])
        session.evaluate(data)
        for number in range(5):
            session.step(data[4 * number : 4 * number + 4])
        session.close()

    in_threads(3, work, strategy="stale")
    assert max(leads) == bound, "the bound was never reached: the test shows nothing"


def in_parts(
    strategy: str, optimizer: str, directory: Path, parts: list[tuple[int, int, int]]
) -> list[list[Tensor]]:
    """Train to each number of steps with so many workers and servers, each world resumed from the one before."""
    result: list[list[Tensor]] = []
    for number, (until, workers, servers) in enumerate(parts):

        def work(world: World, until: int = until, resume: bool = number > 0) -> list[Tensor]:
            session = make_session(world, strategy, optimizer)
            if resume:
                assert session.resume(directory) is not None
            batches = session.batches(Numbered(48), batch_size=12 // world.size)
            for batch in batches:
                session.step(batch)
                if session.steps == until:
                    break
            batches.close()
            session.save(directory)
            return trained(session)

        result = in_threads(workers, work, servers=servers)
    return result


@pytest.mark.processes
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adafactor"])
@pytest.mark.parametrize("strategy", ["parameter-server", CACHE])
def test_a_checkpoint_goes_on_with_other_workers_and_servers(
    strategy: str, optimizer: str, tmp_path: Path
) -> None:
    whole = in_parts(strategy, optimizer, tmp_path / "whole", [(4, 2, 1)])
    same = in_parts(strategy, optimizer, tmp_path / "same", [(2, 2, 1), (4, 2, 1)])
    assert_same_bits([whole[0], same[0]])
    other = in_parts(strategy, optimizer, tmp_path / "other", [(1, 2, 3), (3, 3, 1), (4, 2, 2)])
    want = make_net()
    for param, value in zip(want.parameters(), whole[0], strict=True):
        param.data = value
    assert_close(other[0], want)


@pytest.mark.processes
def test_a_checkpoint_goes_from_servers_to_none_and_back(tmp_path: Path) -> None:
    whole = in_parts("all-reduce", "adam", tmp_path / "whole", [(4, 2, 0)])
    in_parts("parameter-server", "adam", tmp_path / "mixed", [(2, 2, 2)])

    def without(world: World) -> list[Tensor]:
        session = make_session(world, "all-reduce", "adam")
        session.resume(tmp_path / "mixed")
        for batch in session.batches(Numbered(48), batch_size=6):
            session.step(batch)
            break
        session.save(tmp_path / "mixed")
        return trained(session)

    in_threads(2, without)

    def again(world: World) -> list[Tensor]:
        session = make_session(world, "parameter-server", "adam")
        session.resume(tmp_path / "mixed")
        for batch in session.batches(Numbered(48), batch_size=6):
            session.step(batch)
        return trained(session)

    want = make_net()
    for param, value in zip(want.parameters(), whole[0], strict=True):
        param.data = value
    assert_close(in_threads(2, again, servers=1)[0], want)


def test_the_optimizer_gets_its_state_back_on_every_worker() -> None:
    def work(world: World) -> int:
        session = make_session(world, "parameter-server")
        session.step(Numbered(8)[0:4])
        session.close()
        return len(session.optimizer.state)

    assert in_threads(2, work, servers=1) == [len(list(make_net().parameters()))] * 2


def test_a_limited_gradient_without_gathering() -> None:
    """Each worker limits its own: one step of SGD moves no further than rate × limit."""
    start = make_net()

    def work(world: World) -> list[Tensor]:
        net = make_net()
        optimizer: Optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        session = session_of(net, optimizer, loss, world=world, strategy=ASYNC, clip_norm=0.05)
        session.step(Numbered(8)[0:8])
        return trained(session)

    (ours,) = in_threads(1, work, servers=2)
    moved = torch.stack([(a - b).norm() for a, b in zip(ours, start.parameters(), strict=True)]).norm()
    assert moved.item() == pytest.approx(0.05, rel=1e-3)


def refused(work: Callable[[World], object], **more: int) -> str:
    with pytest.raises(UsageError) as error:
        in_threads(1, work, **more)  # type: ignore[arg-type]
    return str(error.value)


def test_what_cannot_run_with_servers_is_refused() -> None:
    assert "needs --servers 1 or more" in refused(lambda world: make_session(world, ASYNC))
    assert "uses no servers" in refused(lambda world: make_session(world, "all-reduce"), servers=1)

    def lbfgs(world: World) -> Session:
        net = make_net()
        return session_of(net, torch.optim.LBFGS(net.parameters()), loss, world=world, strategy=ASYNC)

    assert "L-BFGS" in refused(lbfgs, servers=1)

    def twice(world: World) -> Session:
        with make_session(world, ASYNC) as session:
            session.step(Numbered(8)[0:4])
        return make_session(world, ASYNC)

    assert "serve 1 session, " in refused(twice, servers=1)


OTHER_MODEL = """
import os, torch, manyhands as mh
net = torch.nn.Linear(4, 4 if int(os.environ["RANK"]) == 0 else 3)
session = mh.session(net, torch.optim.SGD(net.parameters(), lr=0.1), lambda net, batch: net(batch).square().mean())
session.step(torch.ones(2, 4))
"""


@pytest.mark.processes  # a server that refuses a worker keeps its memory until its process ends
def test_another_model_on_the_servers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OTHER_MODEL)
    command = ["launch", "--workers", "1", "--servers", "1", "--strategy", ASYNC, "script.py"]
    assert "worker 0 has another model" in manyhands(*command, cwd=tmp_path).refusal()
