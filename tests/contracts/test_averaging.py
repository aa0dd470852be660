"""Each strategy that averages is its paper: compared with the formula, computed in one process."""

import functools
import threading
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from manyhands import strategies
from manyhands.cluster.worker.world import World
from manyhands.errors import UsageError
from manyhands.strategies import STRATEGIES, Asked, Strategy
from manyhands.strategies.traits import Steps, Traits
from tests.contracts.test_strategies import flat, loss, make_net, make_steps
from tests.sessions import session_of
from tests.threads import in_threads

STEPS = 13
LR = 0.1
Meet = Callable[
    [int, list[Tensor]], list[Tensor]
]  # the step's number and everyone's parameters → what they become


def batches(workers: int) -> list[list[tuple[Tensor, Tensor]]]:
    steps = make_steps(workers) * 3
    return [[batch for (batch,) in step] for step in steps[:STEPS]]


def gradient(params: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    net = make_net()
    torch.nn.utils.vector_to_parameters(params, net.parameters())
    loss(net, batch).backward()
    return torch.cat([param.grad.flatten() for param in net.parameters() if param.grad is not None])


def simulated(workers: int, meet: Meet) -> list[list[Tensor]]:
    """Plain SGD on every worker, and what the paper does after each step: everyone's parameters after each."""
    everyone = [torch.nn.utils.parameters_to_vector(make_net().parameters()).detach()] * workers
    seen = []
    for number, step in enumerate(batches(workers), start=1):
        everyone = [x - LR * gradient(x, batch) for x, batch in zip(everyone, step, strict=True)]
        everyone = meet(number, everyone)
        seen.append(everyone)
    return seen


def trained(workers: int, strategy: str) -> list[list[Tensor]]:
    """The same through sessions, without a pause in between."""

    def work(world: World) -> list[Tensor]:
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        session = session_of(net, optimizer, loss, world=world, strategy=strategy)
        seen = []
        for step in batches(workers):
            session.step(step[world.rank])
            seen.append(flat(session))
        session.close()
        return seen

    return [list(step) for step in zip(*in_threads(workers, work), strict=True)]


def assert_same(ours: list[list[Tensor]], want: list[list[Tensor]]) -> None:
    for number, (step, model) in enumerate(zip(ours, want, strict=True), start=1):
        for rank, (got, expected) in enumerate(zip(step, model, strict=True)):
            error = ((got - expected).norm() / expected.norm()).item()
            assert error < 1e-12, f"step {number}, worker {rank}: relative difference {error:.1e}"


def mean(vectors: list[Tensor]) -> Tensor:
    return torch.stack(vectors).mean(0)


def test_local_sgd() -> None:
    def meet(step: int, xs: list[Tensor]) -> list[Tensor]:
        return xs if step % 3 else [mean(xs)] * 3

    ours = trained(3, "local-sgd:period=3")
    assert_same(ours, simulated(3, meet))
    assert [torch.equal(step[0], step[2]) for step in ours[:6]] == [False, False, True] * 2


def test_hierarchical_local_sgd() -> None:
    def meet(step: int, xs: list[Tensor]) -> list[Tensor]:
        if step % 6 == 0:
            return [mean(xs)] * 4
        return xs if step % 2 else [mean(xs[:2])] * 2 + [mean(xs[2:])] * 2

    ours = trained(4, "hierarchical-local-sgd:local_period=2,global_period=6,groups=2")
    assert_same(ours, simulated(4, meet))
    for number, step in enumerate(ours, start=1):
        assert torch.equal(step[0], step[1]) == (number % 2 == 0)
        assert torch.equal(step[1], step[2]) == (number % 6 == 0)


@pytest.mark.parametrize("workers", range(1, 8))
def test_any_number_of_workers_forms_two_groups(workers: int) -> None:
    """So a run goes on with its groups, whichever worker dies: the halves differ by at most one worker."""
    first = workers // 2

    def meet(step: int, xs: list[Tensor]) -> list[Tensor]:
        if step % 4 == 0:
            return [mean(xs)] * workers
        if step % 2:
            return xs
        return [mean(half) for half in (xs[:first], xs[first:]) for _ in half]

    ours = trained(workers, "hierarchical-local-sgd:local_period=2,global_period=4,groups=2")
    assert_same(ours, simulated(workers, meet))


def test_one_group_per_host_where_no_groups_are_given() -> None:
    ours = trained(3, "hierarchical-local-sgd:local_period=2,global_period=12")
    assert_same(ours, trained(3, "local-sgd:period=2"))


@pytest.mark.parametrize("nesterov", [False, True])
def test_block_momentum(nesterov: bool) -> None:
    start = delta = None

    def meet(step: int, xs: list[Tensor]) -> list[Tensor]:
        nonlocal start, delta
        if step % 4:
            return xs
        assert start is not None
        assert delta is not None
        moved = 0.8 * (mean(xs) - start)
        delta = 2 / 3 * delta + moved  # momentum 1 − 1/3
        start = start + (moved + 2 / 3 * delta if nesterov else delta)
        return [start] * 3

    start = torch.nn.utils.parameters_to_vector(make_net().parameters()).detach()
    delta = torch.zeros_like(start)
    assert_same(trained(3, f"block-momentum:period=4,lr=0.8,nesterov={nesterov}"), simulated(3, meet))


def test_elastic_averaging() -> None:
    centre = torch.nn.utils.parameters_to_vector(make_net().parameters()).detach()

    def meet(step: int, xs: list[Tensor]) -> list[Tensor]:
        nonlocal centre
        if step % 2:
            return xs
        pulls = [0.2 * (x - centre) for x in xs]
        centre = centre + sum(pulls)
        return [x - pull for x, pull in zip(xs, pulls, strict=True)]

    ours = trained(3, "elastic-averaging:period=2,alpha=0.2")
    assert_same(ours, simulated(3, meet))
    assert not any(torch.equal(step[0], step[1]) for step in ours), (
        "workers are tied to the centre, not in it"
    )


def test_the_default_spring_of_elastic_averaging_is_that_of_the_paper() -> None:
    assert_same(trained(3, "elastic-averaging"), trained(3, "elastic-averaging:alpha=0.3"))


def test_diloco_is_the_outer_optimizer_of_torch() -> None:
    theta = torch.nn.Parameter(torch.nn.utils.parameters_to_vector(make_net().parameters()).detach())
    outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)

    def meet(step: int, xs: list[Tensor]) -> list[Tensor]:
        if step % 3:
            return xs
        theta.grad = theta.detach() - mean(xs)
        outer.step()
        return [theta.detach().clone()] * 3

    ours = trained(3, "diloco:period=3,lr=0.7,momentum=0.9")
    assert_same(ours, simulated(3, meet))


