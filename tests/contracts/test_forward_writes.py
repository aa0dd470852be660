"""A model that writes into its parameters while it computes: as in one process, or refused with the way out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from manyhands.cluster.worker.world import World
from manyhands.engine.session import Session
from manyhands.errors import UsageError
from tests.sessions import session_of
from tests.threads import in_threads

STEPS = 10
Write = Callable[[nn.Linear], None]
Between = Callable[[nn.Module], None]


def nothing(layer: nn.Module) -> None:
    pass


def decay(layer: nn.Linear) -> None:
    layer.weight.data.mul_(0.9)


def decay_counted(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(0.9)


def normalise(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.copy_(F.normalize(layer.weight, dim=1))


def limit(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.clamp_(-0.2, 0.2)


def mask(layer: nn.Linear) -> None:
    layer.weight.data[:, ::2] = 0.0


WRITES: dict[str, Write] = {"decay": decay, "counted": decay_counted, "normalise": normalise}
LIMITS: dict[str, Write] = {"limit": limit, "mask": mask}


class Net(nn.Module):
    def __init__(self, write: Write) -> None:
        super().__init__()
        self.write = write
        self.inside, self.out = nn.Linear(4, 6).double(), nn.Linear(6, 1).double()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator).double() * 0.3)

    def forward(self, inputs: Tensor) -> Any:
        self.write(self.inside)
        return self.out(torch.tanh(self.inside(inputs)))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def make_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    inputs = [torch.randn(8, 4, generator=generator).double() for _ in range(STEPS)]
    return [(one, one.sum(1, keepdim=True)) for one in inputs]


BATCHES = make_batches()


def values(net: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in net.parameters()]


def make_optimizer(net: nn.Module) -> SGD:
    return SGD(net.parameters(), lr=0.1, momentum=0.5)


def plainly(write: Write) -> list[Tensor]:
    net = Net(write)
    optimizer = make_optimizer(net)
    for batch in BATCHES:
        optimizer.zero_grad()
        loss(net, batch).backward()
        optimizer.step()
    return values(net)


@contextmanager
def closed(session: Session, world: World) -> Iterator[None]:
    """A worker that fails lets go of the memory."""
    try:
        yield
    except Exception:
        if isinstance(world, World):
            session.close()
        raise
    session.close()


def one_step(session: Session, batch: Any) -> None:
    session.step(batch)


def in_halves(session: Session, batch: Any) -> None:
    session.backward(batch)
    session.update()


def trained(
    write: Write, world: World, *, between: Between = nothing, step: Any = one_step, **settings: Any
) -> list[Tensor]:
    net = Net(write)
    session = session_of(net, make_optimizer(net), loss, world=world, **settings)
    with closed(session, world):
        for batch in BATCHES:
            between(net)
            step(session, tuple(part[world.rank :: world.size] for part in batch))
    return values(net)


def assert_close(found: list[list[Tensor]], want: list[Tensor]) -> None:
    for got in found:
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", WRITES)
def test_one_worker_alone_writes_as_it_likes(name: str) -> None:
    assert_close(in_threads(1, lambda world: trained(WRITES[name], world)), plainly(WRITES[name]))


@pytest.mark.parametrize("name", WRITES)
def test_a_write_that_is_not_that_of_one_process_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"parameter 'inside.weight' is written to while.*parametrization"):
        in_threads(2, lambda world: trained(WRITES[name], world))


def test_it_is_refused_in_the_half_of_a_step() -> None:
    with pytest.raises(UsageError, match=r"parameter 'inside.weight' is written to while"):
        in_threads(2, lambda world: trained(decay, world, step=in_halves))


@pytest.mark.parametrize("strategy", ["all-reduce", "all-reduce:topology=ring", "parameter-server:sync"])
@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_is_as_in_one_process(name: str, strategy: str) -> None:
    found = in_threads(2, lambda world: trained(LIMITS[name], world, strategy=strategy), strategy=strategy)
    assert_close(found, plainly(LIMITS[name]))


@pytest.mark.parametrize("name", WRITES)
def test_copies_that_all_write_the_same_are_as_in_one_process(name: str) -> None:
    found = in_threads(2, lambda world: trained(WRITES[name], world, strategy="all-reduce:topology=ring"))
    assert_close(found, plainly(WRITES[name]))


def test_copies_that_are_written_to_differently_are_refused() -> None:
    def work(world: World) -> None:
        def some(layer: nn.Linear) -> None:
            with torch.no_grad():
                layer.weight[world.rank].mul_(0.9)

        trained(some, world, strategy="all-reduce:topology=ring")

    with pytest.raises(UsageError, match="is not the same on workers 0 and 1 any more"):
        in_threads(2, work)


def test_a_model_in_shards_is_refused() -> None:
    """What it writes is given up after each layer. A pipeline finds that its first batch computes something else."""
    with pytest.raises(UsageError, match=r"weight' is written to while.* is lost"):
        in_threads(2, in_shards)


class Writing(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(inputs)


def in_shards(world: World) -> None:
    net = nn.Sequential(Writing(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    session = session_of(net, make_optimizer(net), loss, world=world, placement="sharded")
    with closed(session, world):
        for batch in BATCHES:
            session.step(batch)


def test_workers_that_train_alone_write_for_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    """Under averaging each worker's write is its own, like its steps."""
    in_threads(2, lambda world: trained(decay, world, strategy="local-sgd"))
    assert "is written to" not in capsys.readouterr().err


