"""Gradients that stay in the host's memory until a script looks at them: it sees what plain PyTorch would show."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.cluster.worker.world import World
from manyhands.engine.session import Session
from tests.contracts.test_lower_level import momentum, trained
from tests.contracts.test_strategies import (
    assert_close,
    assert_same_bits,
    loss,
    make_net,
    make_steps,
    plainly,
)
from tests.sessions import session_of
from tests.threads import in_threads

WORKERS = 3


def is_held(session: Session) -> bool:
    held = session.engine.pending.held
    return held is not None and held.is_there


def looks(session: Session) -> list[Tensor | None]:
    return [param.grad for param in session.model.parameters()]


def copies(session: Session) -> object:
    made = copy.deepcopy(session.model)
    assert [type(param) for param in made.parameters()] == [nn.Parameter for _ in made.parameters()]
    return made


def pickles(session: Session) -> object:
    made: nn.Module = pickle.loads(pickle.dumps(session.model))
    assert_same_bits([[*made.parameters()], [*session.model.parameters()]])
    return made


def nothing(session: Session) -> None:
    assert is_held(session)


@pytest.mark.parametrize("look", [nothing, looks, copies, pickles])
@pytest.mark.parametrize("who", [[], [1], [0, 1, 2]])
def test_looking_changes_nothing_whoever_looks(look: Callable[[Session], object], who: list[int]) -> None:
    steps = make_steps(WORKERS, lambda step, rank: [4 + rank])

    def step(session: Session, batches: list[Any]) -> None:
        session.backward(*batches)
        assert is_held(session)
        if session.rank in who:
            look(session)
        session.update()
        assert [type(param) for param in session.model.parameters()] == [
            nn.Parameter for _ in session.model.parameters()
        ]
        assert all(param.grad is None for param in session.model.parameters())

    ours = trained("all-reduce", step, steps=steps)
    assert_same_bits(ours)
    assert_close(ours[0], plainly(make_net(), momentum, steps))


def test_what_one_worker_changes_does_not_lead_them_apart() -> None:
    """The others have not looked, and hear that one has."""
    steps = make_steps(WORKERS, lambda step, rank: [4])

    def doubled(session: Session, batches: list[Any]) -> None:
        session.backward(*batches)
        for param in session.model.parameters() if session.rank == 1 else ():
            assert param.grad is not None
            param.grad.data.mul_(2)
        session.update()

    ours = trained("all-reduce", doubled, steps=steps)
    assert_same_bits(ours)
    untouched = plainly(make_net(), momentum, steps)
    assert any(not torch.allclose(one, two) for one, two in zip(ours[0], untouched.parameters(), strict=True))


@pytest.mark.parametrize("looking", [False, True])
def test_a_second_pass_adds_to_what_is_held(looking: bool) -> None:
    steps = make_steps(WORKERS, lambda step, rank: [4, 4])

    def accumulated(session: Session, batches: list[Any]) -> None:
        for batch in batches:
            session.backward(batch)
            if looking:
                looks(session)
        for param in session.model.parameters():
            if param.grad is not None:
                param.grad /= 2
        session.update()

    ours = trained("all-reduce", accumulated, steps=steps)
    assert_same_bits(ours)
    assert_close(ours[0], plainly(make_net(), momentum, steps))


def test_where_a_forward_pass_comes_between_parameters_keep_their_class() -> None:
    """After the first time: compiled code would be made anew for every class that it meets."""
    steps = make_steps(2, lambda step, rank: [4, 4])
    seen: list[set[type]] = []

    def accumulated(session: Session, batches: list[Any]) -> None:
        for batch in batches:
            session.backward(batch)
            seen.append({type(param) for param in session.model.parameters()})
        session.update()

    assert_same_bits(trained("all-reduce", accumulated, steps=steps))
    assert seen.count({nn.Parameter}) >= len(seen) - 2, "of each worker the first pass"


def test_a_gradient_that_the_script_takes_away_before_it_looks() -> None:
    """And parameters that no worker uses."""
    steps = make_steps(2)
    net = functools.partial(make_net, optional=True)

    def without_bias(session: Session, batches: list[Any]) -> None:
        session.backward(*batches)
        session.model.get_submodule("out").bias.grad = None
        session.update()

    model = net()
    optimizer = momentum(model)
    for step in steps:
        optimizer.zero_grad()
        for (batch,) in step:
            (loss(model, batch) / 2).backward()
        model.get_submodule("out").bias.grad = None
        optimizer.step()
    ours = trained("all-reduce", without_bias, steps=steps, net=net)
    assert_same_bits(ours)
    assert_close(ours[0], model)


def test_gradients_outlive_their_session() -> None:
    """A script that closes it between the halves still finds them, and a parameter like any other."""
    (batches,) = make_steps(2, lambda step, rank: [4])[:1]

    def work(world: World) -> list[Tensor]:
        net = make_net()
        session = session_of(net, momentum(net), loss, world=world)
        session.backward(*batches[world.rank])
        session.close()
        assert [type(param) for param in net.parameters()] == [nn.Parameter for _ in net.parameters()]
        return [param.grad for param in net.parameters() if param.grad is not None]

    net = make_net()
    inputs, targets = (torch.cat([worker[0][at] for worker in batches]) for at in (0, 1))
    loss(net, (inputs, targets)).backward()
    for found in in_threads(2, work):
        assert_close(found, nn.ParameterList([nn.Parameter(one.grad) for one in net.parameters()]))


def test_a_worker_that_is_out_of_data_takes_part_in_updates_that_no_script_has_looked_at() -> None:
    steps = make_steps(WORKERS, lambda step, rank: [4])
    shares = [[step[rank][0] for step in steps][: len(steps) - rank] for rank in range(WORKERS)]

    def work(world: World) -> list[Tensor]:
        net = make_net()
        session = session_of(net, momentum(net), loss, world=world)
        for batch in session.batches(shares[world.rank]):
            session.backward(batch)
            session.update()
        session.close()
        return [param.detach().clone() for param in net.parameters()]

    ours = in_threads(WORKERS, work)
    numbers = range(len(steps))
    cut = [[[share[number]] for share in shares if number < len(share)] for number in numbers]
    assert_same_bits(ours)
    assert_close(ours[0], plainly(make_net(), momentum, cut))
