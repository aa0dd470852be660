"""Checkpoints that people write and load themselves, with `state_dict` and `torch.save`, while a session runs."""

import collections
import copy
import functools
import io
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_model
from torch import Tensor, nn

from manyhands import strategies
from manyhands.cluster.worker.world import World
from manyhands.engine.session import Session
from manyhands.errors import UsageError
from tests.contracts.test_strategies import (
    ANY_OPTIMIZER,
    APART,
    OPTIMIZERS,
    REPEATABLE,
    SYNCHRONOUS,
    both,
    lbfgs,
    loss,
    make_net,
    make_steps,
    two_groups,
)
from tests.end_to_end.commands import manyhands
from tests.pages import DOCS, blocks
from tests.sessions import session_of
from tests.threads import in_threads


class Headed(nn.Module):
    """A large body, a small head with a tied weight, and a part that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(200, 200)
        self.head = nn.Linear(200, 3)
        self.again = nn.Linear(200, 3)
        self.again.weight = self.head.weight
        self.fixed = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.body(inputs))
        return self.fixed(self.head(hidden) + self.again(hidden))


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def saved_bytes(thing: Any) -> int:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return len(buffer.getvalue())


@pytest.mark.parametrize("strategy", ["single", "all-reduce", "hogwild", "gossip", "parameter-server:sync"])
def test_what_is_written_of_a_model_in_a_session_is_what_is_asked_for(strategy: str, tmp_path: Path) -> None:
    def work(world: World) -> None:
        net = Headed()
        trained = [param for param in net.parameters() if param.requires_grad]
        session = session_of(net, torch.optim.Adam(trained), square, world=world, strategy=strategy)
        session.step(torch.ones(2, 200))
        world.host.barrier()  # some do not wait for each other, and change what all have
        assert saved_bytes(net.head.state_dict()) < 200 * 3 * 4 + 2500
        assert saved_bytes(net.fixed.state_dict()) < 2500
        file = tmp_path / f"{world.rank}.safetensors"
        save_model(net, str(file))
        written = set(load_file(file))
        assert net.state_dict().keys() - written in ({"again.weight"}, {"head.weight"}), "the tied one once"
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert other.again.weight is other.head.weight
            assert other.body.weight.data_ptr() != net.body.weight.data_ptr()
            assert torch.equal(other.body.weight, net.body.weight)
            assert other.body.weight.grad is None
            square(other, torch.ones(2, 200)).backward()
            assert other.body.weight.grad is not None, "the copy is not in the session"
        session.close()
        load_model(net, str(file))

    in_threads(1 if strategy == "single" else 2, work, strategy=strategy)


# A checkpoint in the middle, by PyTorch's own means


def some_session(
    world: World, optimizer: str, first: dict[str, Any] | None = None, **settings: Any
) -> Session:
    """A session; `first` is a checkpoint that is loaded before it is made, as many scripts do."""
    net = make_net()
    made = two_groups(OPTIMIZERS[optimizer], net)
    if first:
        net.load_state_dict(first["model"])
        made.load_state_dict(first["optimizer"])
    return session_of(net, made, loss, world=world, **settings)


def checkpoint_of(session: Session) -> dict[str, Any]:
    training = session.engine.training
    buffer = io.BytesIO()
    torch.save({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}, buffer)
    buffer.seek(0)
    found: dict[str, Any] = torch.load(buffer)
    return found


def load(session: Session, saved: dict[str, Any]) -> None:
    session.engine.training.model.load_state_dict(saved["model"])
    session.engine.training.optimizer.load_state_dict(saved["optimizer"])


def train(session: Session, rank: int, first: int, last: int) -> None:
    for step in make_steps(4)[first:last]:
        session.step(*step[rank])


def params_of(session: Session) -> list[Tensor]:
    return [param.detach().clone() for param in session.engine.training.model.parameters()]


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two optimizers have the same state, to the bit."""
    first, second = one["state"], other["state"]
    return first.keys() == second.keys() and all(
        first[index].keys() == second[index].keys()
        and all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(second[index][name]))
            for name, value in values.items()
        )
        for index, values in first.items()
    )


