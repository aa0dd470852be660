"""Habits of plain PyTorch beside a session: refused or warned of, with the line to change; and no false alarm."""

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.cluster.worker.world import World
from manyhands.engine.habits import is_sum, what_counts
from manyhands.engine.session import Session
from manyhands.errors import UsageError
from tests.contracts.test_strategies import (
    OPTIMIZERS,
    loss,
    make_net,
    make_steps,
    momentum_of,
    optimizer_for,
    two_groups,
)
from tests.sessions import session_of
from tests.threads import in_threads

STEPS = make_steps(2)


def make_session(world: World, value: Callable[..., Tensor] = loss) -> Session:
    net = make_net()
    return session_of(net, momentum_of(net), value, world=world)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_optimizer_that_steps_beside_the_session_is_refused(workers: int) -> None:
    def work(world: World) -> None:
        session = make_session(world)
        before = [param.detach().clone() for param in session.model.parameters()]
        session.optimizer.step()  # without gradients: some schedulers want it, and nothing happens
        loss(session.model, STEPS[0][world.rank][0]).backward()
        with pytest.raises(UsageError, match=r"beside the session.*put session.step\(batch\) in the place"):
            session.optimizer.step()
        assert all(torch.equal(*pair) for pair in zip(before, session.model.parameters(), strict=True))
        session.optimizer.zero_grad()
        session.close()
        session.optimizer.zero_grad()
        loss(session.model, STEPS[0][world.rank][0]).backward()
        session.optimizer.step()  # after the session it is the script's again

    in_threads(workers, work)


def test_an_optimizer_that_steps_between_the_halves_is_refused() -> None:
    def work(world: World) -> None:
        session = make_session(world)
        session.backward(STEPS[0][0][0])
        with pytest.raises(UsageError, match=r"call session.update\(\) in its place"):
            session.optimizer.step()
        session.update()
        session.close()

    in_threads(1, work)


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "lbfgs"])
def test_the_sessions_own_steps_are_not_taken_for_the_scripts(optimizer: str) -> None:
    """Also where a scheduler or a hook wants to see `step` called."""

    def work(world: World) -> int:
        net = make_net()
        made = (
            optimizer_for("sandblaster", momentum_of)(net)
            if optimizer == "lbfgs"
            else two_groups(OPTIMIZERS[optimizer], net)
        )
        scheduler = torch.optim.lr_scheduler.StepLR(made, 2)
        seen: list[object] = []
        made.register_step_post_hook(lambda *arguments: seen.append(arguments))
        session = session_of(net, made, loss, world=world, scheduler=scheduler)
        for step in STEPS:
            session.step(step[world.rank][0])
        session.close()
        return len(seen)

    assert in_threads(2, work)[0] >= len(STEPS)


def test_gradients_that_no_step_has_used_are_spoken_of_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    def work(world: World, steps: int) -> None:
        session = make_session(world)
        for step in STEPS[:steps]:
            session.step(step[world.rank][0])
        loss(session.model, STEPS[0][world.rank][0]).backward()
        session.close()

    in_threads(2, lambda world: work(world, 1))
    assert "no step" not in capsys.readouterr().err
    in_threads(2, lambda world: work(world, 0))
    assert capsys.readouterr().err.count("the session has made no step although the model has gradients") == 1


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_clipping_after_the_step_is_warned_of_once(
    clip: Callable[..., object], capsys: pytest.CaptureFixture[str]
) -> None:
    def work(world: World) -> None:
        session = make_session(world)
        for step in STEPS:
            session.step(step[world.rank][0])
            with suppress(RuntimeError):  # PyTorch's own complaint, of clip_grad_value_ alone
                clip(session.model.parameters(), 1.0)
        session.close()

    in_threads(2, work)
    assert capsys.readouterr().err.count("say mh.session(…, clip_norm=1.0)") == 1

    def rightly(world: World) -> None:
        session = make_session(world)
        for step in STEPS:
            session.backward(step[world.rank][0])
            clip(session.model.parameters(), 1.0)
            session.update()
        session.close()

    in_threads(2, rightly)
    assert "clip" not in capsys.readouterr().err