def test_workers_that_do_not_wait_are_warned(capsys: pytest.CaptureFixture[str]) -> None:
    in_threads(2, lambda world: trained(nothing, world, strategy="hogwild"))
    assert "is written to" not in capsys.readouterr().err
    in_threads(2, lambda world: trained(decay_counted, world, strategy="hogwild"))
    assert "is written to while the model computes" in capsys.readouterr().err


def test_the_way_out_is_as_in_one_process() -> None:
    def decay_between(net: Any) -> None:
        net.inside.weight.data = net.inside.weight.data * 0.9

    assert_close(in_threads(2, lambda world: trained(nothing, world, between=decay_between)), plainly(decay))


# Tables that limit the norm of their rows

ROWS = 12


class Tables(nn.Module):
    def __init__(self, kind: Any, max_norm: float | None) -> None:
        super().__init__()
        self.table = kind(ROWS, 3, max_norm=max_norm)
        self.out = nn.Linear(3, 1)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))
        self.double()

    def forward(self, numbers: Tensor) -> Any:
        rows = self.table(numbers)
        return self.out(rows if rows.dim() == 2 else rows.mean(1))


def table_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    numbers = [torch.randint(0, ROWS, (8, 4), generator=generator) for _ in range(STEPS)]
    return [(one, one.double().mean(1, keepdim=True)) for one in numbers]