def interrupted(world: World, strategy: str, optimizer: str, *, after: bool) -> list[list[Tensor]]:
    """What a run comes to that takes a checkpoint in the middle, and one that goes on from it."""
    session = some_session(world, optimizer, strategy=strategy)
    train(session, world.rank, 0, 3)
    saved = checkpoint_of(session)
    assert saved["optimizer"]["state"], "a state of some steps is not empty"
    train(session, world.rank, 3, 5)
    session.close()
    again = some_session(world, optimizer, None if after else saved, strategy=strategy)
    if after:
        load(again, saved)
        assert same_state(again.optimizer.state_dict(), saved["optimizer"])
    train(again, world.rank, 3, 5)
    again.close()
    return [params_of(session), params_of(again)]


LOCAL = [text for text in both(SYNCHRONOUS, ANY_OPTIMIZER) if not strategies.parse(text).traits.servers]


@pytest.mark.parametrize("after", [False, True], ids=["before the session", "in the session"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "nadam"])
@pytest.mark.parametrize("strategy", LOCAL)
def test_a_run_goes_on_from_a_checkpoint_of_its_own(strategy: str, optimizer: str, after: bool) -> None:
    workers = 1 if strategy == "single" else 4
    for whole, parts in in_threads(
        workers, functools.partial(interrupted, strategy=strategy, optimizer=optimizer, after=after)
    ):
        for one, other in zip(whole, parts, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-9)


SERVED = [text for text in both(SYNCHRONOUS, ANY_OPTIMIZER) if strategies.parse(text).traits.servers]


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adafactor"])
@pytest.mark.parametrize("strategy", SERVED)
def test_with_servers_a_run_goes_on_from_a_checkpoint_of_its_own(strategy: str, optimizer: str) -> None:
    """Servers serve one session, so each run is a world of its own."""

    def first(world: World) -> tuple[dict[str, Any], list[Tensor]]:
        session = some_session(world, optimizer, strategy=strategy)
        train(session, world.rank, 0, 3)
        saved = checkpoint_of(session)
        train(session, world.rank, 3, 5)
        session.close()
        return saved, params_of(session)

    found = in_threads(4, first, strategy=strategy)
    saved, whole = found[0]
    assert saved["optimizer"]["state"]

    def second(world: World, *, after: bool) -> list[Tensor]:
        session = some_session(world, optimizer, None if after else saved, strategy=strategy)
        if after:
            load(session, saved)
        train(session, world.rank, 3, 5)
        session.close()
        return params_of(session)

    for after in (False, True):
        for parts in in_threads(4, functools.partial(second, after=after), strategy=strategy):
            for one, other in zip(whole, parts, strict=True):
                torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-9)


def loaded(world: World, saved: dict[str, Any], strategy: str, *, after: bool, steps: int = 2) -> Any:
    """What a run comes to that begins with a checkpoint, and the optimizer's state with which it began."""
    session = some_session(world, "adam", None if after else saved, strategy=strategy)
    if after:
        load(session, saved)
    began = session.optimizer_state()
    train(session, world.rank, 3, 3 + steps)
    session.close()
    return params_of(session), began


@functools.cache
def plain_checkpoint() -> dict[str, Any]:
    """Of a script that knows no session."""
    net = make_net()
    optimizer = two_groups(OPTIMIZERS["adam"], net)
    for step in make_steps(1)[:3]:
        optimizer.zero_grad()
        loss(net, step[0][0]).backward()
        optimizer.step()
    return copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer.state_dict()})