def test_diloco_is_nesterov_block_momentum() -> None:
    ours = trained(2, "diloco:period=3,lr=0.7,momentum=0.6")
    assert_same(ours, trained(2, "block-momentum:period=3,lr=0.7,momentum=0.6,nesterov=true"))


@pytest.mark.parametrize("predict", [False, True])
def test_double_buffer_is_the_delayed_recursion(predict: bool) -> None:
    """x_{t+1} = x_t − lr · g_{t−1}, with the mean of all workers' gradients."""
    x = last = torch.nn.utils.parameters_to_vector(make_net().parameters()).detach()
    late = torch.zeros_like(x)
    want = []
    for step in batches(3):
        at = 2 * x - last if predict else x
        last, x, late = x, x - LR * late, mean([gradient(at, batch) for batch in step])
        want.append([x] * 3)
    assert_same(trained(3, f"double-buffer:predict={predict}"), want)


def test_a_pause_of_double_buffer_applies_what_is_under_way() -> None:
    """Evaluating after every step leaves nothing late: synchronous training."""

    def work(world: World, strategy: str) -> list[Tensor]:
        net = make_net(optional=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
        session = session_of(net, optimizer, loss, world=world, strategy=strategy, clip_norm=0.05)
        for step in batches(2):
            session.step(step[world.rank])
            session.evaluate(list(zip(*step[0], strict=True)))
        session.close()
        return [flat(session)]

    late = in_threads(2, functools.partial(work, strategy="double-buffer"))
    assert_same(late, in_threads(2, functools.partial(work, strategy="all-reduce")))


EVERY_STEP = [
    "local-sgd:period=1",
    "hierarchical-local-sgd:local_period=1,global_period=1",
    "block-momentum:period=1,momentum=0",
    "diloco:period=1,lr=1,momentum=0",
]


@pytest.mark.parametrize("strategy", EVERY_STEP)
def test_averaging_in_every_step_is_synchronous_training(strategy: str) -> None:
    """With plain SGD and equal batches: the mean of the updated parameters is the update by the mean gradient."""
    ours, want = trained(4, strategy), trained(4, "all-reduce")
    for step, model in zip(ours, want, strict=True):
        assert (step[0] - model[0]).norm() <= 1e-6 * model[0].norm()


@pytest.mark.parametrize(
    ("text", "asked", "complaint"),
    [
        ("local-sgd:period=0", Asked(workers=2), "period=0: it must be at least 1"),
        ("diloco:momentum=2", Asked(workers=2), "momentum=2: it must be from 0 to 1"),
        ("elastic-averaging:alpha=-1", Asked(workers=2), "alpha=-1: it must be from 0 to 1"),
        (
            "hierarchical-local-sgd:groups=4",
            Asked(workers=3),
            "3 workers cannot form 4 groups; use --workers 4, or fewer groups=",
        ),
        (
            "hierarchical-local-sgd:local_period=3,global_period=8",
            Asked(workers=6),
            "global_period=8 is not a multiple of local_period=3",
        ),
        ("local-sgd", Asked(workers=2, optimizer="lbfgs"), "lbfgs evaluates the loss several times"),
        ("double-buffer", Asked(workers=2, optimizer="lbfgs"), "lbfgs evaluates the loss several times"),
    ],
)
def test_what_cannot_run_is_refused(text: str, asked: Asked, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        strategies.parse(text).check(asked)


class Free(Strategy):
    """Every worker for itself until a pause: what a strategy without lock-step can do at least."""

    traits: ClassVar[Traits] = Traits(steps=Steps.ALONE)

    def step(self, replica, comm, share):  # type: ignore[no-untyped-def]
        value = replica.backward(share)
        replica.apply()
        return value

    def agree(self, replica, comm) -> None:  # type: ignore[no-untyped-def]
        comm.mean_(replica.params)


def test_without_lockstep_nobody_waits_at_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, "free", Free)
    first_is_done = threading.Event()

    def work(world: World) -> tuple[Tensor, int, int]:
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        session = session_of(net, optimizer, loss, world=world, strategy="free")
        if world.rank:
            assert first_is_done.wait(20)
        mine = [step[world.rank] for step in batches(3)[: 2 + world.rank]]
        for batch in session.batches(mine):
            session.step(batch)
            if world.rank == 0 and session.steps == 2:
                first_is_done.set()
        session.close()
        return flat(session), session.steps, session.samples

    everyone = in_threads(3, work)
    assert [steps for _, steps, _ in everyone] == [2, 3, 4]
    assert [samples for _, _, samples in everyone] == [(2 + 3 + 4) * 6] * 3
    assert all(torch.equal(params, everyone[0][0]) for params, _, _ in everyone)
