"""Tables of which a step touches some rows: on servers they train as whole tables do."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.cluster.worker.world import World
from manyhands.engine.session import Session
from manyhands.errors import UsageError
from tests.contracts.test_strategies import (
    CASES,
    STEPS,
    Steps,
    assert_close,
    assert_same_bits,
    loss,
    plainly,
    together,
)
from tests.sessions import session_of
from tests.threads import in_threads

ROWS, COLUMNS = 600, 24


class Words(nn.Module):
    """A table that three servers divide, one that is small, and an ordinary layer."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, COLUMNS, padding_idx=0, sparse=sparse)
        self.bag = nn.EmbeddingBag(40, COLUMNS, mode="sum", sparse=sparse)
        self.out = nn.Linear(COLUMNS, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table(tokens).mean(1) + self.bag(tokens % 40)))


def make_words(*, sparse: bool = True) -> nn.Module:
    generator = torch.Generator().manual_seed(8)
    words = Words(sparse=sparse).double()
    with torch.no_grad():
        for param in words.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.3)
    return words


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.5),
    "momentum": functools.partial(torch.optim.SGD, lr=0.2, momentum=0.9),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
}


def optimized(name: str, net: nn.Module) -> Optimizer:
    return OPTIMIZERS[name](net.parameters())


def make_steps(workers: int, sizes: Callable[[int, int], list[int]] = lambda step, rank: [5]) -> Steps:
    generator = torch.Generator().manual_seed(21)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        # Few words come often and many seldom, as in texts: rows that several workers touch, and rows that come back.
        tokens = (torch.rand(size, 3, generator=generator) ** 3 * ROWS).long()
        return tokens, torch.randint(0, 4, (size,), generator=generator)

    return [[[batch(size) for size in sizes(step, rank)] for rank in range(workers)] for step in range(STEPS)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 3), (3, 2)])
def test_rows_train_as_the_whole_table_does(optimizer: str, workers: int, servers: int) -> None:
    make = functools.partial(optimized, optimizer)
    steps = make_steps(workers)

    def work(world: World) -> list[Tensor]:
        return trained(world, "parameter-server", make, steps)

    ours = in_threads(workers, work, servers=servers)
    assert_close(ours[0], plainly(make_words(sparse=False), make, steps))
    assert_same_bits(ours)


def trained(
    world: World, strategy: str, make: Callable[[nn.Module], Optimizer], steps: Steps, **more: Any
) -> list[Tensor]:
    net = make_words()
    with session_of(net, make(net), loss, world=world, strategy=strategy, **more) as session:
        for step in steps:
            session.step(*step[world.rank])
    return [param.detach().clone() for param in net.parameters()]


@pytest.mark.parametrize("strategy", ["parameter-server", "parameter-server:cache=true", "all-reduce"])
@pytest.mark.parametrize("case", ["clipped", "batches differ", "accumulated", "a worker without data"])
def test_all_that_holds_for_whole_tables_holds_for_rows(case: str, strategy: str) -> None:
    settings = dict(CASES[case])
    steps = make_steps(3, settings.pop("sizes", lambda step, rank: [5]))
    make = functools.partial(optimized, "adagrad")
    want = plainly(make_words(sparse=False), make, steps, **settings)
    ours = together(3, strategy, make_words, make, steps, **settings)
    assert_close(ours[0], want)
    assert_same_bits(ours)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(
    "strategy", ["parameter-server:async", "stale:bound=0", "two-level", "worker-groups:groups=1", "downpour"]
)
def test_one_worker_is_plain_pytorch(strategy: str, clip: float | None) -> None:
    """One that waits for its own updates: else it may begin a step before the last one is there."""
    make = functools.partial(optimized, "adagrad")
    steps = make_steps(1)

    def work(world: World) -> list[Tensor]:
        net = make_words()
        with session_of(net, make(net), loss, world=world, strategy=strategy, clip_norm=clip) as session:
            for step in steps:
                session.step(*step[0])
                session.engine.generation.servers.settle()  # type: ignore[union-attr]
        return [param.detach().clone() for param in net.parameters()]

    (ours,) = in_threads(1, work, servers=2)
    assert_close(ours, plainly(make_words(sparse=False), make, steps, clip=clip))


@pytest.mark.parametrize("strategy", ["downpour:fetch=2,push=3", "downpour:fetch=3"])
def test_a_worker_with_a_copy_of_its_own_does_with_rows_what_it_does_with_whole_tables(strategy: str) -> None:
    make = functools.partial(optimized, "adagrad")
    steps = make_steps(1) * 2
    ends = []
    for sparse in (True, False):

        def work(world: World, sparse: bool = sparse) -> list[Tensor]:
            net = make_words(sparse=sparse)
            with session_of(net, make(net), loss, world=world, strategy=strategy) as session:
                for step in steps:
                    session.step(*step[0])
            return [param.detach().clone() for param in net.parameters()]

        ends.append(in_threads(1, work, servers=2)[0])
    for one, two in zip(*ends, strict=True):
        assert torch.allclose(one, two, atol=1e-12)


