"""SyncBatchNorm: a step of several workers is that of one process with BatchNorm on the whole batch, statistics too."""

import copy
import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.cluster.worker.world import World
from manyhands.engine.session import Session
from manyhands.errors import UsageError
from manyhands.replica.gradients import summing
from tests.contracts.test_strategies import assert_same_bits
from tests.sessions import session_of
from tests.threads import in_threads

STEPS = 20
Steps = list[list[list[Tensor]]]
"""By step and worker, the batches."""


class Net(nn.Module):
    """Norms of pictures and of vectors, with and without what can be left out of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.plain = nn.BatchNorm2d(6, affine=False, momentum=None)
        self.into = nn.Linear(6, 5)
        self.last = nn.BatchNorm1d(5, track_running_stats=False)
        self.out = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(inputs)))
        hidden = self.plain(hidden + 0.5 * self.norm(hidden)).mean((2, 3))  # one layer, called twice
        return self.out(torch.tanh(self.last(self.into(hidden))))


def make_net(dtype: torch.dtype = torch.float64) -> nn.Module:
    net = Net()
    with torch.no_grad():
        for number, param in enumerate(net.parameters()):
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(number)) * 0.5)
    return net.to(dtype)


def synced(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(make_net(dtype))


def batch(seed: int, samples: int) -> Tensor:
    drawn = torch.randn(samples, 2, 6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return 2.0 * drawn + seed % 3


def loss(model: nn.Module, inputs: Tensor) -> Tensor:
    found = model(inputs)
    return (found - inputs.mean((1, 2, 3))[:, None]).square().mean()


def optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def alone(steps: Steps, net: nn.Module | None = None) -> dict[str, Tensor]:
    """One process, which accumulates gradients: the first batches of all workers are one, then the second ones."""
    net = net or make_net()
    made = optimizer(net)
    for step in steps:
        made.zero_grad()
        total = sum(len(one) for worker in step for one in worker)
        for number in range(max(map(len, step))):
            whole = torch.cat([worker[number] for worker in step if len(worker) > number])
            (loss(net, whole) * len(whole) / total).backward()
        made.step()
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def by_step(session: Session, batches: Sequence[Tensor]) -> None:
    session.step(*batches)


def by_halves(session: Session, batches: Sequence[Tensor]) -> None:
    session.backward(*batches)
    session.update()


def trained(
    world: World,
    steps: Steps,
    make_step: Callable[[Session, Sequence[Tensor]], None] = by_step,
    net: nn.Module | None = None,
    **settings: Any,
) -> dict[str, Tensor]:
    net = net if net is not None else synced()
    session = session_of(net, optimizer(net), loss, world=world, **settings)
    for step in steps:
        make_step(session, step[world.rank])
    session.close()
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def assert_close(
    ours: Sequence[dict[str, Tensor]], plain: dict[str, Tensor], tolerance: float = 1e-9
) -> None:
    assert_same_bits([list(one.values()) for one in ours])
    assert ours[0].keys() == plain.keys()
    for name, want in plain.items():
        torch.testing.assert_close(
            ours[0][name], want, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def equal(workers: int) -> Steps:
    return [[[batch(10 * step + rank, 4)] for rank in range(workers)] for step in range(STEPS)]


def unequal(workers: int) -> Steps:
    return [
        [[batch(10 * step + rank, 1 + (step + 3 * rank) % 5)] for rank in range(workers)]
        for step in range(STEPS)
    ]


def some_empty(workers: int) -> Steps:
    """Every worker is without samples at times, the last step included."""
    return [
        [
            [batch(10 * step + rank, 0 if (step + rank) % 3 == 2 and workers > 1 else 4)]
            for rank in range(workers)
        ]
        for step in range(STEPS)
    ]


def several(workers: int) -> Steps:
    """Different numbers of batches in a step."""
    return [
        [
            [batch(100 * step + 10 * rank + at, 3 + at) for at in range(1 + (step + rank) % 3)]
            for rank in range(workers)
        ]
        for step in range(STEPS)
    ]


CASES = {"equal": equal, "unequal": unequal, "some empty": some_empty, "several": several}


def without_empty(steps: Steps) -> Steps:
    return [[[one for one in worker if len(one)] for worker in step] for step in steps]


@pytest.mark.parametrize("make_step", [by_step, by_halves])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("workers", [2, 3])
def test_a_run_equals_one_process(workers: int, case: str, make_step: Any) -> None:
    steps = CASES[case](workers)
    ours = in_threads(workers, lambda world: trained(world, steps, make_step))
    assert_close(ours, alone(without_empty(steps)))


@pytest.mark.parametrize(
    "strategy", ["ring", "all-reduce:topology=tree", "parameter-server:sync", "worker-groups:groups=1"]
)
@pytest.mark.parametrize("case", ["unequal", "several"])
def test_under_every_strategy_that_steps_as_one_process(strategy: str, case: str) -> None:
    steps = CASES[case](3)
    ours = in_threads(3, lambda world: trained(world, steps, strategy=strategy), strategy=strategy)
    assert_close(ours, alone(without_empty(steps)))


def test_in_single_precision() -> None:
    """Twenty steps of 32-bit numbers; a large mean takes nothing from the variance."""

    def shifted(seed: int) -> Tensor:
        return batch(seed, 16).float() + 30.0

    steps = [[[shifted(10 * step + rank)] for rank in range(2)] for step in range(STEPS)]
    plain = functools.partial(torch.optim.SGD, lr=0.01)

    def work(world: World) -> dict[str, Tensor]:
        net = synced(torch.float32)
        session = session_of(net, plain(net.parameters()), loss, world=world)
        for step in steps:
            session.step(*step[world.rank])
        session.close()
        return dict(net.state_dict())

    net = make_net(torch.float32)
    made = plain(net.parameters())
    for step in steps:
        made.zero_grad()
        loss(net, torch.cat([worker[0] for worker in step])).backward()
        made.step()
    assert_close(in_threads(2, work), dict(net.state_dict()), 1e-5)


def test_one_worker_has_what_batch_norm_has_to_the_bit() -> None:
    steps = several(1)

    def work(world: World, net: nn.Module) -> dict[str, Tensor]:
        return trained(world, steps, net=net)

    (ours,) = in_threads(1, lambda world: work(world, synced()))
    (plain,) = in_threads(1, lambda world: work(world, make_net()))
    assert_same_bits([list(ours.values()), list(plain.values())])


# In all the ways in which steps are made


@pytest.mark.parametrize("settings", [{"clip_norm": 0.1}, {"skip_nonfinite": 2}, {"logged": True}])
def test_with_settings_of_the_session(settings: dict[str, Any]) -> None:
    steps = some_empty(3)
    bad = (4, 9) if "skip_nonfinite" in settings else ()
    for number in bad:
        steps[number][number % 3 - 2] = [batch(5, 4) * float("nan")]

    net = make_net()
    made = optimizer(net)
    for number, step in enumerate(without_empty(steps)):
        if number not in bad:
            made.zero_grad()
            loss(net, torch.cat([one for worker in step for one in worker])).backward()
            if "clip_norm" in settings:
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            made.step()
    assert_close(in_threads(3, lambda world: trained(world, steps, **settings)), dict(net.state_dict()))


def test_a_line_search_evaluates_the_loss_with_all_workers() -> None:
    steps = unequal(2)[:5]

    def search(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(net.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def work(world: World) -> dict[str, Tensor]:
        net = synced()
        session = session_of(net, search(net), loss, world=world)
        for step in steps:
            session.step(*step[world.rank])
        session.close()
        return dict(net.state_dict())

    net = make_net()
    made = search(net)
    for step in steps:
        whole = torch.cat([worker[0] for worker in step])

        def closure(whole: Tensor = whole) -> Tensor:
            made.zero_grad()
            found = loss(net, whole)
            found.backward()
            return found

        made.step(closure)  # type: ignore[arg-type]
    assert_close(in_threads(2, work), dict(net.state_dict()), 1e-6)


def test_gradients_that_are_accumulated_in_halves() -> None:
    """Each first half is a pass of all; a worker without samples in one of them takes part in the next."""
    halves = some_empty(3)

    def work(world: World) -> dict[str, Tensor]:
        net = synced()
        session = session_of(net, optimizer(net), loss, world=world)
        for first, second in zip(halves[::2], halves[1::2], strict=True):
            session.backward(*first[world.rank])
            session.backward(*second[world.rank])
            session.update()
        session.close()
        return dict(net.state_dict())

    net = make_net()
    made = optimizer(net)
    for number, half in enumerate(without_empty(halves)):
        loss(net, torch.cat([one for worker in half for one in worker])).backward()
        if number % 2:
            made.step()
            made.zero_grad()
    assert_close(in_threads(3, work), dict(net.state_dict()))


@pytest.mark.parametrize("make_step", [by_step, by_halves])
def test_workers_out_of_data_take_part_in_the_steps_of_others(make_step: Any) -> None:
    """One worker has fewer batches than the others: it learns of the last statistics at the end."""
    steps = equal(3)[:6]

    def work(world: World) -> dict[str, Tensor]:
        net = synced()
        session = session_of(net, optimizer(net), loss, world=world)
        own = [step[world.rank][0] for step in steps][: 3 if world.rank == 1 else 6]
        for one in session.batches(own):
            make_step(session, [one])
        session.close()
        return dict(net.state_dict())

    left = [
        [worker if number < 3 or rank != 1 else [] for rank, worker in enumerate(step)]
        for number, step in enumerate(steps)
    ]
    assert_close(in_threads(3, work), alone(left))


def test_no_worker_waits_for_its_turn_where_another_one_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are too large to be kept are added up during the backward pass, in turns: not here."""
    monkeypatch.setattr(summing, "KEPT_BYTES", 16)
    steps = unequal(4)
    ours = in_threads(4, lambda world: trained(world, steps))
    assert_close(ours, alone(steps))