INPUTS, TARGETS = torch.randn(6, 4), torch.randint(0, 3, (6,))
WANTED = torch.randn(6, 3)
SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "cross entropy": lambda out: F.cross_entropy(out, TARGETS, reduction="sum"),
    "nll": lambda out: F.nll_loss(F.log_softmax(out, 1), TARGETS, reduction="sum"),
    "squares": lambda out: ((out - WANTED) ** 2).sum(),
    "half the squares": lambda out: 0.5 * (out - WANTED).square().sum(),
    "mse": lambda out: F.mse_loss(out, WANTED, reduction="sum"),
    "l1": lambda out: F.l1_loss(out, WANTED, reduction="sum"),
    "an autoencoder's": lambda out: (
        F.binary_cross_entropy_with_logits(out, WANTED.sigmoid(), reduction="sum")
        - 0.5 * torch.sum(1 + out - out.pow(2) - out.exp())
    ),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "cross entropy": lambda out: F.cross_entropy(out, TARGETS),
    "mse": lambda out: F.mse_loss(out, WANTED),
    "a mean of sums": lambda out: (out - WANTED).square().sum(1).mean(),
    "a sum of means": lambda out: (out - WANTED).square().mean(0).sum(),
    "a sum, divided": lambda out: F.mse_loss(out, WANTED, reduction="sum") / len(out),
    "a sum, multiplied": lambda out: (out - WANTED).square().sum() * (1 / 6),
    "a sum, divided by a tensor": lambda out: (out - WANTED).square().sum() / (WANTED > -9).sum(),
    "a mean and a penalty": lambda out: F.mse_loss(out, WANTED) + 0.1 * out.abs().sum(),
    "batchmean": lambda out: F.kl_div(F.log_softmax(out, 1), WANTED.softmax(1), reduction="batchmean"),
    "two means": lambda out: torch.stack([F.mse_loss(out, WANTED), out.mean()]).sum(),
    "a mean of what counts": lambda out: (out - WANTED).square().sum() / (WANTED > 0).sum(),
    "a product": lambda out: torch.einsum("ij,ij->", out, WANTED) * out.mean(),
}


@pytest.mark.parametrize("kind", SUMS)
def test_a_sum_over_samples_is_seen(kind: str) -> None:
    assert is_sum(SUMS[kind](nn.Linear(4, 3)(INPUTS)), 6)


@pytest.mark.parametrize("kind", OTHERS)
def test_nothing_else_is_taken_for_one(kind: str) -> None:
    assert not is_sum(OTHERS[kind](nn.Linear(4, 3)(INPUTS)), 6)


PADDED = torch.tensor([0, 1, 2, -100, -100, 1])
EVENLY = torch.tensor([[0, -100], [1, -100], [-100, 2], [-100, 0], [1, -100], [-100, 1]])
WEIGHT = torch.tensor([1.0, 10.0, 0.1])
VALID = torch.tensor([True, True, False, True, False, True])
COUNTED: dict[str, Callable[[Tensor], Tensor]] = {
    "weights": lambda out: F.cross_entropy(out, TARGETS, weight=WEIGHT),
    "padding": lambda out: F.cross_entropy(out, PADDED),
    "padding of its own": lambda out: F.cross_entropy(out, TARGETS, ignore_index=int(TARGETS[0])),
    "smoothed": lambda out: F.cross_entropy(out, PADDED, label_smoothing=0.1),
    "beside a penalty": lambda out: F.cross_entropy(out, PADDED) + 0.1 * out.mean(),
    "a mask": lambda out: ((out - WANTED).square().mean(1) * VALID).sum() / VALID.sum(),
    "a mask of everything": lambda out: (
        ((out - WANTED).square() * VALID[:, None]).sum() / (VALID.sum() * 2.5)
    ),
}
UNCOUNTED: dict[str, Callable[[Tensor], Tensor]] = {
    "no target is ignored": lambda out: F.cross_entropy(out, TARGETS, ignore_index=7),
    "the same weights": lambda out: F.cross_entropy(out, TARGETS, weight=torch.full((3,), 2.0)),
    "as many of each sample": lambda out: F.cross_entropy(torch.stack([out, out], 2), EVENLY),
    "all is valid": lambda out: (out - WANTED).square().sum(1).sum() / (WANTED[:, 0] > -9).sum(),
    "a sum over what counts": lambda out: F.cross_entropy(out, PADDED, reduction="sum") / len(out),
}


