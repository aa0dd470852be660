"""What every strategy must keep, run over everything registered."""

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands import spec, strategies
from manyhands.cluster.worker.world import World
from manyhands.comm.collectives import TOPOLOGIES
from manyhands.engine.session import Session
from manyhands.strategies import PRESETS, STRATEGIES
from tests.sessions import session_of
from tests.threads import in_threads

Batch = tuple[Tensor, Tensor]
Steps = Sequence[Sequence[Sequence[Batch]]]  # per step, per worker, the batches to accumulate

STEPS = 5
NAMES = [*STRATEGIES, *PRESETS]
SERVER_GROUPS = "worker-groups:server_groups=2"
_texts = [*NAMES, *(f"all-reduce:topology={name}" for name in TOPOLOGIES), SERVER_GROUPS]
DIFFERENT = list({strategies.parse(text): text for text in reversed(_texts)}.values())[
    ::-1
]  # each thing once
SYNCHRONOUS = [text for text in DIFFERENT if strategies.parse(text).traits.synchronous]
TOGETHER = [text for text in SYNCHRONOUS if text != "single"]
REPEATABLE = [text for text in DIFFERENT if strategies.parse(text).traits.repeatable]
ANY_OPTIMIZER = [text for text in DIFFERENT if not strategies.tuning(strategies.parse(text)).only_optimizer]
# Servers run any optimizer that takes one gradient per step.
WITHOUT_SERVERS = [text for text in TOGETHER if not strategies.parse(text).traits.servers]
APART = [text for text in DIFFERENT if text not in SYNCHRONOUS]


def both(some: Sequence[str], others: Sequence[str]) -> list[str]:
    return [text for text in some if text in others]


# Why one worker alone does not train as plain PyTorch does.
OTHER_ALONE = {
    "double-buffer": "its gradients are one step late, with one worker too",
    "block-momentum": "start + (end − start) is the end, but rounded",
    "elastic-averaging": "the spring pulls a single worker back as well",
    "diloco": "the outer step has a rate and a momentum of its own",
}


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


def optimizer_for(strategy: str, usual: Callable[[nn.Module], Optimizer]) -> Callable[[nn.Module], Optimizer]:
    """What a test trains with under a strategy: the usual, or the only one that the strategy has."""
    only = strategies.tuning(strategies.parse(strategy)).only_optimizer
    return {"lbfgs": lbfgs}[only] if only else usual


def two_groups(make: Callable[..., Optimizer], net: nn.Module) -> Optimizer:
    """Biases with a rate of their own; the parameters in an order of their own."""
    params = dict(net.named_parameters())
    biases = [params[name] for name in params if name.endswith("bias")]
    weights = [params[name] for name in reversed(params) if not name.endswith("bias")]
    return make([{"params": weights}, {"params": biases, "lr": 0.02}])


def momentum_of(net: nn.Module) -> Optimizer:
    return two_groups(OPTIMIZERS["momentum"], net)


def lbfgs(net: nn.Module) -> Optimizer:
    return torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")