def test_two_sessions_whose_models_have_layers_in_common() -> None:
    steps = unequal(2)[:8]

    def both(world: World | None) -> dict[str, Tensor]:
        first, second = (synced(), synced()) if world else (make_net(), make_net())

        def through_both(_: nn.Module, inputs: Tensor) -> Tensor:
            return loss(first, inputs) + second(inputs.flip(0)).square().mean()

        def plainly(_: nn.Module, inputs: Tensor) -> Tensor:
            return second(inputs).square().mean()

        nets, losses = (first, second), (through_both, plainly)
        optimizers = [optimizer(net) for net in nets]
        if world is None:
            for step in steps:
                whole = torch.cat([one for worker in step for one in worker])
                for net, made, of_net in zip(nets, optimizers, losses, strict=True):
                    made.zero_grad()
                    of_net(net, whole).backward()
                    made.step()
        else:
            sessions = [
                session_of(net, made, of_net, world=world)
                for net, made, of_net in zip(nets, optimizers, losses, strict=True)
            ]
            for step in steps:
                for session in sessions:
                    session.step(*step[world.rank])
            for session in sessions:
                session.close()
        return {
            f"{at}/{name}": value for at, net in enumerate(nets) for name, value in net.state_dict().items()
        }

    # Samples are in another order in the second pass of a whole batch, which changes nothing in it.
    assert_close(in_threads(2, both), both(None))