def test_an_optimizer_of_rows_alone() -> None:
    """SparseAdam's idea of time goes on for rows that a step does not touch, on whichever server they are."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            start = torch.randn(
                ROWS, COLUMNS, generator=torch.Generator().manual_seed(5), dtype=torch.float64
            )
            self.table = nn.Embedding.from_pretrained(start, freeze=False, sparse=True)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.table(tokens).mean(1)

    def make(net: nn.Module) -> Optimizer:
        return torch.optim.SparseAdam(list(net.parameters()), lr=0.1)

    steps = make_steps(2)
    want = Table()
    optimizer = make(want)
    for workers in steps:
        optimizer.zero_grad()
        for ((tokens, targets),) in workers:
            (loss(want, (tokens, targets)) / 2).backward()
        optimizer.step()

    def work(world: World) -> list[Tensor]:
        net = Table()
        with session_of(net, make(net), loss, world=world, strategy="parameter-server") as session:
            for step in steps:
                session.step(*step[world.rank])
        return [param.detach().clone() for param in net.parameters()]

    assert_close(in_threads(2, work, servers=3)[0], want)


def test_a_coordinator_gets_whole_gradients() -> None:
    def make(net: nn.Module) -> Optimizer:
        return torch.optim.LBFGS(net.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    (step,) = make_steps(2)[:1]
    everything = [torch.cat(part) for part in zip(*(batch for (batch,) in step), strict=True)]
    want = make_words(sparse=False)
    optimizer = make(want)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(want, (everything[0], everything[1]))
        value.backward()
        return value

    optimizer.step(closure)
    assert_close(together(2, "sandblaster:portion=3", make_words, make, [step])[0], want)


def test_a_table_that_another_layer_uses_whole() -> None:
    """Tied to the output, it has a gradient of all rows after all."""

    class Tied(nn.Module):
        def __init__(self, *, sparse: bool) -> None:
            super().__init__()
            start = torch.randn(
                ROWS, COLUMNS, generator=torch.Generator().manual_seed(5), dtype=torch.float64
            )
            self.table = nn.Embedding.from_pretrained(start, freeze=False, sparse=sparse)
            self.often = True

        def forward(self, tokens: Tensor) -> Tensor:
            found = self.table(tokens).mean(1)
            self.often = not self.often
            return found @ self.table.weight.T if self.often else found

    make = functools.partial(optimized, "adagrad")
    steps = make_steps(1)
    (ours,) = together(1, "parameter-server", lambda: Tied(sparse=True), make, steps)
    assert_close(ours, plainly(Tied(sparse=False), make, steps))


@pytest.mark.processes
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_of_rows_goes_on_with_other_servers_or_whole_tables(
    optimizer: str, tmp_path: Path
) -> None:
    make = functools.partial(optimized, optimizer)
    steps = make_steps(2)
    want = plainly(make_words(sparse=False), make, steps)
    ours: list[list[Tensor]] = []
    for number, (strategy, servers) in enumerate(
        [("parameter-server", 3), ("all-reduce", 0), ("parameter-server", 1)]
    ):
        part = steps[2 * number : 2 * number + 2]

        def work(
            world: World, strategy: str = strategy, part: Steps = part, first: bool = number == 0
        ) -> list[Tensor]:
            net = make_words(sparse=strategy == "parameter-server")
            session = session_of(net, make(net), loss, world=world, strategy=strategy)
            if not first:
                assert session.resume(tmp_path) is not None
            for step in part:
                session.step(*step[world.rank])
            session.save(tmp_path)
            session.close()
            return [param.detach().clone() for param in net.parameters()]

        ours = in_threads(2, work, servers=servers)
    assert_close(ours[0], want)


def test_a_table_that_is_pushed_every_few_steps() -> None:
    """The mean over the steps, of a row over all of them, also those in which it was not touched."""
    steps = make_steps(2)
    want = make_words(sparse=False)
    rare = torch.optim.SGD(want.table.parameters(), lr=0.5)  # type: ignore[union-attr,operator]
    usual = torch.optim.SGD([*want.bag.parameters(), *want.out.parameters()], lr=0.5)  # type: ignore[union-attr,operator]
    for number, workers in enumerate(steps, start=1):
        for (batch,) in workers:
            (loss(want, batch) / 2).backward()
        usual.step()
        usual.zero_grad()
        if number % 2 == 0 or number == len(steps):
            want.table.weight.grad /= (number - 1) % 2 + 1  # type: ignore[union-attr,operator]
            rare.step()
            rare.zero_grad()
    for strategy in ("parameter-server:every=table=2", "parameter-server:every=table=2,cache=true"):
        ours = together(2, strategy, make_words, functools.partial(optimized, "sgd"), steps)
        assert_close(ours[0], want)
        assert_same_bits(ours)


@pytest.mark.parametrize("strategy", ["parameter-server", "all-reduce"])
def test_an_optimizer_that_takes_no_rows_is_refused(strategy: str) -> None:
    def work(world: World) -> Session:
        net = make_words()
        return session_of(net, torch.optim.Adam(net.parameters()), loss, world=world, strategy=strategy)

    with pytest.raises(UsageError, match=r"Adam does not take .* use SGD or Adagrad without weight decay"):
        in_threads(1, work, strategy=strategy)