def plain_sgd(net: nn.Module) -> Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def plainly(
    net: nn.Module,
    make: Callable[[nn.Module], Optimizer],
    steps: Steps,
    *,
    clip: float | None = None,
    scheduled: bool = False,
    before: Callable[[nn.Module, int], None] | None = None,
) -> nn.Module:
    """The definition: one process, plain PyTorch, the gradient of the mean over all samples of the step."""
    optimizer = make(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if scheduled else None
    for number, workers in enumerate(steps):
        batches = [batch for accumulated in workers for batch in accumulated]
        if before:
            before(net, number)

        def closure(batches: Sequence[Batch] = batches) -> float:
            total = sum(len(targets) for _, targets in batches)
            optimizer.zero_grad()
            value = 0.0
            for batch in batches:
                part = loss(net, batch) * (len(batch[1]) / total)
                part.backward()
                value += part.item()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            return value

        optimizer.step(closure)
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
    before: Callable[[nn.Module, int], None] | None = None,
    logged: bool = False,
) -> list[list[Tensor]]:
    """The same through sessions; returns the parameters that each worker ends with."""

    def work(world: World) -> list[Tensor]:
        model = net()
        if before:
            before(model, 0)
        optimizer = make(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if scheduled else None
        session = session_of(
            model,
            optimizer,
            loss,
            world=world,
            strategy=strategy,
            clip_norm=clip,
            scheduler=scheduler,
            logged=logged,
        )
        for number, step in enumerate(steps):
            if before:
                before(model, number)
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
@pytest.mark.parametrize("strategy", both(SYNCHRONOUS, ANY_OPTIMIZER))
def test_a_world_of_one_is_plain_pytorch_bit_for_bit(strategy: str, optimizer: str) -> None:
    make = functools.partial(two_groups, OPTIMIZERS[optimizer])
    steps = make_steps(1, dtype=torch.float32)
    # Servers add up the norm in another order.
    clip = None if strategies.parse(strategy).traits.servers else 0.5
    want = plainly(make_net(torch.float32, optional=True), make, steps, clip=clip, scheduled=True)
    net = functools.partial(make_net, torch.float32, optional=True)
    (ours,) = together(1, strategy, net, make, steps, clip=clip, scheduled=True)
    for got, param in zip(ours, want.parameters(), strict=True):
        assert torch.equal(got, param)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("strategy", [text for text in APART if not strategies.parse(text).traits.servers])
def test_a_world_of_one_is_plain_pytorch_unless_it_says_why_not(strategy: str, optimizer: str) -> None:
    make = functools.partial(two_groups, OPTIMIZERS[optimizer])
    steps = make_steps(1, dtype=torch.float32)
    want = plainly(make_net(torch.float32, optional=True), make, steps, clip=0.5, scheduled=True)
    net = functools.partial(make_net, torch.float32, optional=True)
    (ours,) = together(1, strategy, net, make, steps, clip=0.5, scheduled=True)
    same = all(torch.equal(got, param) for got, param in zip(ours, want.parameters(), strict=True))
    assert same == (spec.split(strategy)[0] not in OTHER_ALONE)


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


def assert_equals_one_big_batch(
    case: str,
    workers: int,
    strategy: str,
    make: Callable[[nn.Module], Optimizer],
    *,
    logged: bool = False,
) -> None:
    settings = dict(CASES[case])
    optional = settings.pop("optional", False)
    sizes = settings.pop("sizes", lambda step, rank: [6])
    if settings.pop("lonely", False):
        sizes = lambda step, rank: [4] if rank == workers - 1 else []  # noqa: E731
    net = functools.partial(make_net, optional=optional)
    steps = make_steps(workers, sizes)
    want = plainly(net(), make, steps, **settings)
    ours = together(workers, strategy, net, make, steps, logged=logged, **settings)
    assert_close(ours[0], want)
    assert_same_bits(ours)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", TOGETHER)
def test_synchronous_strategies_equal_one_big_batch(strategy: str, case: str, workers: int) -> None:
    make = optimizer_for(strategy, functools.partial(two_groups, OPTIMIZERS["momentum"]))
    assert_equals_one_big_batch(case, workers, strategy, make)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "amsgrad", "adamw", "rmsprop"])
def test_updates_that_survive_a_death_equal_one_big_batch(optimizer: str, case: str) -> None:
    """They are written down first, and some are made by other kernels."""
    make = functools.partial(two_groups, OPTIMIZERS[optimizer])
    assert_equals_one_big_batch(case, 3, "all-reduce", make, logged=True)


@pytest.mark.parametrize("workers", [2, 4])
def test_single_precision_equals_one_big_batch(workers: int) -> None:
    make = functools.partial(two_groups, OPTIMIZERS["momentum"])
    steps = make_steps(workers, dtype=torch.float32)
    net = functools.partial(make_net, torch.float32)
    want = plainly(net(), make, steps)
    assert_close(together(workers, "all-reduce", net, make, steps)[0], want)