@pytest.mark.parametrize("strategy", both(APART, ANY_OPTIMIZER))
def test_under_every_strategy_a_checkpoint_is_the_same_before_and_in_the_session(strategy: str) -> None:
    saved = plain_checkpoint()
    runs = [
        in_threads(
            4, functools.partial(loaded, saved=saved, strategy=strategy, after=after), strategy=strategy
        )
        for after in (False, True)
    ]
    for before, after in zip(*runs, strict=True):
        assert same_state(before[1], saved["optimizer"])
        assert same_state(after[1], saved["optimizer"])
        if strategy in REPEATABLE:
            for one, other in zip(before[0], after[0], strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("after", [False, True], ids=["before the session", "in the session"])
@pytest.mark.parametrize("placement", ["sharded", "tensor:ways=2", "pipeline", "sharded:shards=2"])
def test_under_placements_a_run_goes_on_from_a_checkpoint_of_plain_pytorch(
    placement: str, after: bool
) -> None:
    saved = plain_checkpoint()
    workers = 4 if placement == "sharded:shards=2" else 2
    (batch,) = make_steps(1)[3]

    def work(world: World) -> Any:
        session = some_session(world, "adam", None if after else saved, placement=placement, example=batch[0])
        if after:
            load(session, saved)
        began = session.optimizer_state()
        session.step(*batch)
        with pytest.raises(UsageError, match=r"call session.optimizer_state\(\) on every worker"):
            session.optimizer.state_dict()
        session.close()
        return began, params_of(session)

    net = make_net()
    optimizer = two_groups(OPTIMIZERS["adam"], net)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    optimizer.zero_grad()
    loss(net, batch[0]).backward()
    optimizer.step()
    for began, params in in_threads(workers, work):
        assert same_state(began, saved["optimizer"])
        for got, want in zip(params, net.parameters(), strict=True):
            torch.testing.assert_close(got, want.data, rtol=1e-6, atol=1e-9)


# What cannot be right is refused


def refusals(workers: int, change: Any, expected: str, strategy: str = "all-reduce") -> None:
    def work(world: World) -> None:
        session = some_session(world, "adam", strategy=strategy)
        train(session, world.rank, 0, 1)
        change(session, world.rank)
        with pytest.raises(UsageError, match=expected):
            train(session, world.rank, 1, 2)
        session.close()

    in_threads(workers, work, strategy=strategy)


def only_the_first(session: Session, rank: int) -> None:
    if rank == 0:
        load(session, plain_checkpoint())


def each_another(session: Session, rank: int) -> None:
    saved = {name: value + rank for name, value in plain_checkpoint()["model"].items()}
    session.model.load_state_dict(saved)


def other_parts(session: Session, rank: int) -> None:
    part = session.model.get_submodule("into" if rank else "out")
    part.load_state_dict(part.state_dict())


def to_float(session: Session, rank: int) -> None:
    session.model.float()


def another_layer(session: Session, rank: int) -> None:
    session.model.out = nn.Linear(37, 4, dtype=torch.float64)


def one_more(session: Session, rank: int) -> None:
    session.model.more = nn.Linear(2, 2)


def one_less(session: Session, rank: int) -> None:
    session.model.out = nn.Identity()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            only_the_first,
            r"worker 0 loaded a state \(load_state_dict.* and worker 1 called step\(\); load the same",
        ),
        (each_another, "workers 0 and 1 have loaded different parameters"),
        (other_parts, "workers 0 and 1 have loaded different parts of the model"),
        (to_float, r"another type \(torch.float32\) than when the session was made \(torch.float64\)"),
        (another_layer, "parameter 'out.weight' is not the one that the model had"),
        (one_more, "parameter 'more.weight' is not the one"),
        (one_less, "the model has lost parameter 'out.weight'"),
    ],
)
def test_what_a_step_could_not_follow_is_refused(change: Any, expected: str) -> None:
    refusals(2, change, expected)


def test_a_forward_pass_that_moves_a_parameter_is_refused() -> None:
    """As in the usual EEGNet: plain PyTorch would update the new memory."""

    class Normed(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=1)
            return super().forward(input)

    def work(world: World) -> None:
        net = Normed(3, 3)
        session = session_of(net, torch.optim.SGD(net.parameters(), lr=0.1), square, world=world)
        with pytest.raises(UsageError, match=r"forward pass gave parameter 'weight' other memory.*copy_"):
            session.step(torch.ones(2, 3))
        session.close()

    in_threads(2, work)