# Evaluation, checkpoints, and the layers themselves


def test_evaluation_goes_by_running_statistics_and_waits_for_no_worker() -> None:
    steps = equal(2)[:4]

    def work(world: World) -> tuple[Tensor, float]:
        net = synced()
        session = session_of(net, optimizer(net), loss, world=world)
        for step in steps:
            session.step(*step[world.rank])
        net.eval()
        net.last.train()
        with torch.no_grad():
            net.last.eval()
            found = net(batch(3, 7)) if world.rank else torch.zeros(0)  # one worker alone
        net.train()
        measured = session.evaluate(
            [[one] for one in batch(4, 6)], measures={"loss": lambda m, b: loss(m, b[0])}
        )
        session.close()
        return found, measured["loss"]

    (_, first), (found, second) = in_threads(2, work)
    net = make_net()
    net.load_state_dict(alone(steps, net))
    net.eval()
    torch.testing.assert_close(found, net(batch(3, 7)).detach())
    assert first == second


def test_a_layer_is_itself_again_and_copies_are_plain() -> None:
    def work(world: World) -> None:
        net = synced()
        kinds = [type(one) for one in net.modules()]
        keys, shown = list(net.state_dict()), repr(net)
        session = session_of(net, optimizer(net), loss, world=world)
        session.step(batch(world.rank, 4))
        for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), copy.copy(net.norm)):
            for one in copied.modules():
                assert type(one) in kinds
        assert list(net.state_dict()) == keys
        assert repr(net) == shown
        assert isinstance(net.norm, nn.SyncBatchNorm)
        session.close()
        assert [type(one) for one in net.modules()] == kinds
        assert all("forward" not in vars(one) for one in net.modules())

    in_threads(2, work)


