"""Scripts that are written for DDP, with another import: each is as one process, or refused with a sentence."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from manyhands.adapters import ddp
from manyhands.adapters.ddp import DistributedDataParallel as DDP
from manyhands.cluster.worker.world import World
from manyhands.errors import UsageError
from tests.optimizers import GlobalNorm
from tests.sessions import session_of
from tests.threads import in_threads

INPUTS = torch.sin(torch.arange(96 * 4.0)).reshape(96, 4)
TARGETS = INPUTS.sum(1, keepdim=True)
LIMIT = 0.3
Train = Callable[[nn.Module, torch.optim.Optimizer, int, int], None]


def make_net() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(0.3 * torch.cos(torch.arange(param.numel())).view_as(param))
    return net


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-3)


@pytest.fixture(autouse=True)
def worlds(monkeypatch: pytest.MonkeyPatch) -> Callable[[World], None]:
    """Sessions begin in the world of their thread."""
    here = threading.local()

    def session(model: nn.Module, optimizer: Any, loss: Any, **settings: Any) -> Any:
        return session_of(model, optimizer, loss, world=here.world, **settings)

    monkeypatch.setattr(ddp, "session", session)
    monkeypatch.setattr(ddp.worker_process, "rank", lambda: here.world.rank)
    monkeypatch.setattr(ddp.worker_process, "workers", lambda: here.world.size)
    return lambda world: setattr(here, "world", world)


# Loops, each with its samples of every step; a plain one has all of them


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, workers: int) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for first in range(0, 96, 16):
        optimizer.zero_grad()
        F.mse_loss(
            model(INPUTS[first + rank : first + 16 : workers]), _targets(first, rank, workers)
        ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        scheduler.step()


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, workers: int) -> None:
    for first in range(0, 96, 32):
        for more in (0, 16):
            if isinstance(model, DDP):
                model.require_backward_grad_sync = more == 16
            outputs = model(INPUTS[first + more + rank : first + more + 16 : workers])
            (F.mse_loss(outputs, _targets(first + more, rank, workers)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, workers: int) -> None:
    """A passes whose gradients are not finite is left out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for first in range(0, 96, 16):
        outputs = model(INPUTS[first + rank : first + 16 : workers])
        scaler.scale(
            F.mse_loss(outputs, _targets(first, rank, workers)) * (1e38 if first == 32 else 1.0)
        ).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def unevenly(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, workers: int) -> None:
    """One worker has more samples than the other, looks at the model in between, and trains it in evaluation mode."""
    model.eval()
    for first in range(0, 96, 16):
        ours = (
            slice(first, first + 16)
            if workers == 1
            else slice(*((first, first + 12), (first + 12, first + 16))[rank])
        )
        if rank == 0:
            model(INPUTS)  # computes a graph that no backward pass goes through
        F.mse_loss(model(INPUTS[ours]), TARGETS[ours]).backward()
        optimizer.step()
        optimizer.zero_grad()


def twice(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, workers: int) -> None:
    """Two backward passes go through one output."""
    for first in range(0, 96, 16):
        outputs = model(INPUTS[first + rank : first + 16 : workers])
        F.mse_loss(outputs, _targets(first, rank, workers)).backward(retain_graph=True)
        outputs.abs().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _targets(first: int, rank: int, workers: int) -> Tensor:
    return TARGETS[first + rank : first + 16 : workers]