def crew_of(strategy: str) -> int:
    return 1 if strategy == "single" else 4


def flat(session: Session) -> Tensor:
    return torch.cat([param.detach().flatten() for param in session.model.parameters()])


@pytest.mark.processes
@pytest.mark.parametrize("strategy", DIFFERENT)
def test_replicas_agree_at_every_pause_whatever_data_the_workers_have(strategy: str, tmp_path: Path) -> None:
    """Different numbers of batches, and one worker without any: nobody hangs, and pauses find all alike."""
    steps = make_steps(crew_of(strategy))
    (held_out,) = make_steps(1)[0][0]

    make = optimizer_for(strategy, functools.partial(two_groups, OPTIMIZERS["momentum"]))

    def work(world: World) -> list[Tensor]:
        net = make_net()
        session = session_of(net, make(net), loss, world=world, strategy=strategy, clip_norm=0.3)
        mine = [batch for step in steps for batch in step[world.rank]]
        mine = mine[: {0: 5, 1: 0, 2: 3, 3: 4}[world.rank]]
        seen = []
        for _ in range(2):
            for batch in session.batches(mine):
                session.step(batch)
            session.evaluate(list(zip(*held_out, strict=True)))
            seen.append(flat(session))
            session.save(tmp_path)
            seen.append(flat(session))
            world.host.barrier()  # where nobody waits, a neighbour's next step may change what we look at
            session.step(*mine[:1])
        session.close()
        seen.append(flat(session))
        assert session.samples == (5 + 0 + 3 + 4 + 3) * 12 if world.size == 4 else 6 * 12
        return seen

    everyone = in_threads(crew_of(strategy), work, strategy=strategy)
    assert_same_bits(everyone)
    first = everyone[0]
    assert torch.equal(first[0], first[1]), "a second pause without a step in between changes nothing"
    assert not torch.equal(first[1], first[2])
    assert not [thread for thread in threading.enumerate() if thread.name == "sum"]


@pytest.mark.processes
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("strategy", both(APART, REPEATABLE))
def test_resume_equals_a_run_that_only_saved(strategy: str, optimizer: str, tmp_path: Path) -> None:
    """Bit for bit, with a worker that has no data at first, so that states of optimizers differ."""
    steps = make_steps(3, lambda step, rank: [4] if rank != 1 or step > 1 else []) * 3

    def run(world: World, name: str, stop: int) -> list[Tensor]:
        def start() -> Session:
            net = make_net()
            made = two_groups(OPTIMIZERS[optimizer], net)
            return session_of(net, made, loss, world=world, strategy=strategy, clip_norm=0.3)

        session = start()
        for number, step in enumerate(steps, start=1):
            session.step(*step[world.rank])
            if number in (1, 7, 12):
                session.save(tmp_path / name)
                if number == stop:
                    session.close()
                    session = start()
                    assert session.resume(tmp_path / name) == {}
                    assert session.steps == number
        session.close()
        return [flat(session)]

    whole = in_threads(3, functools.partial(run, name="whole", stop=0), strategy=strategy)
    for stop in (1, 7):
        parts = in_threads(3, functools.partial(run, name=f"stop-{stop}", stop=stop), strategy=strategy)
        assert_same_bits([whole[0], *parts])


@pytest.mark.parametrize("strategy", DIFFERENT)
def test_every_strategy_learns(strategy: str) -> None:
    batches = [
        (inputs, (inputs.mean((1, 2, 3)) > 0).long()) for inputs, _ in _many_batches(crew_of(strategy))
    ]

    make = optimizer_for(strategy, plain_sgd)

    def work(world: World) -> tuple[float, float]:
        net = make_net()
        session = session_of(net, make(net), loss, world=world, strategy=strategy)
        samples = [sample for batch in batches for sample in zip(*batch, strict=True)]
        before = session.evaluate(samples)["loss"]
        for _ in range(25):
            session.step(batches[world.rank])
        after = session.evaluate(samples)["loss"]
        session.close()
        return before, after

    for before, after in in_threads(crew_of(strategy), work, strategy=strategy):
        assert after < 0.6 * before