# What is refused, and what is said


@pytest.mark.parametrize(
    "strategy",
    ["local-sgd", "hogwild", "double-buffer", "gossip", "parameter-server:async", "downpour", "sandblaster"],
)
def test_other_strategies_are_refused(strategy: str) -> None:
    with pytest.raises(
        UsageError, match=r"the layer norm is a SyncBatchNorm.*use --strategy all-reduce, or leave"
    ):
        in_threads(2, lambda world: trained(world, equal(2), strategy=strategy), strategy=strategy)


@pytest.mark.parametrize("placement", ["sharded", "tensor:ways=2", "pipeline:stages=2"])
def test_placements_that_divide_a_model_are_refused(placement: str) -> None:
    with pytest.raises(
        UsageError, match=r"the layer norm is a SyncBatchNorm.*a part of the model; use no --placement"
    ):
        in_threads(2, lambda world: trained(world, equal(2), placement=placement))


def test_a_layer_with_a_forward_of_its_own_is_refused() -> None:
    class Own(nn.SyncBatchNorm):
        def forward(self, input: Tensor) -> Tensor:
            return input

    net = nn.Sequential(nn.Linear(3, 3), Own(3))
    with pytest.raises(UsageError, match=r"the layer 1 is a SyncBatchNorm.*Own has a forward of its own"):
        in_threads(2, lambda world: trained(world, equal(2), net=copy.deepcopy(net)))


