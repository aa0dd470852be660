"""A step in two halves: the gradient of all workers in `param.grad`, changed by the script, and then the update."""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands import strategies
from manyhands.adapters.prepare import PreparedOptimizer
from manyhands.cluster.worker.world import World
from manyhands.engine.session import Session
from manyhands.errors import UsageError
from tests.contracts.test_sessions import Numbered
from tests.contracts.test_strategies import (
    APART,
    OPTIMIZERS,
    REPEATABLE,
    SYNCHRONOUS,
    assert_close,
    assert_same_bits,
    both,
    loss,
    make_net,
    make_steps,
    optimizer_for,
    plainly,
    two_groups,
)
from tests.sessions import session_of
from tests.threads import in_threads

CLIP = 0.3
momentum = functools.partial(two_groups, OPTIMIZERS["momentum"])


def in_halves(text: str) -> bool:
    traits = strategies.parse(text).traits
    is_free = strategies.tuning(strategies.parse(text)).only_optimizer is None
    return is_free and not traits.one_piece and (traits.servers is None or traits.synchronous)


AS_ONE = [text for text in SYNCHRONOUS if in_halves(text)]
ON_THEIR_OWN = [text for text in both(APART, REPEATABLE) if in_halves(text)]
REFUSED = [text for text in [*SYNCHRONOUS, *APART] if not in_halves(text)]


def workers_of(strategy: str) -> int:
    return 1 if strategy == "single" else 3


def trained(
    strategy: str,
    step: Callable[[Session, list[Any]], object],
    *,
    steps: Any,
    make: Callable[[nn.Module], Optimizer] = momentum,
    net: Callable[[], nn.Module] = make_net,
) -> list[list[Tensor]]:
    """The parameters of all workers after sessions that make each step in this way."""

    def work(world: World) -> list[Tensor]:
        model = net()
        session = session_of(model, make(model), loss, world=world, strategy=strategy)
        for batches in steps:
            step(session, batches[world.rank])
        session.close()
        return [param.detach().clone() for param in model.parameters()]

    return in_threads(len(steps[0]), work, strategy=strategy)