def _many_batches(count: int) -> list[Batch]:
    return [batch for step in make_steps(count, lambda step, rank: [24])[:1] for (batch,) in step]


@pytest.mark.parametrize("strategy", both(TOGETHER, REPEATABLE))
def test_the_same_run_gives_the_same_bits(strategy: str) -> None:
    make = optimizer_for(strategy, functools.partial(two_groups, OPTIMIZERS["adam"]))
    net = functools.partial(make_net, torch.float32)
    steps = make_steps(3, dtype=torch.float32)
    assert_same_bits([together(3, strategy, net, make, steps)[0] for _ in range(3)])


@pytest.mark.parametrize("strategy", TOGETHER)
def test_worker_0_decides_the_initial_parameters(strategy: str) -> None:
    make = optimizer_for(
        strategy, lambda net: torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    )

    def work(world: World) -> dict[str, Tensor]:
        model = make_net(seed=world.rank)
        model.conv.requires_grad_(False)
        model.register_buffer("mean", torch.full((3,), float(world.rank)))
        with session_of(model, make(model), loss, world=world, strategy=strategy):
            return {name: value.clone() for name, value in model.state_dict().items()}

    replicas = in_threads(3, work, strategy=strategy)
    assert_same_bits([list(replica.values()) for replica in replicas])
    assert float(replicas[2]["mean"].sum()) == 0
    for name, value in make_net(seed=0).state_dict().items():
        assert torch.equal(replicas[2][name], value)


@pytest.mark.parametrize("strategy", TOGETHER)
def test_frozen_parameters_stay_and_may_be_thawed(strategy: str) -> None:
    steps = make_steps(2)
    make = optimizer_for(strategy, lambda net: OPTIMIZERS["momentum"](net.parameters()))

    def freeze(net: nn.Module, number: int) -> None:
        net.get_submodule("conv").requires_grad_(number >= 2)

    want = plainly(make_net(), make, steps, before=freeze)
    ours = together(2, strategy, make_net, make, steps, before=freeze)
    assert_close(ours[0], want)
    assert_same_bits(ours)


@pytest.mark.parametrize("strategy", WITHOUT_SERVERS)
def test_lbfgs_with_clipping_and_a_worker_without_data_stays_together(strategy: str) -> None:
    steps = make_steps(3, lambda step, rank: [] if rank == 1 else [4])
    assert_same_bits(together(3, strategy, make_net, lbfgs, steps, clip=0.05))


@pytest.mark.parametrize("strategy", WITHOUT_SERVERS)
def test_lbfgs_equals_one_process(strategy: str) -> None:
    steps = make_steps(2)
    want = plainly(make_net(), lbfgs, steps)
    ours = together(2, strategy, make_net, lbfgs, steps)
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
        session = session_of(net, make(net), squared, world=world)
        for tokens in steps:
            session.step(tokens[world.rank])
        session.close()
        return [param.detach().clone() for param in net.parameters()]

    ours = in_threads(2, work)
    assert_close(ours[0], want)
    assert_same_bits(ours)


@pytest.mark.parametrize("name", NAMES)
def test_the_text_of_a_strategy_is_its_configuration(name: str) -> None:
    strategy = strategies.parse(name)
    assert strategies.parse(strategies.describe(strategy)) == strategy
    assert name in PRESETS or (STRATEGIES[name].__doc__ or "").strip(), "`manyhands list` needs a line"


def test_settings_come_on_top_of_a_preset() -> None:
    assert strategies.describe(strategies.parse("parameter-averaging:period=3")) == "local-sgd:period=3"
    assert strategies.describe(strategies.parse("ring")) == "all-reduce:topology=ring"
    assert strategies.describe(strategies.parse("local-first:topology=tree")) == "all-reduce:topology=tree"
