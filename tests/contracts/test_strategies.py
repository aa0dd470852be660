"""What every strategy must keep, run over everything registered."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands import strategies
from manyhands.cluster.world import World
from manyhands.comm.collectives import TOPOLOGIES
from manyhands.sessions import Session
from manyhands.strategies import STRATEGIES
from tests.crew import in_threads

Batch = tuple[Tensor, Tensor]
Steps = Sequence[Sequence[Sequence[Batch]]]  # per step, per worker, the batches to accumulate

STEPS = 5
SYNCHRONOUS = [
    *(name for name, kind in STRATEGIES.items() if kind().synchronous),
    *(f"all-reduce:topology={name}" for name in TOPOLOGIES),
]
TOGETHER = [name for name in SYNCHRONOUS if name != "single"]
# Servers run any optimizer that takes one gradient per step.
WITHOUT_SERVERS = [name for name in TOGETHER if not strategies.parse(name).rule]


class Net(nn.Module):
    """Convolution, tied weights, odd sizes, and (on request) parts that are not always used."""

    def __init__(self, *, optional: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 5, 3, padding=1)
        self.into = nn.Linear(5 * 16, 37)
        self.tied = nn.Linear(37, 37)
        self.again = nn.Linear(37, 37)
        self.again.weight = self.tied.weight
        self.out = nn.Linear(37, 4)
        self.branches = nn.ModuleList(nn.Linear(37, 37) for _ in range(3)) if optional else None

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.into(torch.tanh(self.conv(inputs)).flatten(1)))
        hidden = torch.tanh(self.again(torch.tanh(self.tied(hidden))))
        if self.branches is not None:
            # The graph follows the data: which branch a batch takes is written in its first sample.
            choice = int(inputs[0, 0, 0, 0].abs() * 1000) % 4
            if choice < 3:
                hidden = hidden + torch.tanh(self.branches[choice](hidden))
        return self.out(hidden)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make_net(dtype: torch.dtype = torch.float64, *, optional: bool = False, seed: int = 3) -> Net:
    generator = torch.Generator().manual_seed(seed)
    net = Net(optional=optional).to(dtype)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.2)
    return net


def make_steps(
    workers: int,
    sizes: Callable[[int, int], list[int]] = lambda step, rank: [6],
    dtype: torch.dtype = torch.float64,
) -> Steps:
    """Batches from a seed; `sizes(step, rank)` gives the sizes of the batches to accumulate."""
    generator = torch.Generator().manual_seed(17)

    def batch(size: int) -> Batch:
        inputs = torch.randn(size, 1, 4, 4, generator=generator, dtype=torch.float64).to(dtype)
        return inputs, torch.randint(0, 4, (size,), generator=generator)

    return [[[batch(size) for size in sizes(step, rank)] for rank in range(workers)] for step in range(STEPS)]


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "dampened": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "adam": functools.partial(torch.optim.Adam, lr=0.01, weight_decay=0.01),
    "amsgrad": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.05),
    "adadelta": functools.partial(torch.optim.Adadelta, lr=0.5),
    "adamax": functools.partial(torch.optim.Adamax, lr=0.01),
    "nadam": functools.partial(torch.optim.NAdam, lr=0.01),
    "radam": functools.partial(torch.optim.RAdam, lr=0.01),
    "rprop": functools.partial(torch.optim.Rprop, lr=0.01),
    "asgd": functools.partial(torch.optim.ASGD, lr=0.1),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),  # owns whole tensors: rows and columns
}


def two_groups(make: Callable[..., Optimizer], net: nn.Module) -> Optimizer:
    """Biases with a rate of their own; the parameters in an order of their own."""
    params = dict(net.named_parameters())
    biases = [params[name] for name in params if name.endswith("bias")]
    weights = [params[name] for name in reversed(params) if not name.endswith("bias")]
    return make([{"params": weights}, {"params": biases, "lr": 0.02}])


def plainly(
    net: nn.Module,
    make: Callable[[nn.Module], Optimizer],
    steps: Steps,
    *,
    clip: float | None = None,
    scheduled: bool = False,
) -> nn.Module:
    """The definition: one process, plain PyTorch, the gradient of the mean over all samples of the step."""
    optimizer = make(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if scheduled else None
    for workers in steps:
        batches = [batch for accumulated in workers for batch in accumulated]
        total = sum(len(targets) for _, targets in batches)
        optimizer.zero_grad()
        for batch in batches:
            (loss(net, batch) * (len(batch[1]) / total)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        if scheduler:
            scheduler.step()
    return net


def together(
    workers: int,
    strategy: str,
    net: Callable[[], nn.Module],
    make: Callable[[nn.Module], Optimizer],
    steps: Steps,
    *,
    clip: float | None = None,
    scheduled: bool = False,
) -> list[list[Tensor]]:
    """The same through sessions; returns the parameters that each worker ends with."""

    def work(world: World) -> list[Tensor]:
        model = net()
        optimizer = make(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if scheduled else None
        session = Session(
            model, optimizer, loss, world=world, strategy=strategy, clip_norm=clip, scheduler=scheduler
        )
        for step in steps:
            session.step(*step[world.rank])
        session.close()
        return [param.detach().clone() for param in model.parameters()]

    return in_threads(workers, work, strategy=strategy)


def assert_close(ours: Sequence[Tensor], model: nn.Module, tolerance: float = 1e-6) -> None:
    for got, (name, want) in zip(ours, model.named_parameters(), strict=True):
        error = ((got - want).norm() / want.norm()).item()
        assert error <= tolerance, f"{name}: relative difference {error:.2e} > {tolerance:.0e}"


def assert_same_bits(replicas: Sequence[Sequence[Tensor]]) -> None:
    for other in replicas[1:]:
        for one, two in zip(replicas[0], other, strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_a_world_of_one_is_plain_pytorch_bit_for_bit(strategy: str, optimizer: str) -> None:
    make = functools.partial(two_groups, OPTIMIZERS[optimizer])
    steps = make_steps(1, dtype=torch.float32)
    # Servers add up the norm in another order.
    clip = None if strategies.parse(strategy).rule else 0.5
    want = plainly(make_net(torch.float32, optional=True), make, steps, clip=clip, scheduled=True)
    net = functools.partial(make_net, torch.float32, optional=True)
    (ours,) = together(1, strategy, net, make, steps, clip=clip, scheduled=True)
    for got, param in zip(ours, want.parameters(), strict=True):
        assert torch.equal(got, param)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_equals_one_big_batch(optimizer: str, workers: int) -> None:
    make = functools.partial(two_groups, OPTIMIZERS[optimizer])
    steps = make_steps(workers)
    want = plainly(make_net(), make, steps)
    ours = together(workers, "all-reduce", make_net, make, steps)
    assert_close(ours[0], want)
    assert_same_bits(ours)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip": 0.05},
    "scheduled": {"scheduled": True},
    "batches differ": {"sizes": lambda step, rank: [1 + (3 * rank + step) % 7]},
    "accumulated": {"sizes": lambda step, rank: [3, 5][: 1 + (step + rank) % 2]},
    "a worker without data": {"sizes": lambda step, rank: [] if (step + rank) % 3 == 0 and rank else [4]},
    "only the last worker has data": {"sizes": lambda step, rank: [4], "lonely": True},
    "unused parameters": {"optional": True},
    "unused, accumulated": {"optional": True, "sizes": lambda step, rank: [3, 2, 4][: 1 + (step + rank) % 3]},
    "unused, clipped, uneven": {"optional": True, "clip": 0.05, "sizes": lambda step, rank: [2 + rank]},
}


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", TOGETHER)
def test_synchronous_strategies_equal_one_big_batch(strategy: str, case: str, workers: int) -> None:
    settings = dict(CASES[case])
    optional = settings.pop("optional", False)
    sizes = settings.pop("sizes", lambda step, rank: [6])
    if settings.pop("lonely", False):
        sizes = lambda step, rank: [4] if rank == workers - 1 else []  # noqa: E731
    make = functools.partial(two_groups, OPTIMIZERS["momentum"])
    net = functools.partial(make_net, optional=optional)
    steps = make_steps(workers, sizes)
    want = plainly(net(), make, steps, **settings)
    ours = together(workers, strategy, net, make, steps, **settings)
    assert_close(ours[0], want)
    assert_same_bits(ours)


@pytest.mark.parametrize("workers", [2, 4])
def test_single_precision_equals_one_big_batch(workers: int) -> None:
    make = functools.partial(two_groups, OPTIMIZERS["momentum"])
    steps = make_steps(workers, dtype=torch.float32)
    net = functools.partial(make_net, torch.float32)
    want = plainly(net(), make, steps)
    assert_close(together(workers, "all-reduce", net, make, steps)[0], want)


@pytest.mark.parametrize("strategy", TOGETHER)
def test_the_same_run_gives_the_same_bits(strategy: str) -> None:
    make = functools.partial(two_groups, OPTIMIZERS["adam"])
    net = functools.partial(make_net, torch.float32)
    steps = make_steps(3, dtype=torch.float32)
    assert_same_bits([together(3, strategy, net, make, steps)[0] for _ in range(3)])


@pytest.mark.parametrize("strategy", TOGETHER)
def test_worker_0_decides_the_initial_parameters(strategy: str) -> None:
    def work(world: World) -> dict[str, Tensor]:
        model = make_net(seed=world.rank)
        model.conv.requires_grad_(False)
        model.register_buffer("mean", torch.full((3,), float(world.rank)))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with Session(model, optimizer, loss, world=world, strategy=strategy):
            return {name: value.clone() for name, value in model.state_dict().items()}

    replicas = in_threads(3, work, strategy=strategy)
    assert_same_bits([list(replica.values()) for replica in replicas])
    assert float(replicas[2]["mean"].sum()) == 0
    for name, value in make_net(seed=0).state_dict().items():
        assert torch.equal(replicas[2][name], value)


@pytest.mark.parametrize("strategy", TOGETHER)
def test_frozen_parameters_stay_and_may_be_thawed(strategy: str) -> None:
    steps = make_steps(2)

    def freeze(net: Net, frozen: bool) -> None:
        net.conv.requires_grad_(not frozen)

    want = make_net()
    optimizer = OPTIMIZERS["momentum"](want.parameters())
    for number, workers in enumerate(steps):
        freeze(want, number < 2)
        optimizer.zero_grad()
        for ((inputs, targets),) in workers:
            (loss(want, (inputs, targets)) / 2).backward()
        optimizer.step()

    def work(world: World) -> list[Tensor]:
        net = make_net()
        freeze(net, True)
        session = Session(net, OPTIMIZERS["momentum"](net.parameters()), loss, world=world, strategy=strategy)
        for number, step in enumerate(steps):
            freeze(net, number < 2)
            session.step(*step[world.rank])
        session.close()
        return [param.detach().clone() for param in net.parameters()]

    ours = in_threads(2, work, strategy=strategy)
    assert_close(ours[0], want)
    assert_same_bits(ours)


@pytest.mark.parametrize("strategy", WITHOUT_SERVERS)
def test_lbfgs_with_clipping_and_a_worker_without_data_stays_together(strategy: str) -> None:
    def make(net: nn.Module) -> Optimizer:
        return torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")

    steps = make_steps(3, lambda step, rank: [] if rank == 1 else [4])
    assert_same_bits(together(3, strategy, make_net, make, steps, clip=0.05))


@pytest.mark.parametrize("strategy", WITHOUT_SERVERS)
def test_lbfgs_equals_one_process(strategy: str) -> None:
    def make(net: nn.Module) -> Optimizer:
        return torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    steps = make_steps(2)
    want = make_net()
    optimizer = make(want)
    for workers in steps:
        inputs = torch.cat([batch[0] for (batch,) in workers])
        targets = torch.cat([batch[1] for (batch,) in workers])

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            value = loss(want, (inputs, targets))
            value.backward()
            return value

        optimizer.step(closure)
    ours = together(2, strategy, make_net, make, steps)
    assert_close(ours[0], want, 1e-6)
    assert_same_bits(ours)


@pytest.mark.parametrize("kind", ["sgd", "sparse-adam"])
def test_sparse_gradients(kind: str) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            start = torch.randn(50, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
            self.table = nn.Embedding.from_pretrained(start, freeze=False, sparse=True)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.table(tokens).mean(1)

    def squared(model: nn.Module, batch: Tensor) -> Tensor:
        return ((model(batch) - 1.0) ** 2).mean()

    def make(net: nn.Module) -> Optimizer:
        if kind == "sgd":
            return torch.optim.SGD(net.parameters(), lr=0.5)
        return torch.optim.SparseAdam(list(net.parameters()), lr=0.1)

    generator = torch.Generator().manual_seed(6)
    steps = [torch.randint(0, 50, (2, 4, 3), generator=generator) for _ in range(STEPS)]
    want = Words()
    optimizer = make(want)
    for tokens in steps:
        optimizer.zero_grad()
        squared(want, tokens.flatten(0, 1)).backward()
        optimizer.step()

    def work(world: World) -> list[Tensor]:
        net = Words()
        session = Session(net, make(net), squared, world=world)
        for tokens in steps:
            session.step(tokens[world.rank])
        session.close()
        return [param.detach().clone() for param in net.parameters()]

    ours = in_threads(2, work)
    assert_close(ours[0], want)
    assert_same_bits(ours)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_text_of_a_strategy_is_its_configuration(name: str) -> None:
    strategy = strategies.parse(name)
    assert strategies.parse(strategies.describe(strategy)) == strategy
    assert (STRATEGIES[name].__doc__ or "").strip(), f"{name} needs a line for `manyhands list`"