@pytest.mark.parametrize("kind", COUNTED)
def test_a_mean_over_something_else_than_samples_is_seen(kind: str) -> None:
    value = COUNTED[kind](nn.Linear(4, 3)(INPUTS))
    assert what_counts(value, 6)
    assert not is_sum(value, 6)


@pytest.mark.parametrize("kind", [*OTHERS, *UNCOUNTED])
def test_a_mean_over_samples_is_not_taken_for_one(kind: str) -> None:
    if kind != "a mean of what counts":
        assert not what_counts((OTHERS | UNCOUNTED)[kind](nn.Linear(4, 3)(INPUTS)), 6)


def weighted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=WEIGHT.to(batch[0].dtype), ignore_index=2)


def test_a_weighted_loss_is_warned_of_and_its_way_out_is_one_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    generator = torch.Generator().manual_seed(11)
    batches = [
        (torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(4)
    ]

    def make() -> nn.Linear:
        net = nn.Linear(4, 3)
        with torch.no_grad():
            net.weight.copy_(torch.linspace(-1, 1, 12).view(3, 4))
            net.bias.zero_()
        return net

    def work(world: World, *, by_hand: bool) -> list[Tensor]:
        net = make()
        session = session_of(net, torch.optim.SGD(net.parameters(), lr=0.1), weighted, world=world)
        for batch in batches:
            inputs, targets = (part[world.rank :: world.size] for part in batch)
            if by_hand:
                counts = WEIGHT[targets][targets != 2].sum()
                session.backward(weighted(net, (inputs, targets)), samples=counts)
                session.update()
            else:
                session.step((inputs, targets))
        session.close()
        return [param.detach().clone() for param in net.parameters()]

    plain = make()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        weighted(plain, batch).backward()
        optimizer.step()
    for got in in_threads(2, lambda world: work(world, by_hand=True)):
        for one, other in zip(got, plain.parameters(), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-5, atol=1e-6)
    in_threads(1, lambda world: work(world, by_hand=False))
    assert "warning" not in capsys.readouterr().err
    in_threads(2, lambda world: work(world, by_hand=False))
    assert capsys.readouterr().err.count("session.backward(loss, samples=weight[targets].sum())") == 1


def test_a_summed_loss_is_warned_of_where_it_matters(capsys: pytest.CaptureFixture[str]) -> None:
    def summed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def work(world: World) -> None:
        session = make_session(world, summed)
        for step in STEPS:
            session.step(step[world.rank][0])
        session.close()

    in_threads(1, work)
    assert "sum" not in capsys.readouterr().err
    in_threads(2, work)
    said = capsys.readouterr().err
    assert said.count("with 2 workers a step is 2 times smaller") == 1
    assert 'return the mean (reduction="mean"' in said


def test_a_wrapped_model_is_refused_with_the_line_to_change() -> None:
    def work(world: World) -> None:
        net = nn.DataParallel(make_net())
        session_of(net, momentum_of(net), loss, world=world)

    with pytest.raises(
        UsageError, match=r"the model is wrapped in DataParallel.*mh.session\(model.module, …\)"
    ):
        in_threads(1, work)