def clipped(session: Session, batches: list[Any]) -> None:
    session.backward(*batches)
    nn.utils.clip_grad_norm_(session.model.parameters(), CLIP)
    assert session.update()


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adafactor"])
@pytest.mark.parametrize("strategy", AS_ONE)
def test_gradients_clipped_by_the_script_are_those_of_one_process(strategy: str, optimizer: str) -> None:
    make = functools.partial(two_groups, OPTIMIZERS[optimizer])
    steps = make_steps(workers_of(strategy), lambda step, rank: [4 + rank, 3])
    ours = trained(strategy, clipped, steps=steps, make=make)
    assert_same_bits(ours)
    assert_close(ours[0], plainly(make_net(), make, steps, clip=CLIP))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_worker_has_the_whole_gradient_in_memory_of_its_own(workers: int) -> None:
    (batches, *_) = make_steps(workers, lambda step, rank: [3 + rank])

    def work(world: World) -> list[Tensor]:
        net = make_net()
        session = session_of(net, momentum(net), loss, world=world)
        before = [param.detach().clone() for param in net.parameters()]
        session.backward(*batches[world.rank])
        for param in net.parameters():
            assert param.grad is not None
            param.grad *= 1 + world.rank
        world.host.barrier()
        found = [param.grad / (1 + world.rank) for param in net.parameters()]
        assert_same_bits([before, [param.detach() for param in net.parameters()]])
        return found

    net = make_net()
    inputs, targets = (torch.cat([worker[0][at] for worker in batches]) for at in (0, 1))
    loss(net, (inputs, targets)).backward()
    for found in in_threads(workers, work):
        for got, param in zip(found, net.parameters(), strict=True):
            torch.testing.assert_close(got, param.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", ["all-reduce", "ring", "parameter-server"])
def test_gradients_accumulate_over_calls(strategy: str) -> None:
    """As plain PyTorch adds them up, with a share of the loss in each."""
    steps = make_steps(3, lambda step, rank: [4, 4])

    def accumulated(session: Session, batches: list[Any]) -> None:
        for batch in batches:
            session.backward(batch)
        for param in session.model.parameters():
            if param.grad is not None:
                param.grad /= 2
        nn.utils.clip_grad_norm_(session.model.parameters(), CLIP)
        session.update()

    ours = trained(strategy, accumulated, steps=steps)
    assert_close(ours[0], plainly(make_net(), momentum, steps, clip=CLIP))


@pytest.mark.parametrize("strategy", ON_THEIR_OWN)
def test_where_workers_do_not_step_as_one_the_gradient_is_their_own(strategy: str) -> None:
    """With nothing changed in between, the same bits as a whole step."""
    steps = make_steps(3)
    halves = trained(
        strategy, lambda session, batches: (session.backward(*batches), session.update()), steps=steps
    )
    whole = trained(strategy, lambda session, batches: session.step(*batches), steps=steps)
    for ours, theirs in zip(halves, whole, strict=True):
        for got, want in zip(ours, theirs, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", REFUSED)
def test_where_a_step_has_no_halves_they_are_refused(strategy: str) -> None:
    def work(world: World) -> None:
        net = make_net()
        session = session_of(
            net, optimizer_for(strategy, momentum)(net), loss, world=world, strategy=strategy
        )
        with pytest.raises(UsageError, match=r"session.step\(batch\)"):
            session.backward(*make_steps(2)[0][world.rank])
        session.close()

    in_threads(2, work, strategy=strategy)


def test_an_optimizer_that_evaluates_the_loss_again_has_no_halves() -> None:
    def work(world: World) -> None:
        net = make_net()
        session = session_of(net, torch.optim.LBFGS(net.parameters()), loss, world=world)
        session.backward(*make_steps(1)[0][0])

    with pytest.raises(UsageError, match="LBFGS evaluates the loss several times"):
        in_threads(1, work)


def test_parameters_without_a_gradient_stay_as_they_are() -> None:
    """On some workers only, on all of them, and those whose gradient the script takes away."""
    steps = make_steps(2)
    net = functools.partial(make_net, optional=True)

    def without_bias(session: Session, batches: list[Any]) -> None:
        session.backward(*batches)
        session.model.get_submodule("out").bias.grad = None
        session.update()

    ours = trained("all-reduce", without_bias, steps=steps, net=net)
    model = net()
    optimizer = momentum(model)
    for step in steps:
        optimizer.zero_grad()
        for (batch,) in step:
            (loss(model, batch) / 2).backward()
        model.get_submodule("out").bias.grad = None
        optimizer.step()
    assert_same_bits(ours)
    assert_close(ours[0], model)


@pytest.mark.parametrize("halves", ["batch", "loss"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_epoch_in_halves_uses_every_sample_once(workers: int, halves: str) -> None:
    """Also with a loss that the script computes; the last round has samples for some workers only."""
    data = Numbered(47)

    def work(world: World, half: str) -> list[Tensor]:
        net = make_net()
        session = session_of(net, momentum(net), loss, world=world)
        for _ in range(2):
            for batch in session.batches(data, batch_size=12 // workers):
                if half == "step":
                    session.step(batch)
                else:
                    session.backward(batch if half == "batch" else loss(net, batch))
                    session.update()
        session.close()
        assert session.samples == 2 * len(data)
        assert session.engine.feeds.tally == {"once": 2 * len(data), "twice": 0, "never": 0}
        assert session.steps == 8
        return [param.detach().clone() for param in net.parameters()]

    (want,) = (
        in_threads(1, lambda world: work(world, "step"))
        if workers == 1
        else [in_threads(workers, lambda world: work(world, "step"))[0]]
    )
    ours = in_threads(workers, lambda world: work(world, halves))
    assert_same_bits(ours)
    for got, param in zip(ours[0], want, strict=True):
        torch.testing.assert_close(got, param, rtol=1e-9, atol=1e-12)


def test_workers_with_fewer_batches_take_part_with_nothing() -> None:
    data = Numbered(60)
    shares = [[data[i : i + 4] for i in range(start, stop, 4)] for start, stop in ((0, 8), (8, 32), (32, 60))]

    def work(world: World) -> list[Tensor]:
        net = make_net()
        session = session_of(net, momentum(net), loss, world=world)
        for batch in session.batches(shares[world.rank]):
            session.backward(batch)
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            session.update()
        session.close()
        assert session.steps == 7
        return [param.detach().clone() for param in net.parameters()]

    results = in_threads(3, work)
    steps = [[[share[number]] for share in shares if number < len(share)] for number in range(7)]
    assert_same_bits(results)
    assert_close(results[0], plainly(make_net(), momentum, steps, clip=CLIP))


def test_noise_that_differs_between_workers_does_not_lead_them_apart() -> None:
    def noisy(session: Session, batches: list[Any]) -> None:
        session.backward(*batches)
        generator = torch.Generator().manual_seed(session.rank)
        for param in session.model.parameters():
            if param.grad is not None:
                param.grad += 0.01 * torch.randn(param.shape, generator=generator, dtype=param.dtype)
        session.update()

    for strategy in ("all-reduce", "ring"):
        assert_same_bits(trained(strategy, noisy, steps=make_steps(3)))


def test_a_scaled_loss_with_overflows_is_what_one_process_makes_of_it() -> None:
    """In 16-bit numbers a scale of 65,536 overflows, on some workers only: all skip, and the scale falls."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, 5, generator=generator) * (30 if step in (1, 3) else 1) for step in range(6)]

    torch.manual_seed(3)
    made_once = nn.Linear(5, 3)

    def net() -> nn.Module:
        return copy.deepcopy(made_once)  # workers in threads share the generator of random numbers

    def value(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return model(batch).square().mean()

    def work(world: World) -> tuple[list[Tensor], list[bool], float]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        session = session_of(model, optimizer, value, world=world)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        made = []
        for batch in batches:
            session.backward(batch[2 * world.rank : 2 * world.rank + 2], scaler=scaler)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            made.append(session.update(scaler))
        session.close()
        assert session.steps == len(batches)
        return [param.detach().clone() for param in model.parameters()], made, scaler.get_scale()

    results = in_threads(2, work)
    assert results[0][1:] == results[1][1:]
    assert_same_bits([params for params, _, _ in results])
    assert not all(results[0][1])
    assert any(results[0][1])

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    for batch in batches:
        optimizer.zero_grad()
        for half in batch.split(2):
            (scaler.scale(value(model, half)) / 2).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert_close(results[0][0], model, tolerance=1e-3)
    assert results[0][2] == scaler.get_scale()


def test_halves_that_do_not_fit_get_a_sentence() -> None:
    batches = make_steps(2)[0]

    def with_session(use: Callable[[Session, list[Any]], object]) -> Callable[[World], object]:
        def work(world: World) -> object:
            net = make_net()
            session = session_of(net, momentum(net), loss, world=world)
            try:
                return use(session, batches[world.rank])
            finally:
                session.close()

        return work

    with pytest.raises(UsageError, match=r"session.update\(\) found no gradient"):
        in_threads(1, with_session(lambda session, batch: session.update()))
    with pytest.raises(UsageError, match="how many samples the loss is the mean of"):
        in_threads(1, with_session(lambda session, batch: session.backward(loss(session.model, *batch))))
    with pytest.raises(UsageError, match=r"session.step\(batch\) came between"):
        in_threads(1, with_session(lambda session, batch: (session.backward(*batch), session.step(*batch))))

    def of_two_minds(session: Session, batch: list[Any]) -> None:
        session.backward(*batch) if session.rank else session.step(*batch)

    with pytest.raises(UsageError, match=r"worker 0 called step\(\), worker 1 called backward\(\)"):
        in_threads(2, with_session(of_two_minds))

    def of_two_counts(session: Session, batch: list[Any]) -> None:
        session.backward(*batch)
        session.backward(*batch) if session.rank else session.update()

    with pytest.raises(UsageError, match=r"worker 0 called update\(\), worker 1 called backward\(\)"):
        in_threads(2, with_session(of_two_counts))


def test_a_loss_that_a_script_gives_with_its_graph_is_taken_without_a_word() -> None:
    samples = list(zip(*make_steps(1)[0][0][0], strict=True))

    def work(world: World) -> int:
        net = make_net()
        session = session_of(net, momentum(net), loss, world=world)
        optimizer = PreparedOptimizer(session.optimizer, session)
        losses: list[Tensor] = []
        for batch in session.batches(samples, batch_size=len(samples)):

            def closure(batch: Any = batch) -> Tensor:
                optimizer.zero_grad()
                losses.append(loss(net, batch))
                losses[-1].backward()  # type: ignore[no-untyped-call]
                return losses[-1]

            assert optimizer.step(closure) is losses[0]
        session.close()
        return session.steps

    was = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert in_threads(1, work) == [1]
    finally:
        torch.set_warn_always(was)