def test_one_worker_alone_outside_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a gradient it goes by its own samples and says so; a loss of its own would be another loss."""

    def work(world: World) -> None:
        net = synced()
        session = session_of(net, optimizer(net), loss, world=world)
        if world.rank == 0:
            before = copy.deepcopy(net)
            with torch.no_grad():
                torch.testing.assert_close(net(batch(1, 4)), before(batch(1, 4)))
            with pytest.raises(
                UsageError, match=r"'norm' is a SyncBatchNorm.*outside of a step.*session.step\(batch\)"
            ):
                net(batch(1, 4))
        session.step(batch(world.rank, 4))
        session.close()

    in_threads(2, work)
    assert (
        capsys.readouterr().err.count("it went by the samples of this worker alone") == 3
    )  # once for each layer


def test_a_loss_of_the_script_may_go_through_layers_that_stay_as_they_are() -> None:
    """In evaluation mode they are no part of the step; else the script hears that the session must call the model."""
    steps = unequal(2)[:5]

    def work(world: World) -> dict[str, Tensor]:
        net = synced()
        net.last = nn.Identity()
        session = session_of(net, optimizer(net), loss, world=world)
        with pytest.raises(UsageError, match=r"'norm' is a SyncBatchNorm.*which call the model themselves"):
            loss(net, steps[0][world.rank][0])
        net.eval()
        for step in steps:
            own = step[world.rank][0]
            session.backward(loss(net, own), samples=len(own))
            session.update()
        session.close()
        return dict(net.state_dict())

    net = make_net().eval()
    net.last = nn.Identity()
    assert_close(in_threads(2, work), alone(steps, net))


@pytest.mark.parametrize("makes_more", [0, 1])
def test_layers_that_are_not_called_equally_often_are_named(makes_more: int) -> None:
    def work(world: World) -> None:
        net = synced()

        def twice(model: nn.Module, inputs: Tensor) -> Tensor:
            found = loss(model, inputs)
            return (
                found + model.norm(torch.ones(2, 6, 1, 1).double()).sum()
                if world.rank == makes_more
                else found
            )

        session = session_of(net, optimizer(net), twice, world=world)
        try:
            session.step(batch(world.rank, 4))
        finally:
            session.close()

    with pytest.raises(
        UsageError, match=r"workers disagree: worker 0 was in the .* pass of layer .*SyncBatchNorm needs all"
    ):
        in_threads(2, work)


def test_a_gradient_of_one_worker_only_is_named() -> None:
    """The forward passes are the same, and only one of the workers goes back through them."""

    def work(world: World) -> None:
        net = synced()

        def half(model: nn.Module, inputs: Tensor) -> Tensor:
            found = loss(model, inputs)
            return found if world.rank else found.detach() + model.out.bias.sum()

        session = session_of(net, optimizer(net), half, world=world)
        try:
            session.step(batch(world.rank, 4))
        finally:
            session.close()

    with pytest.raises(
        UsageError, match=r"worker 0 was at the end of its batch while worker 1 was in the backward pass"
    ):
        in_threads(2, work)


# The layer's arithmetic


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_low_precision(dtype: torch.dtype) -> None:
    def work(world: World) -> Tensor:
        net = nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4))
        with torch.no_grad():
            net[0].weight.copy_(torch.eye(4, 3))
            net[0].bias.zero_()
        kept: list[Tensor] = []

        def lowly(model: nn.Module, inputs: Tensor) -> Tensor:
            found = model[1](model[0](inputs).to(dtype))
            assert found.dtype == dtype
            kept.append(found.detach().float())
            return found.float().square().mean()

        session = session_of(net, optimizer(net), lowly, world=world)
        session.step(batch(world.rank, 8).float()[:, 0, 0, :3])
        session.close()
        return kept[0]

    found = torch.cat(in_threads(2, work))
    whole = torch.cat([batch(rank, 8).float()[:, 0, 0, :3] for rank in range(2)])
    torch.testing.assert_close(found, nn.BatchNorm1d(4)(F.pad(whole, (0, 1))).detach(), rtol=0.02, atol=0.02)


def test_a_worker_may_have_nothing_to_normalise() -> None:
    """As where a model picks some of what it has found, and finds nothing on one of the workers."""

    def work(world: World) -> dict[str, Tensor]:
        net = nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4)).double()
        with torch.no_grad():
            net[0].weight.copy_(torch.ones(4, 3).tril())
            net[0].bias.zero_()

        def picks(model: nn.Module, inputs: Tensor) -> Tensor:
            found = model(inputs[: 0 if world.rank else None])
            return found.square().sum() * 0.1 + model[0].bias.sum()

        session = session_of(net, optimizer(net), picks, world=world)
        session.step(batch(world.rank, 8)[:, 0, 0, :3])
        session.close()
        return dict(net.state_dict())

    first, second = in_threads(2, work)
    assert_same_bits([list(first.values()), list(second.values())])
    assert torch.isfinite(first["0.weight"]).all()
    assert first["1.num_batches_tracked"] == 1