# What works as with plain PyTorch


@pytest.mark.parametrize(
    "strategy", ["single", "all-reduce", "all-reduce:topology=ring", "parameter-server:sync"]
)
def test_values_that_are_assigned_are_trained_on(strategy: str) -> None:
    """By `assign=True`, by `param.data = …`, in a part of the model: as in one process that copies them."""
    workers = 1 if strategy == "single" else 2
    net = make_net()
    optimizer = two_groups(OPTIMIZERS["adam"], net)
    steps = make_steps(workers)
    values = {name: value * 0.5 for name, value in make_net(seed=9).state_dict().items()}

    def clip(params: Any) -> None:
        for param in params:
            param.data = param.data.clamp(-0.2, 0.2)

    def plain_step(step: Any) -> None:
        optimizer.zero_grad()
        for (batch,) in step:
            (loss(net, batch) / workers).backward()
        optimizer.step()

    plain_step(steps[0])
    net.load_state_dict(values)
    plain_step(steps[1])
    clip(net.parameters())
    plain_step(steps[2])
    net.out.load_state_dict({name: value + 1 for name, value in net.out.state_dict().items()})
    plain_step(steps[3])

    def work(world: World) -> list[Tensor]:
        session = some_session(world, "adam", strategy=strategy)
        ours: Any = session.model
        session.step(*steps[0][world.rank])
        ours.load_state_dict(values, assign=True)
        session.step(*steps[1][world.rank])
        clip(ours.parameters())
        session.step(*steps[2][world.rank])
        ours.out.load_state_dict({name: value + 1 for name, value in ours.out.state_dict().items()})
        session.step(*steps[3][world.rank])
        session.close()
        return params_of(session)

    for params in in_threads(workers, work, strategy=strategy):
        for got, want in zip(params, net.parameters(), strict=True):
            torch.testing.assert_close(got, want.data, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("strategy", ["single", "all-reduce", "local-sgd"])
def test_other_values_for_an_evaluation_are_not_trained_on(strategy: str) -> None:
    """Averaged weights take the place of the others for a while, as many libraries do it."""

    def work(world: World, swaps: bool) -> tuple[list[Tensor], float]:
        session = some_session(world, "adam", strategy=strategy)
        train(session, world.rank, 0, 2)
        data = [(inputs[0], targets[0]) for ((inputs, targets),) in make_steps(1)[0] for _ in range(3)]
        params, measured = list(session.model.parameters()), {"loss": 0.0}
        if swaps:
            backup = [param.data for param in params]
            for param in params:
                param.data = torch.zeros_like(param)
            measured = session.evaluate(data)
            for param, before in zip(params, backup, strict=True):
                param.data = before
        else:
            session.evaluate(data)
        train(session, world.rank, 2, 4)
        session.close()
        return params_of(session), measured["loss"]

    workers = 1 if strategy == "single" else 2
    swapped = in_threads(workers, functools.partial(work, swaps=True))
    plain = in_threads(workers, functools.partial(work, swaps=False))
    for (params, measured), (others, _) in zip(swapped, plain, strict=True):
        assert measured == pytest.approx(math.log(4)), "of the averaged weights"
        for one, other in zip(params, others, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("strategy", ["single", "all-reduce", "gossip"])
def test_the_optimizers_state_is_that_of_plain_pytorch_to_read_and_to_replace(strategy: str) -> None:
    def work(world: World) -> None:
        session = some_session(world, "adam", strategy=strategy)
        optimizer = session.optimizer
        first = next(session.model.parameters())
        assert not optimizer.state[first]
        assert not optimizer.state_dict()["state"]
        train(session, world.rank, 0, 2)
        assert float(optimizer.state[first]["step"]) == 2
        assert optimizer.state[first]["exp_avg"].shape == first.shape
        for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert same_state(other.state_dict(), optimizer.state_dict())
        with pytest.raises(UsageError, match=r"optimizer.load_state_dict"):
            optimizer.state[first] = {}
        then = optimizer.state_dict()
        train(session, world.rank, 2, 3)
        assert float(then["state"][0]["step"]) == 2, "a state_dict is of its moment"
        assert float(optimizer.state[first]["step"]) == 3
        optimizer.state = collections.defaultdict(dict)  # a restart without momentum
        train(session, world.rank, 3, 4)
        assert float(optimizer.state[first]["step"]) == 1
        session.close()
        assert float(optimizer.state[first]["step"]) == 1

    in_threads(1 if strategy == "single" else 2, work)


def test_the_history_of_lbfgs_is_in_a_checkpoint_of_ones_own() -> None:
    def work(world: World) -> None:
        net = make_net()
        session = session_of(net, lbfgs(net), loss, world=world)
        train(session, world.rank, 0, 2)
        saved = checkpoint_of(session)
        train(session, world.rank, 2, 3)
        session.close()
        again = make_net()
        other = session_of(again, lbfgs(again), loss, world=world)
        load(other, saved)
        train(other, world.rank, 2, 3)
        other.close()
        for one, two in zip(net.parameters(), again.parameters(), strict=True):
            torch.testing.assert_close(one, two)

    in_threads(2, work)


@pytest.mark.parametrize(
    "strategy", ["all-reduce", "all-reduce:topology=ring", "parameter-server:sync", "local-sgd"]
)
def test_writing_into_parameters_on_every_worker_is_warned_of_once(
    strategy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(world: World) -> None:
        session = some_session(world, "adam", strategy=strategy)
        load(session, plain_checkpoint())
        train(session, world.rank, 0, 2)
        for step in range(2, 4):
            with torch.no_grad():
                session.model.get_parameter("out.weight").clamp_(-1, 1)
            train(session, world.rank, step, step + 1)
        session.close()

    in_threads(2, work, strategy=strategy)
    said = capfd.readouterr().err
    assert said.count("parameter 'out.weight' was written to between two steps") == (strategy != "local-sgd")


@pytest.mark.processes
def test_the_page_runs(tmp_path: Path) -> None:
    (block,) = blocks(DOCS / "how-to" / "own-checkpoints.md")
    trains = "session.step((torch.rand(4, 1, 8, 8), torch.arange(4)))\n"
    (tmp_path / "script.py").write_text(block.text + trains)
    done = manyhands("launch", "--workers", "2", "--out", "run", "script.py", cwd=tmp_path)
    assert done.code == 0, done.err


def test_a_history_that_is_in_parts_on_servers_is_refused() -> None:
    def work(world: World) -> None:
        net = make_net()
        session = session_of(net, lbfgs(net), loss, world=world, strategy="sandblaster")
        train(session, world.rank, 0, 1)
        with pytest.raises(UsageError, match=r"LBFGS's history in parts: save it with session.save\(\)"):
            session.optimizer.state_dict()
        session.close()

    in_threads(2, work, strategy="sandblaster")


@pytest.mark.parametrize("placement", ["sharded", "tensor:ways=2"])
def test_a_checkpoint_is_loaded_into_the_whole_model(placement: str) -> None:
    saved = plain_checkpoint()["model"]

    def work(world: World) -> list[Tensor]:
        session = some_session(world, "sgd", placement=placement)
        with session.whole_model() as model:
            model.load_state_dict(saved)
        session.optimizer.param_groups[0]["lr"] = session.optimizer.param_groups[1]["lr"] = 0.0
        session.step(make_steps(1)[0][0][0])
        session.close()
        return params_of(session)

    net = make_net()
    net.load_state_dict(saved)
    for params in in_threads(2, work):
        for got, want in zip(params, net.parameters(), strict=True):
            assert torch.equal(got, want)