def train_table(net: nn.Module, world: World, *, keeps: bool, **settings: Any) -> list[Tensor]:
    session = session_of(net, SGD(net.parameters(), lr=0.1), loss, world=world, **settings)
    for batch in table_batches():
        if keeps:
            table: Any = net.table
            table.weight.data = torch.renorm(table.weight.data, 2, 0, 0.5)
        session.step(tuple(part[world.rank :: world.size] for part in batch))
    session.close()
    return values(net)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    "strategy", ["all-reduce", "all-reduce:topology=ring", "parameter-server:sync", "hogwild"]
)
def test_a_limit_of_rows_is_refused_before_the_first_step(kind: Any, strategy: str) -> None:
    def work(world: World) -> None:
        net = Tables(kind, 0.5)
        session_of(net, SGD(net.parameters(), lr=0.1), loss, world=world, strategy=strategy)

    with pytest.raises(UsageError, match=r"max_norm.*table.weight.data = torch.renorm\(.*, 2, 0, 0.5\)"):
        in_threads(2, work, strategy=strategy)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_limit_of_rows_by_its_way_out_is_that_of_one_process(kind: Any) -> None:
    plain = Tables(kind, 0.5)
    optimizer = SGD(plain.parameters(), lr=0.1)
    for batch in table_batches():
        optimizer.zero_grad()
        loss(plain, batch).backward()
        optimizer.step()
    with torch.no_grad():  # rows that the last steps have not looked up
        plain.table.weight.copy_(torch.renorm(plain.table.weight, 2, 0, 0.5))
    for got in in_threads(2, lambda world: train_table(Tables(kind, None), world, keeps=True)):
        got[0] = torch.renorm(got[0], 2, 0, 0.5)
        for one, other in zip(got, values(plain), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_limit_of_rows_stays_where_it_is_right() -> None:
    in_threads(1, lambda world: train_table(Tables(nn.Embedding, 0.5), world, keeps=False))
    in_threads(
        2, lambda world: train_table(Tables(nn.Embedding, 0.5), world, keeps=False, strategy="local-sgd")
    )


# A frozen copy of the model that follows it, as a teacher does


def follow(net: "Student") -> None:
    with torch.no_grad():
        for slow, fast in zip(net.teacher.parameters(), net.learner.parameters(), strict=True):
            slow.lerp_(fast, 0.2)


def follow_uncounted(net: "Student") -> None:
    for slow, fast in zip(net.teacher.parameters(), net.learner.parameters(), strict=True):
        slow.data.lerp_(fast.data, 0.2)


def follow_anew(net: "Student") -> None:
    for slow, fast in zip(net.teacher.parameters(), net.learner.parameters(), strict=True):
        slow.data = slow.data.lerp(fast.data, 0.2)


class Student(nn.Module):
    """It learns what its own past has computed."""

    def __init__(self, write: Callable[["Student"], None]) -> None:
        super().__init__()
        self.write = write
        self.learner, self.teacher = Net(nothing), Net(nothing).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.write(self)
        return self.learner(inputs) - 0.5 * self.teacher(inputs)


def taught(
    write: Callable[[Student], None], world: World | None, *, between: Any = nothing, **settings: Any
) -> list[Tensor]:
    """Without a world as plain PyTorch does."""
    net = Student(write)
    optimizer = make_optimizer(net.learner)
    if world is None:
        for batch in BATCHES:
            between(net)
            optimizer.zero_grad()
            loss(net, batch).backward()
            optimizer.step()
        return values(net)
    session = session_of(net, optimizer, loss, world=world, **settings)
    with closed(session, world):
        for batch in BATCHES:
            between(net)
            ours = slice(0, None) if "placement" in settings else slice(world.rank, None, world.size)
            session.step(tuple(part[ours] for part in batch))
    return values(net)


@pytest.mark.parametrize("write", [follow, follow_uncounted])
@pytest.mark.parametrize("settings", [{}, {"placement": "pipeline:stages=2"}], ids=str)
def test_a_frozen_copy_that_follows_in_forward_is_refused_where_workers_share_it(
    write: Callable[[Student], None], settings: dict[str, Any]
) -> None:
    """Or where a batch is computed in pieces: each would move it."""
    with pytest.raises(UsageError, match=r"parameter 'teacher\..* is written to while the model computes"):
        in_threads(2, lambda world: taught(write, world, **settings))


@pytest.mark.parametrize(
    ("workers", "strategy"), [(1, "all-reduce"), (2, "parameter-server:sync"), (2, "double-buffer")]
)
def test_a_frozen_copy_of_each_worker_follows_as_in_one_process(workers: int, strategy: str) -> None:
    found = in_threads(workers, lambda world: taught(follow, world, strategy=strategy), strategy=strategy)
    assert_close(found[:1], found[-1])
    if strategy != "double-buffer":  # which steps late
        assert_close(found, taught(follow, None))


def test_a_frozen_copy_that_is_assigned_between_steps_is_as_in_one_process() -> None:
    """The way out that the refusal names."""
    found = in_threads(2, lambda world: taught(nothing, world, between=follow_anew))
    assert_close(found, taught(nothing, None, between=follow_anew))