@pytest.mark.parametrize("is_made_late", [False, True])
@pytest.mark.parametrize("train", [plainly, accumulating, scaled, unevenly, twice])
def test_two_workers_are_as_one_process(
    train: Train, is_made_late: bool, worlds: Callable[[World], None]
) -> None:
    def work(world: World) -> tuple[int, dict[str, Tensor]]:
        worlds(world)
        net = make_net()
        optimizer = None if is_made_late else adam(net)
        model = DDP(net, device_ids=[world.rank], find_unused_parameters=True)
        train(model, optimizer or adam(model), world.rank, 2)
        model.session.close()
        return model.session.samples, {
            name: value.clone() for name, value in model.module.state_dict().items()
        }

    plain = make_net()
    train(plain, adam(plain), 0, 1)
    for samples, state in in_threads(2, work):
        assert samples == (192 if train is twice else 96)  # by every pass that is shared
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_what_scripts_import_beside_it(worlds: Callable[[World], None]) -> None:
    """The sampler divides the data among the workers, and without `no_sync` and no session all is as it was."""

    def work(world: World) -> list[float]:
        worlds(world)
        ddp.init_process_group("gloo")
        assert (ddp.is_initialized(), ddp.get_rank(), ddp.get_world_size()) == (True, world.rank, 2)
        net = make_net()
        optimizer = adam(net)
        model = DDP(net)
        with model.no_sync():
            model(INPUTS[:4]).sum().backward()
        assert model.require_backward_grad_sync
        assert next(iter(model.state_dict())) == "module.0.weight"
        model(INPUTS[:4]).sum().backward()
        optimizer.step()
        model.session.close()
        data = TensorDataset(torch.arange(6.0))
        loader = DataLoader(data, sampler=ddp.DistributedSampler(data, shuffle=False))
        return [float(batch[0]) for batch in loader]

    assert in_threads(2, work) == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]


def test_a_backward_pass_through_what_was_computed_before_a_death_is_refused(
    worlds: Callable[[World], None],
) -> None:
    """Its memory is that of the generation before."""

    def work(world: World) -> None:
        worlds(world)
        net = make_net()
        optimizer = adam(net)
        model = DDP(net)
        loss = model(INPUTS).square().mean()
        engine = model.session.engine
        before, engine.generation = engine.generation, copy.copy(engine.generation)
        with pytest.raises(
            UsageError, match="between a forward pass of the wrapped model and its backward pass"
        ):
            loss.backward()
        engine.generation = before
        optimizer.zero_grad()
        model.session.close()

    in_threads(2, work)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("no optimizer", "there are 0 optimizers"),
        ("two optimizers", "there are 2 optimizers"),
        ("closure", r"SGD.step\(closure\)"),
        ("group", r"DistributedDataParallel\(process_group=…\)"),
        ("hook", "register_comm_hook"),
        ("placement", "needs the whole model on every worker"),
        ("whole", "GlobalNorm must update all parameters in one call"),
        ("fused", r"AdamW\(fused=True\)"),
        ("session", "begins with the first forward pass"),
    ],
)
def test_what_cannot_be_is_refused(kind: str, sentence: str, worlds: Callable[[World], None]) -> None:
    def work(world: World) -> None:
        worlds(world)
        net = make_net()
        made: list[torch.optim.Optimizer] = []
        settings: dict[str, Any] = {}
        if kind == "two optimizers":
            made = [
                torch.optim.SGD(net[0].parameters(), lr=0.1),
                torch.optim.SGD(net[2].parameters(), lr=0.1),
            ]
        elif kind == "whole":
            made = [GlobalNorm(net.parameters(), lr=0.1)]
        elif kind == "fused":
            made = [torch.optim.AdamW(net.parameters(), fused=True)]
        elif kind not in ("no optimizer", "session"):
            made = [torch.optim.SGD(net.parameters(), lr=0.1)]
        if kind == "group":
            settings["process_group"] = object()
        elif kind == "placement":
            settings["placement"] = "sharded"
        model = DDP(net, **settings)
        if kind == "session":
            assert model.session
        if kind == "hook":
            model.register_comm_hook(None, None)
        scaler = torch.amp.GradScaler("cpu", enabled=kind == "fused")
        loss = model(INPUTS).square().mean()
        scaler.scale(loss).backward()
        if kind == "closure":
            made[0].step(lambda: 0.0)
        scaler.step(made[0])

    with pytest.raises(UsageError, match=sentence):
        in_threads(2, work)
